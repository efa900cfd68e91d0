"""What `fit` trains on: batches by number, in epochs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

from elasticcb.proto import elasticcb_pb2 as pb
from elasticcb.rpc.tensors import Frame

# Asks the process that called `fit` for a batch.
NextBatch = Callable[[pb.NextBatchRequest], Frame[pb.NextBatchResponse]]


class BatchSource(ABC):
    """Batches by number, in epochs.

    The process that calls `fit` makes a source and pickles it (with cloudpickle); each worker unpickles its own.
    Files are opened when they are first read, after that. What batch `number` of an epoch holds depends on the
    seed, the epoch and the number, never on the process; sources that can't promise that say so.

    A process reads one range at a time. Epochs come in order, except that a task of an earlier one may be handed
    out again.

    Attributes:
      num_batches: in an epoch; None where that is only known at its end.
      ends_early: whether an epoch may end before `num_batches`; if not, a number may have no batch, and the next
        ones still have theirs.
      repeatable: whether a number names the same batch in the next run of the same program.
      num_records: in a pass over the data, where that is known.
      keeps_order: whether the n-th batch of a range is that of its n-th number: no number is left out.
    """

    num_batches: int | None
    ends_early = False
    repeatable = True
    num_records: int | None = None
    keeps_order = True

    @abstractmethod
    def batches(self, epoch: int, start: int, end: int) -> Iterator[Any]:
        """The batches `[start, end)` of an epoch, in order; fewer when the source ends before.

        Each is features, `(features,)`, `(features, labels)` or `(features, labels, sample_weight)`, as Keras
        packs them; leaves are NumPy arrays or tensors (dense, ragged, sparse), or None.
        """

    def first_batch(self) -> Any:
        """A batch to build a model with; None when there is none. Takes nothing from later reads."""
        return next(self.batches(0, 0, 1), None)

    def connect(self, next_batch: NextBatch) -> None:  # noqa: B027 - most sources hold their data
        """To be called on a worker before batches are read."""

    def close(self) -> None:  # noqa: B027 - most sources hold nothing
        """Frees what this process holds open. Files in the source's folder stay: the folder's owner removes it."""


class PassSource(BatchSource):
    """Batches that can be read again: a pass holds all of them once.

    Args:
      size: batches in a pass.
      steps: batches in an epoch, for epochs that are cut from the endless repetition of passes: an epoch goes
        on where the one before ended. None: an epoch is a pass.
    """

    num_batches: int

    def __init__(self, size: int, steps: int | None = None) -> None:
        self.size = size
        self.steps = steps
        self.num_batches = steps or size

    def batches(self, epoch: int, start: int, end: int) -> Iterator[Any]:
        first, end = epoch * self.num_batches + start, epoch * self.num_batches + min(end, self.num_batches)
        while first < end:
            number, offset = divmod(first, self.size)
            count = min(self.size - offset, end - first)
            yield from self.pass_batches(epoch, number, offset, offset + count)
            first += count

    @abstractmethod
    def pass_batches(self, epoch: int, number: int, start: int, end: int) -> Iterator[Any]:
        """The batches `[start, end)` of pass `number`, which belong to `epoch`."""


def source_seed(seed: int, *numbers: int) -> list[int]:
    """The seed of a generator for one purpose: `np.random.Generator(np.random.PCG64(source_seed(7, epoch)))`."""
    return [seed % (1 << 63), *numbers]
