"""Rows of an embedding table as they were at one time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from elasticcb.ps.growing_array import GrowingArray
from elasticcb.ps.id_index import IdIndex
from elasticcb.ps.table_rows import TableRows

Array = npt.NDArray[Any]


class TableSnapshot:
    """Copy on write: rows are kept when they change, and read from the table while they don't.

    Args:
        rows: of the table.
        initial_rows: of ids without a row.
        forget: tells the table, once, that nobody needs this any more.
    """

    def __init__(
        self, rows: TableRows, initial_rows: Callable[[Array], Array], forget: Callable[[TableSnapshot], None]
    ) -> None:
        self._rows, self._initial_rows, self._forget = rows, initial_rows, forget
        self._index = IdIndex()
        self._kept = GrowingArray((rows.dim,), rows.dtype)

    @property
    def kept(self) -> int:
        """How many rows have changed since."""
        return len(self._index)

    def keep(self, ids: Array, rows: Array) -> None:
        """Takes `rows` ([n, dim]) of `ids` (int64 [n], unique), which are about to change."""
        new = np.flatnonzero(self._index.find(ids) < 0)
        if len(new):
            places = self._index.insert(ids[new])
            self._kept.reserve(len(self._index))
            self._kept.array[places] = rows[new]

    def lookup(self, ids: Array) -> Array:
        """The rows of `ids` (int64 [n], unique), a new array [n, dim]."""
        result = np.empty((len(ids), self._rows.dim), self._rows.dtype)
        kept = self._index.find(ids)
        places = self._rows.index.find(ids)
        changed, present = kept >= 0, (kept < 0) & (places >= 0)
        new = ~changed & ~present
        result[changed] = self._kept.array[kept[changed]]
        result[present] = self._rows.read(places[present])
        if new.any():
            result[new] = self._initial_rows(ids[new])
        return result

    def release(self) -> None:
        """Frees what is kept. Nothing may be looked up afterwards."""
        forget, self._forget = self._forget, lambda snapshot: None
        forget(self)
        self._index, self._kept = IdIndex(), GrowingArray((0,), np.float32)
