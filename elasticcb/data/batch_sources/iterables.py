"""Batches that can only be iterated over, such as those of a `tf.data.Dataset` or a generator.

Workers request them from the caller's process, or read them from a file that it has written.
"""

from __future__ import annotations

import itertools
import logging
import pickle
import secrets
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from elasticcb.data.batch_sources import keras_data
from elasticcb.data.batch_sources.service import DataService, unpacked
from elasticcb.data.batches import BatchSource, NextBatch, PassSource
from elasticcb.proto import elasticcb_pb2 as pb

_LOGGER = logging.getLogger(__name__)

_PARTS = ("Take", "Skip", "Shard")  # in names of classes of datasets
_PYTHON = {"PyFunc", "PyFuncStateless", "EagerPyFunc"}  # operations
_LARGE_BYTES = 1 << 30


class ServedSource(BatchSource):
    """Batches that the process that calls `fit` iterates over; each goes to the worker that asks next.

    Each batch of a pass goes to one worker, so it is seen at most once; exactly once if no worker dies. Batches that a
    worker read but did not train before it died are not repeated: the epoch is shorter, or, with `steps`, reads further
    into the pass. Which batches belong to which range is decided when they are requested.

    The original object, in the caller's process, returns only the first batch, without taking it from the workers.

    Args:
      batches: an iterable, iterated once per pass.
      size: number of batches in a pass, if known.
      steps: as in `PassSource`.

    Attributes:
      runs_python: whether Python code of the user's makes the batches, which may read the model.

    Raises `ValueError` if there is no batch.
    """

    ends_early = True
    repeatable = False

    def __init__(
        self,
        batches: Iterable[Any],
        *,
        size: int | None,
        steps: int | None,
        service: DataService,
    ) -> None:
        self.num_batches = steps or size
        self.runs_python = _runs_python(batches)
        self.fixed = keras_data.fixed_rows(batches)
        first_pass = iter(batches)
        first = next(first_pass, None)
        if first is None:
            raise ValueError(f"{_kind(batches)} must yield at least one batch. Received an empty one.")
        first_batch = keras_data.to_batch(first)
        self._layout = Layout(first_batch)
        self._first = self._layout.arrays(first_batch)
        self._service: DataService | None = service  # in the serving process; this copy does not read batches
        # The inspected batch belongs to the first pass; a generator could not yield it again.
        passes: Iterator[Any] = itertools.chain(
            [itertools.chain([first], first_pass)], map(iter, itertools.repeat(batches))
        )
        if steps is None and size is not None:
            passes = (_with_one_more(batches, each, size) for each in passes)
        self._number = service.register(passes, self._arrays_of, size, by_epoch=steps is None)
        self._next_batch: NextBatch | None = None  # in a reading process
        self._reader = self._asked = 0

    def _arrays_of(self, batch: Any) -> list[Any]:
        return self._layout.arrays(keras_data.to_batch(batch))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_service": None, "_next_batch": None}

    def connect(self, next_batch: NextBatch) -> None:
        self._next_batch, self._reader, self._asked = next_batch, secrets.randbits(62), 0

    def batches(self, epoch: int, start: int, end: int) -> Iterator[Any]:
        if self.num_batches is not None:
            end = min(end, self.num_batches)
        if self._service is not None:
            yield from [self.first_batch()][start:end]
            return
        assert self._next_batch is not None
        for _ in range(start, end):
            self._asked += 1
            request = pb.NextBatchRequest(source=self._number, epoch=epoch, reader=self._reader, number=self._asked)
            arrays = unpacked(self._next_batch(request))
            if arrays is None:
                return
            yield self._layout.batch(arrays)

    def first_batch(self) -> Any:
        return self._layout.batch(self._first)

    def close(self) -> None:
        if self._service is not None:
            self._service.release(self._number)


def _with_one_more(batches: Iterable[Any], one_pass: Iterator[Any], size: int) -> Iterator[Any]:
    for number, batch in enumerate(one_pass, 1):
        if number == size:
            begin_one_more(batches)
        yield batch


def begin_one_more(batches: Iterable[Any]) -> None:
    """Begins another pass at the end of one, as Keras does with TensorFlow: the next `shuffle` depends on it."""
    if keras.backend.backend() == "tensorflow":
        iter(batches)


def chooses_anew(dataset: tf.data.Dataset, steps: int | None) -> bool:
    """Whether each pass over a dataset has other records, because it takes a part of what is shuffled."""
    pending = [(dataset, steps is not None)]
    while pending:
        dataset, is_part = pending.pop()
        kind = type(dataset).__name__
        if is_part and "Shuffle" in kind and getattr(dataset, "_reshuffle_each_iteration", True):
            return True
        is_part = is_part or any(name in kind for name in _PARTS)
        pending += [(source, is_part) for source in dataset._inputs()]
    return False


def _runs_python(batches: Any) -> bool:
    if not isinstance(batches, tf.data.Dataset):
        return True
    pending, seen = [batches], set()
    while pending:
        dataset = pending.pop()
        if id(dataset) not in seen:
            seen.add(id(dataset))
            pending += dataset._inputs()
            for wrapped in dataset._functions():
                graph = wrapped.function.graph.as_graph_def()
                nodes = [*graph.node, *(node for function in graph.library.function for node in function.node_def)]
                if any(node.op in _PYTHON for node in nodes):
                    return True
    return False


class StoredSource(PassSource):
    """All batches of an iterable, in order, each once per pass: written to a file, and then read from it by number.

    They are read when the source is created, in the creating process, so any iterable works: a `tf.data.Dataset` or a
    generator. The file is not loaded into memory as a whole.

    Args:
      batches: an iterable; an endless one needs a `limit`.
      limit: maximum number of batches to read; None: all.

    Raises `ValueError` if there is no batch.
    """

    def __init__(self, batches: Iterable[Any], *, limit: int | None, folder: Path) -> None:
        offsets = [0]
        self.fixed = keras_data.fixed_rows(batches)
        with tempfile.NamedTemporaryFile(prefix="batches-", suffix=".bin", dir=folder, delete=False) as file:
            self._path = file.name
            for batch in map(keras_data.to_batch, itertools.islice(batches, limit)):
                if len(offsets) == 1:
                    self._layout = Layout(batch)
                pickle.dump(self._layout.arrays(batch), file, protocol=pickle.HIGHEST_PROTOCOL)
                offsets.append(file.tell())
                if limit is None and offsets[-1] >= _LARGE_BYTES > offsets[-2]:
                    _LOGGER.warning(
                        "%s: wrote %d batches to %s so far. If the data is endless, pass the number of steps.",
                        _kind(batches),
                        len(offsets) - 1,
                        self._path,
                    )
        if len(offsets) == 1:
            raise ValueError(f"{_kind(batches)} must yield at least one batch. Received an empty one.")
        self._offsets = np.array(offsets, np.int64)
        super().__init__(len(offsets) - 1)

    def pass_batches(self, epoch: int, number: int, start: int, end: int) -> Iterator[Any]:
        with open(self._path, "rb") as file:
            file.seek(int(self._offsets[start]))
            for _ in range(start, end):
                yield self._layout.batch(pickle.load(file))


@dataclass(frozen=True)
class _Leaf:
    """The components of a leaf: `count` arrays, starting with number `first`."""

    first: int
    dtypes: tuple[tf.DType, ...]
    spec: tf.TypeSpec | None  # TypeSpec of a ragged or sparse tensor


class Layout:
    """The structure of a source's batches, and how to split them into NumPy arrays and reassemble them: ragged and
    sparse tensors by their components.
    """

    def __init__(self, batch: Any) -> None:
        self.dtypes: list[tf.DType] = []
        self._leaves = keras_data.map_arrays(self._leaf, batch)

    def arrays(self, batch: Any) -> list[Any]:
        """The arrays of `batch`. Raises `ValueError` if its structure differs from the others."""
        if Layout(batch) != self:
            raise ValueError(f"All batches must have the same structure and dtypes: {self}. Received: {Layout(batch)}")
        flat: list[Any] = []
        keras_data.map_arrays(lambda leaf: flat.extend(_parts(leaf)), batch)
        return flat

    def batch(self, arrays: Sequence[Any]) -> Any:
        """Reassembles a batch from `arrays`: numbers as NumPy arrays, everything else as tensors."""

        def join(leaf: _Leaf) -> Any:
            parts = arrays[leaf.first : leaf.first + len(leaf.dtypes)]
            if leaf.spec is not None:
                tensors = [tf.constant(part, dtype) for part, dtype in zip(parts, leaf.dtypes, strict=True)]
                return tf.nest.pack_sequence_as(leaf.spec, tensors, expand_composites=True)
            return tf.constant(parts[0], tf.string) if leaf.dtypes[0] == tf.string else parts[0]

        return keras_data.map_arrays(join, self._leaves)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and self._leaves == other._leaves

    __hash__ = None  # type: ignore[assignment]

    def __str__(self) -> str:
        def name(leaf: _Leaf) -> str:
            kind = "" if leaf.spec is None else type(leaf.spec).__name__.removesuffix("TensorSpec").lower() + " "
            return kind + leaf.dtypes[0].name

        return str(keras_data.map_arrays(name, self._leaves))

    def _leaf(self, value: Any) -> _Leaf:
        spec: tf.TypeSpec | None = None
        if isinstance(value, tf.RaggedTensor):
            spec = tf.RaggedTensorSpec(None, value.dtype, value.ragged_rank, value.row_splits.dtype)
        elif isinstance(value, tf.SparseTensor):
            spec = tf.SparseTensorSpec(None, value.dtype)
        first = len(self.dtypes)
        self.dtypes += [tf.as_dtype(part.dtype) if part.dtype.kind != "O" else tf.string for part in _parts(value)]
        return _Leaf(first, tuple(self.dtypes[first:]), spec)


def _parts(leaf: Any) -> list[Any]:
    if isinstance(leaf, tf.RaggedTensor | tf.SparseTensor):
        return [part.numpy() for part in tf.nest.flatten(leaf, expand_composites=True)]
    return [np.asarray(leaf)]


def _kind(batches: Any) -> str:
    return "The tf.data.Dataset" if isinstance(batches, tf.data.Dataset) else "The generator or loader"
