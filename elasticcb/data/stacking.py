"""Stacks single records from any Python code into NumPy arrays of the declared dtypes, lists of varying length
included.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from elasticcb.errors import DataError

# Size of chunks passed from Python to TensorFlow: many records, because a call costs some 0.1 ms, but few bytes if
# records are large.
CHUNK_RECORDS = 1024
CHUNK_BYTES = 4 << 20

# Allowed conversions between kinds of NumPy dtypes; converting a float to an integer is a mistake.
_ACCEPTED_KINDS = {"b": "b", "i": "biu", "u": "biu", "f": "biuf", "c": "biufc", "V": "biuf"}


def flatten(spec: Any, value: Any) -> list[Any]:
    """The leaves of `value`, which must have the structure of `spec`: dicts and tuples; everything else is a leaf.

    Raises `ValueError` with the place where the structures differ.
    """
    if isinstance(spec, dict):
        if not isinstance(value, dict) or set(value) != set(spec):
            given = f"the keys {sorted(value)}" if isinstance(value, dict) else repr(type(value).__name__)
            raise ValueError(f"expected a dict with the keys {sorted(spec)}, got {given}")
        return [leaf for key in spec for leaf in flatten(spec[key], value[key])]
    if isinstance(spec, tuple):
        if not isinstance(value, tuple | list) or len(value) != len(spec):
            given = f"of {len(value)}" if isinstance(value, tuple | list) else repr(type(value).__name__)
            raise ValueError(f"expected a tuple of {len(spec)}, got {given}")
        return [leaf for part, item in zip(spec, value, strict=True) for leaf in flatten(part, item)]
    return [value]


def pack(spec: Any, leaves: Iterator[Any]) -> Any:
    """Packs `leaves`, in the order of `flatten`, into the structure of `spec`."""
    if isinstance(spec, dict):
        return {key: pack(part, leaves) for key, part in spec.items()}
    if isinstance(spec, tuple):
        parts = [pack(part, leaves) for part in spec]
        return type(spec)(*parts) if hasattr(spec, "_fields") else tuple(parts)
    return next(leaves)


def unstacked(chunks: Iterable[Any], spec: Any) -> Iterator[Any]:
    """The records of chunks: the inverse of `stack_records`."""
    for chunk in chunks:
        for row in zip(*flatten(spec, chunk), strict=True):
            yield pack(spec, iter(row))


def stack_records(records: Iterable[Any], spec: Any, name: str, start: int, size: int) -> Iterator[Any]:
    """Yields chunks of up to `size` records; shorter ones where dimensions that are unknown in `spec` change.

    Raises `DataError` with the source `name` and the number of the record, counted from `start`, if a record does not
    match `spec`.
    """
    specs = flatten(spec, spec)
    rows: list[list[Any]] = []
    shapes: list[tuple[int, ...]] = []
    held_bytes = 0
    for number, record in enumerate(records, start):
        try:
            row = [to_leaf(value, leaf) for value, leaf in zip(flatten(spec, record), specs, strict=True)]
        except (ValueError, TypeError, OverflowError) as error:
            raise DataError(
                f"Record {number} of {name} does not match the reader's element_spec: {error}. The element_spec is "
                f"{spec}."
            ) from error
        row_shapes = [leaf.shape for leaf in row]
        if rows and (len(rows) == size or held_bytes > CHUNK_BYTES or row_shapes != shapes):
            yield _stack(rows, spec)
            rows, held_bytes = [], 0
        shapes = row_shapes
        rows.append(row)
        held_bytes += sum(leaf.nbytes if leaf.dtype.kind != "O" else _bytes_of(leaf) for leaf in row)
    if rows:
        yield _stack(rows, spec)


def in_batches(chunks: Iterable[Any], spec: Any, size: int) -> Iterator[Any]:
    """The records of `chunks` in chunks of `size`; only the last one may be smaller.

    Raises `DataError` if records of a batch differ in shape.
    """
    held: list[list[Any]] = []  # parts of the next batch, by leaf
    count = 0
    for chunk in chunks:
        leaves = flatten(spec, chunk)
        first, rows = 0, len(leaves[0])
        while first < rows:
            stop = min(first + size - count, rows)
            held.append([leaf[first:stop] for leaf in leaves])
            count += stop - first
            first = stop
            if count == size:
                yield pack(spec, map(_joined, zip(*held, strict=True)))
                held, count = [], 0
    if held:
        yield pack(spec, map(_joined, zip(*held, strict=True)))


def _joined(parts: Sequence[Any]) -> Any:
    if len(parts) == 1:
        return parts[0]
    if isinstance(parts[0], RaggedRows):
        return RaggedRows.joined(parts)
    if len({part.shape[1:] for part in parts}) > 1:
        shapes = " and ".join(map(str, dict.fromkeys(part.shape[1:] for part in parts)))
        raise DataError(
            f"Records of one batch have the shapes {shapes}, so they can't be stacked. Define `feed`, which gets "
            "single records, and pad them there."
        )
    return np.concatenate(parts)


def object_array(values: Sequence[bytes]) -> Any:
    """`values` as an array of objects of shape (n,); NumPy's own strings would lose trailing zero bytes."""
    array = np.empty(len(values), object)
    array[:] = values
    return array


def _bytes_of(strings: Any) -> int:
    return sum(map(len, strings.reshape(-1)))


def _stack(rows: list[list[Any]], spec: Any) -> Any:
    return pack(spec, (np.stack(column) for column in zip(*rows, strict=True)))


def to_leaf(value: Any, spec: Any) -> Any:
    """Converts `value` to an array with dtype and shape of the TensorSpec `spec`; raises an explanation if
    impossible."""
    dtype = np.dtype(spec.dtype.as_numpy_dtype)
    if dtype.kind == "O":
        array = _strings(value)
    else:
        array = np.asarray(value)
        # NumPy treats an empty list as floats.
        if array.size and array.dtype.kind not in _ACCEPTED_KINDS.get(dtype.kind, "") and array.dtype != dtype:
            raise ValueError(f"expected {dtype.name}, got {_shortened(value)}")
        given, array = array, np.asarray(value, dtype)
        if dtype.kind in "iu" and not np.can_cast(given.dtype, dtype) and (array != given).any():
            raise ValueError(f"expected {dtype.name}, which can't represent {_shortened(value)}")
    if not spec.shape.is_compatible_with(array.shape):
        raise ValueError(f"expected the shape {spec.shape}, got {array.shape}")
    return array


def _strings(value: Any) -> Any:
    if isinstance(value, bytes | str):
        array = np.empty((), object)
        array[()] = value if isinstance(value, bytes) else value.encode()
        return array
    array = np.array(value, dtype=object)
    flat = [item.encode() if isinstance(item, str) else item for item in array.reshape(-1)]
    wrong = [item for item in flat if not isinstance(item, bytes)]
    if wrong:
        raise ValueError(f"expected a string, got {_shortened(wrong[0])}")
    return object_array(flat).reshape(array.shape)


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


class RaggedRows:
    """Rows of varying length, like a `tf.RaggedTensor` of NumPy arrays.

    Args:
        splits: row i has the values `[splits[i], splits[i + 1])`; int64.
        values: an array, or `RaggedRows` for nested lists.
    """

    def __init__(self, splits: Any, values: Any) -> None:
        self.splits, self.values = splits, values

    def __len__(self) -> int:
        return len(self.splits) - 1

    def __getitem__(self, rows: slice) -> RaggedRows:
        start, stop, _ = rows.indices(len(self))
        splits = self.splits[start : stop + 1]
        return RaggedRows(splits - splits[0], self.values[splits[0] : splits[-1]])

    def __iter__(self) -> Iterator[Any]:
        for start, stop in zip(self.splits[:-1], self.splits[1:], strict=True):
            yield self.values[start:stop]

    @property
    def nbytes(self) -> int:
        return int(self.splits.nbytes + self.values.nbytes)

    @property
    def components(self) -> list[Any]:
        """The innermost values, and splits from the outermost."""
        below = self.values.components if isinstance(self.values, RaggedRows) else [self.values]
        return [below[0], self.splits, *below[1:]]

    @classmethod
    def joined(cls, parts: Sequence[RaggedRows]) -> RaggedRows:
        """The rows of all `parts`."""
        starts = np.cumsum([0, *(part.splits[-1] for part in parts)])
        splits = [part.splits[1:] + start for part, start in zip(parts, starts[:-1], strict=True)]
        return cls(np.concatenate([[0], *splits]), _joined([part.values for part in parts]))

    @classmethod
    def empty(cls, spec: Any) -> RaggedRows:
        """No rows of a `tf.RaggedTensorSpec` of one row."""
        inner = spec.shape[spec.ragged_rank + 1 :]
        values: Any = np.empty((0, *inner), spec.dtype.as_numpy_dtype)
        for _ in range(spec.ragged_rank + 1):
            values = cls(np.zeros(1, np.int64), values)
        return values
