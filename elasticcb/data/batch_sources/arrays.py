"""Batches of arrays, which are written to a file once and memory-mapped by all workers.

Each array becomes a column, whatever its type: numbers, strings, ragged or sparse. A batch takes rows of each.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from elasticcb.data.batch_sources import keras_data
from elasticcb.data.batches import PassSource, source_seed
from elasticcb.data.stacking import object_array

Rows = slice | np.ndarray  # a range of rows, or row numbers
_ALIGNMENT_BYTES = 64  # TensorFlow uses such arrays without a copy
_CHUNK_BYTES = 64 << 20


class ArraySource(PassSource):
    """Batches of a nested structure of arrays with the same number of rows; the last batch of a pass may be short.

    Numbers and row splits are mapped, not loaded. A `np.memmap` is not copied: workers map its own file.

    Args:
      arrays: leaves of any type that Keras accepts: NumPy arrays, tensors (dense, ragged, sparse), pandas frames and
        series, SciPy's sparse matrices; None stays None.
      shuffle: True: all rows, again for each pass; "batch": rows within each batch; False: no shuffling.
      steps: see `PassSource`.
      limit: maximum number of batches in a pass.
    """

    def __init__(
        self,
        arrays: Any,
        num_rows: int,
        batch_size: int,
        *,
        shuffle: bool | str = False,
        steps: int | None = None,
        limit: int | None = None,
        folder: Path,
        seed: int = 0,
    ) -> None:
        size = -(-num_rows // batch_size)
        super().__init__(min(size, limit or size), steps)
        self._num_rows = self.num_records = num_rows
        self._batch_size = batch_size
        self._shuffle = shuffle
        self._seed = seed
        # As for Keras's dataset: ragged batches have no fixed size, nor do others if the last one is shorter.
        self.fixed = [
            num_rows % batch_size == 0 and array is not None and not isinstance(array, tf.RaggedTensor)
            for array in tf.nest.flatten(arrays)
        ]
        self._reader = _BlockReader()
        self._order: tuple[int, Any] = (-1, None)  # order of the pass that was read last
        stored: dict[int, Column] = {}  # the same array may be features and labels
        with _BlockWriter(folder) as writer:

            def store_once(array: Any) -> Column:
                if id(array) not in stored:
                    stored[id(array)] = _store(array, writer)
                return stored[id(array)]

            self._columns = keras_data.map_arrays(store_once, arrays)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_order": (-1, None)}

    def pass_batches(self, epoch: int, number: int, start: int, end: int) -> Iterator[Any]:
        for index in range(start, end):
            yield self._take(self._rows(number, index))

    def close(self) -> None:
        self._reader.close()
        self._order = (-1, None)

    def _take(self, rows: Rows) -> Any:
        return keras_data.map_arrays(lambda column: column.take(rows, self._reader), self._columns)

    def _rows(self, number: int, index: int) -> Rows:
        first, end = index * self._batch_size, min((index + 1) * self._batch_size, self._num_rows)
        if not self._shuffle:
            return slice(first, end)
        if self._shuffle == "batch":
            return first + _generator(self._seed, number, index).permutation(end - first)
        if self._order[0] != number:
            order = np.arange(self._num_rows, dtype=np.int32 if self._num_rows < 1 << 31 else np.int64)
            _generator(self._seed, number).shuffle(order)
            self._order = (number, order)
        return self._order[1][first:end].astype(np.int64)


def _generator(seed: int, *numbers: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(source_seed(seed, *numbers)))


@dataclass(frozen=True)
class DenseColumn:
    """Numbers: a block, cast after taking rows."""

    block: _Block
    cast: np.dtype[Any] | None = None

    def take(self, rows: Rows, reader: _BlockReader) -> Any:
        """A NumPy array; consecutive rows are not copied unless they are cast."""
        part = reader.array(self.block)[rows]
        return part if self.cast is None else part.astype(self.cast)


@dataclass(frozen=True)
class StringColumn:
    """Strings of shape `(n, *row_shape)`: their concatenated bytes, and the offset of each."""

    data: _Block
    offsets: _Block
    row_shape: tuple[int, ...]

    def take(self, rows: Rows, reader: _BlockReader) -> Any:
        """A dense string tensor."""
        data, offsets = reader.array(self.data), reader.array(self.offsets)
        width = int(np.prod(self.row_shape, dtype=np.int64))
        if isinstance(rows, slice):
            positions = np.arange(rows.start * width, rows.stop * width)
        else:
            positions = (rows[:, None] * width + np.arange(width)).reshape(-1)
        strings = [
            data[start:stop].tobytes()
            for start, stop in zip(offsets[positions].tolist(), offsets[positions + 1].tolist(), strict=True)
        ]
        return tf.constant(object_array(strings).reshape(-1, *self.row_shape), tf.string)


@dataclass(frozen=True)
class RaggedColumn:
    """A ragged tensor: row splits from the outermost to the innermost, and the flat values."""

    splits: tuple[_Block, ...]
    values: DenseColumn | StringColumn

    def take(self, rows: Rows, reader: _BlockReader) -> tf.RaggedTensor:
        nested = []
        for block in self.splits:
            splits, rows = _rows_of_splits(reader.array(block), rows)
            nested.append(splits)
        return tf.RaggedTensor.from_nested_row_splits(self.values.take(rows, reader), nested, validate=False)


@dataclass(frozen=True)
class SparseColumn:
    """A sparse array as compressed rows: the offset of each row, the other indices, and the values."""

    splits: _Block
    indices: _Block  # int64 of shape (values, rank - 1)
    values: DenseColumn | StringColumn
    row_shape: tuple[int, ...]

    def take(self, rows: Rows, reader: _BlockReader) -> tf.SparseTensor:
        splits, inner = _rows_of_splits(reader.array(self.splits), rows)
        row_numbers = np.repeat(np.arange(len(splits) - 1, dtype=np.int64), np.diff(splits))
        indices = np.column_stack([row_numbers, reader.array(self.indices)[inner]])
        return tf.SparseTensor(indices, self.values.take(inner, reader), (len(splits) - 1, *self.row_shape))


Column = DenseColumn | StringColumn | RaggedColumn | SparseColumn


def _store(array: Any, writer: _BlockWriter) -> Column:
    """Writes one array of any type. Raises `ValueError` for one that TensorFlow can't represent."""
    block = _block_of_memmap(array)
    if block is not None and block.dtype.kind in "biufc":
        # Cast batch by batch: the file may be larger than memory.
        native = block.dtype.newbyteorder("=")
        return DenseColumn(block, keras_data.float_cast(native) or (None if block.dtype.isnative else native))
    if isinstance(array, np.ndarray) and array.dtype.kind in "fOUS":  # cast while it is written
        return _store_dense(array, writer)
    array = keras_data.to_tensorflow(array)
    if keras_data.is_sparse(array):
        sparse, indices, values = array
        return SparseColumn(
            writer.write(indices.row_splits.numpy()),
            writer.write(indices.flat_values.numpy()[:, 1:]),
            _store_dense(values.flat_values, writer),
            tuple(sparse.shape[1:]),
        )
    if isinstance(array, tf.RaggedTensor):
        splits = tuple(writer.write(part.numpy()) for part in array.nested_row_splits)
        return RaggedColumn(splits, _store_dense(array.flat_values, writer))
    return _store_dense(array, writer)


def _store_dense(array: Any, writer: _BlockWriter) -> DenseColumn | StringColumn:
    array = np.asarray(array)
    if array.dtype.kind not in "OUS":
        return DenseColumn(writer.write(array, keras_data.float_cast(array.dtype)))
    strings = [_encoded(value) for value in array.reshape(-1)]
    offsets = np.zeros(len(strings) + 1, np.int64)
    np.cumsum([len(string) for string in strings], out=offsets[1:])
    data = np.frombuffer(b"".join(strings), np.uint8)
    return StringColumn(writer.write(data), writer.write(offsets), array.shape[1:])


def _encoded(value: Any) -> bytes:
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, bytes):
        return value
    raise ValueError(
        f"Failed to convert a NumPy array to a Tensor (Unsupported object type {type(value).__name__}). An array of "
        "dtype object must contain only strings. Convert other arrays to a numeric dtype or to a tf.RaggedTensor."
    )


def _rows_of_splits(splits: Any, rows: Rows) -> tuple[Any, Rows]:
    """The row splits of `rows`, starting at 0, and the corresponding rows of the inner values."""
    starts, ends = splits[:-1][rows], splits[1:][rows]
    own = np.zeros(len(starts) + 1, splits.dtype)
    np.cumsum(ends - starts, out=own[1:])
    if isinstance(rows, slice):
        return own, slice(int(splits[rows.start]), int(splits[rows.stop]))
    return own, np.repeat(starts - own[:-1], ends - starts) + np.arange(own[-1])


@dataclass(frozen=True)
class _Block:
    """An array in a file: its bytes start at `offset`, in C order."""

    path: str
    offset: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def count(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))


class _BlockWriter:
    """Appends arrays to a new file in `folder`.

    Not one .npy per array: a Python memory map keeps its file open, and a structure may hold many arrays.
    """

    def __init__(self, folder: Path) -> None:
        descriptor, self.path = tempfile.mkstemp(prefix="arrays-", suffix=".bin", dir=folder)
        self._file = os.fdopen(descriptor, "wb")

    def __enter__(self) -> _BlockWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, array: Any, dtype: np.dtype[Any] | None = None) -> _Block:
        """Writes `array` as a block, cast to `dtype`, in the machine's byte order."""
        array = np.asarray(array)
        dtype = (dtype or array.dtype).newbyteorder("=")
        offset = self._file.tell()
        self._file.write(b"\0" * (-offset % _ALIGNMENT_BYTES))
        block = _Block(self.path, self._file.tell(), dtype, array.shape)
        rows = array.reshape(1) if not array.shape else array
        step = max(_CHUNK_BYTES // max(rows[:1].nbytes, 1), 1)
        for first in range(0, len(rows), step):
            self._file.write(np.ascontiguousarray(rows[first : first + step], dtype).view(np.uint8).data)
        return block


class _BlockReader:
    """Maps the files of blocks on first use, each file once."""

    def __init__(self) -> None:
        self._files: dict[str, Any] = {}

    def array(self, block: _Block) -> Any:
        """The array of a block, read-only, backed by the file."""
        if not block.count:
            return np.empty(block.shape, block.dtype)
        if block.path not in self._files:
            self._files[block.path] = np.asarray(np.memmap(block.path, np.uint8, "r"))
        data = self._files[block.path]
        end = block.offset + block.count * block.dtype.itemsize
        return data[block.offset : end].view(block.dtype).reshape(block.shape)

    def close(self) -> None:
        self._files.clear()

    def __reduce__(self) -> Any:
        return _BlockReader, ()


def _block_of_memmap(array: Any) -> _Block | None:
    """The block of an array that is a contiguous part of a memory-mapped file that other processes can map; else
    None."""
    if not isinstance(array, np.memmap) or array.filename is None or array._mmap is None:  # type: ignore[attr-defined]
        return None
    if array.mode == "c" or not array.flags.c_contiguous or array.dtype.hasobject:
        return None
    # `offset` is that of the originally opened array; the offset of a slice follows from its address.
    mapped = np.frombuffer(array._mmap, np.uint8)  # type: ignore[attr-defined]
    start = array.offset - array.offset % mmap.ALLOCATIONGRANULARITY
    inside = array.__array_interface__["data"][0] - mapped.__array_interface__["data"][0]
    return _Block(str(array.filename), start + inside, array.dtype, array.shape)
