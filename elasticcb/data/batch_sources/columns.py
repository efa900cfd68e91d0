"""Stored columns: arrays of all types that Keras accepts, from which rows are taken."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from elasticcb.data.batch_sources import keras_data
from elasticcb.data.batch_sources.blocks import Block, BlockReader, BlockWriter, block_of_memmap
from elasticcb.data.stacking import object_array

Rows = slice | np.ndarray  # a range of rows, or row numbers


@dataclass(frozen=True)
class DenseColumn:
    """Numbers: a block, cast after taking rows."""

    block: Block
    cast: np.dtype[Any] | None = None

    def take(self, rows: Rows, reader: BlockReader) -> Any:
        """A NumPy array; consecutive rows are not copied unless they are cast."""
        part = reader.array(self.block)[rows]
        return part if self.cast is None else part.astype(self.cast)


@dataclass(frozen=True)
class StringColumn:
    """Strings of shape `(n, *row_shape)`: their concatenated bytes, and the offset of each."""

    data: Block
    offsets: Block
    row_shape: tuple[int, ...]

    def take(self, rows: Rows, reader: BlockReader) -> Any:
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

    splits: tuple[Block, ...]
    values: DenseColumn | StringColumn

    def take(self, rows: Rows, reader: BlockReader) -> tf.RaggedTensor:
        nested = []
        for block in self.splits:
            splits, rows = _rows_of_splits(reader.array(block), rows)
            nested.append(splits)
        return tf.RaggedTensor.from_nested_row_splits(self.values.take(rows, reader), nested, validate=False)


@dataclass(frozen=True)
class SparseColumn:
    """A sparse array as compressed rows: the offset of each row, the other indices, and the values."""

    splits: Block
    indices: Block  # int64 of shape (values, rank - 1)
    values: DenseColumn | StringColumn
    row_shape: tuple[int, ...]

    def take(self, rows: Rows, reader: BlockReader) -> tf.SparseTensor:
        splits, inner = _rows_of_splits(reader.array(self.splits), rows)
        row_numbers = np.repeat(np.arange(len(splits) - 1, dtype=np.int64), np.diff(splits))
        indices = np.column_stack([row_numbers, reader.array(self.indices)[inner]])
        return tf.SparseTensor(indices, self.values.take(inner, reader), (len(splits) - 1, *self.row_shape))


Column = DenseColumn | StringColumn | RaggedColumn | SparseColumn


def store(array: Any, writer: BlockWriter) -> Column:
    """Writes one array of any type. Raises `ValueError` for one that TensorFlow can't represent."""
    block = block_of_memmap(array)
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


def _store_dense(array: Any, writer: BlockWriter) -> DenseColumn | StringColumn:
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
