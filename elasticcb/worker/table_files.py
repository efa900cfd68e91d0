"""A whole embedding table in one process, without needing memory for it: its rows are in a memory-mapped file."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import IO, Any

import numpy as np

from elasticcb.rpc.tensors import Array
from elasticcb.sharding.partition import VariableSpec
from elasticcb.sharding.table_spec import TableSpec

_CHUNK_ROWS = 1 << 16


def whole_tables(
    specs: Sequence[VariableSpec], read: Callable[[int], Iterable[tuple[Array, Array]]], folder: str
) -> Iterator[tuple[int, Array, Array]]:
    """(variable, ids, rows) of each table among the variables.

    Args:
        read: returns (ids [n], rows [n, dim]) of a table, by index, in pieces.
        folder: folder with enough space for the rows.
    """
    for index, spec in enumerate(specs):
        if spec.table:
            table = TableSpec.from_json(spec.table)
            yield index, *collect(read(index), folder, 0 if table.initializer else table.input_dim or 0)


def collect(pieces: Iterable[tuple[Array, Array]], folder: str, input_dim: int) -> tuple[Array, Array]:
    """The ids (int64 [n], in order) and rows ([n, dim]) of a table.

    Args:
        folder: folder with enough space for the rows; the file is unnamed and disappears with the array.
        input_dim: number of rows of a table that has all of them; 0: unknown.
    """
    found: list[Array] = []
    with tempfile.TemporaryFile(dir=folder) as file:
        count, rows = 0, np.zeros((0, 0), np.float32)
        for ids, piece in pieces:
            rows = _mapped(file, folder, piece.dtype, max(input_dim, count + len(ids)), piece.shape[1])
            if input_dim:
                rows[ids] = piece
            else:
                rows[count:] = piece
            found.append(ids)
            count += len(ids)
        if input_dim:
            return np.arange(input_dim, dtype=np.int64), rows
        ids = np.concatenate(found) if found else np.zeros(0, np.int64)
        if (ids[1:] > ids[:-1]).all():
            return ids, rows
        order = np.argsort(ids)
        with tempfile.TemporaryFile(dir=folder) as target:
            ordered = _mapped(target, folder, rows.dtype, *rows.shape)
            for start in range(0, count, _CHUNK_ROWS):
                ordered[start : start + _CHUNK_ROWS] = rows[order[start : start + _CHUNK_ROWS]]
            return ids[order], ordered


def _mapped(file: IO[bytes], folder: str, dtype: np.dtype[Any], rows: int, dim: int) -> Array:
    """The file, extended as needed, as an array that outlives it."""
    if not rows * dim:
        return np.zeros((rows, dim), dtype)
    begun, size = os.fstat(file.fileno()).st_size, rows * dim * dtype.itemsize
    if size > begun:
        try:
            # Otherwise a full disk would kill the process when it writes.
            os.posix_fallocate(file.fileno(), begun, size - begun)
        except OSError as error:
            raise OSError(error.errno, error.strerror, folder) from None
    return np.memmap(file, dtype, "r+", shape=(rows, dim))
