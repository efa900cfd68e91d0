"""The data of `fit`: batches by number, in epochs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

from elasticcb.proto import elasticcb_pb2 as pb
from elasticcb.rpc.tensors import Frame

# Requests a batch from the process that called `fit`.
NextBatch = Callable[[pb.NextBatchRequest], Frame[pb.NextBatchResponse]]


Purpose = Literal["fit", "validation", "evaluate", "predict"]


class BatchSource(ABC):
    """Batches by number, in epochs.

    The process that calls `fit` creates a source; it travels to each worker together with the model.
    Files are opened on the first read, after that. The content of batch `number` depends on the seed, the epoch and the
    number, never on the process; sources that can't guarantee this document it.

    A process reads one range at a time. Epochs are in order, except that a task of an earlier epoch may be repeated.

    Attributes:
      num_batches: number of batches in an epoch; None if it is only known at its end.
      ends_early: whether an epoch may end before `num_batches`. If not, a number may have no batch although later
        numbers have one.
      repeatable: whether a number means the same batch in the next run of the same program.
      num_records: number of records in a pass over the data, if known.
      given: what the user gave, if it travels with the source.
      fixed: for each tensor of a batch, in the order of `tf.nest.flatten`, whether all batches have the same number of
        rows, and Keras knows it before it reads them; empty: it knows none.
      keeps_order: whether the n-th batch of a range has its n-th number, that is, no number is skipped.
      first_epoch: the epoch that reads the data from its start: `initial_epoch`, as in Keras.
    """

    num_batches: int | None
    ends_early = False
    repeatable = True
    num_records: int | None = None
    keeps_order = True
    given: Any = None
    fixed: Sequence[bool] = ()
    first_epoch = 0

    @abstractmethod
    def batches(self, epoch: int, start: int, end: int) -> Iterator[Any]:
        """Yields the batches `[start, end)` of an epoch, in order; fewer if the source ends earlier.

        Each is features, `(features,)`, `(features, labels)` or `(features, labels, sample_weight)`, as Keras
        packs them; leaves are NumPy arrays or tensors (dense, ragged, sparse), or None.
        """

    def first_batch(self) -> Any:
        """A batch for building a model; None if there is none. Does not affect later reads."""
        return next(self.batches(self.first_epoch, 0, 1), None)

    def connect(self, next_batch: NextBatch) -> None:  # noqa: B027 - most sources hold their data
        """Call it on a worker before reading batches."""

    def select(self, inputs: Sequence[str] | None) -> None:  # noqa: B027 - only columns of files are selected
        """The names of the model's inputs. Call it before reading batches."""

    def was_read(self, passes: int) -> None:  # noqa: B027 - most data does not change by being read
        """Changes the caller's data as if its own process had read it `passes` times."""

    def follow(self) -> None:  # noqa: B027 - most sources have no copies of objects
        """Objects were changed, of which this source may have copies."""

    def close(self) -> None:  # noqa: B027 - most sources hold nothing
        """Closes this process's resources. Files in the source's folder are kept: the folder's owner removes them."""


class PassSource(BatchSource):
    """Batches that can be read repeatedly: a pass contains each of them once.

    Args:
      steps: number of batches in an epoch, each of which continues where the previous one ended; an epoch in which a
        pass ends has fewer, as in Keras. None: an epoch is a pass.
    """

    num_batches: int

    def __init__(self, size: int, steps: int | None = None) -> None:
        self.size = size
        self.steps = steps
        self.num_batches = min(steps or size, size)

    def batches(self, epoch: int, start: int, end: int) -> Iterator[Any]:
        epoch -= self.first_epoch
        number, part = divmod(epoch, -(-self.size // self.num_batches))
        offset = part * self.num_batches
        start, end = offset + start, min(offset + min(end, self.num_batches), self.size)
        if start < end:
            yield from self.pass_batches(epoch, number, start, end)

    @abstractmethod
    def pass_batches(self, epoch: int, number: int, start: int, end: int) -> Iterator[Any]:
        """Yields the batches `[start, end)` of pass `number`, which belong to `epoch`; both count from 0."""


def source_seed(seed: int, *numbers: int) -> list[int]:
    """The seed of a generator for one purpose: `np.random.Generator(np.random.PCG64(source_seed(7, epoch)))`."""
    return [seed % (1 << 63), *numbers]
