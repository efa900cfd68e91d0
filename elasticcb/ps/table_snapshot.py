"""An embedding table as it was at one time, while training goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from elasticcb.errors import ElasticCBError
from elasticcb.ps.cold_rows import HeldColdRows, ReadRows
from elasticcb.ps.table_rows import TableRows
from elasticcb.rpc.tensors import Array
from elasticcb.sharding.table_state import TableState

CHUNK_BYTES = 4 << 20  # of rows that are read under the lock at once


class TableSnapshot:
    """Copy on write: rows are kept when they change, and read from the table while they don't.

    Args:
        rows: of the table.
        initial_rows: of ids without a row; with it, rows can be looked up by id. Without it, all is read from the first
            row to the last, with slots and counts.
        since: only rows that were trained after this version are read; None: all.
        cold: reads the rows on disk, as they are now, by id; None: there are none.
        held_cold: those to be read behind the others.
    """

    def __init__(
        self,
        rows: TableRows,
        initial_rows: Callable[[Array], Array] | None = None,
        since: int | None = None,
        cold: ReadRows | None = None,
        held_cold: HeldColdRows | None = None,
    ) -> None:
        self._rows, self._initial_rows = rows, initial_rows
        self._cold, self._held_cold = cold, held_cold
        self._whole = initial_rows is None
        self._end = len(rows)
        self._first = 0  # place before which nothing is read any more
        # By place: 0 while the row is unchanged, else the place in `_kept`, from 1; -1 for one that is never read.
        self._marks = np.zeros(self._end, np.int32)
        self._wanted: Array | None = None  # places, in order; None: all
        if since is not None:
            wanted = rows.used > since
            self._wanted = np.flatnonzero(wanted)
            np.subtract(wanted, 1, out=self._marks, dtype=np.int32)
        slots = rows.initial_slots if self._whole else {}
        self._kept = TableRows(rows.dim, rows.dtype, slots, rows.held_dtype)
        rows.snapshots.append(self)

    @property
    def kept(self) -> int:
        """How many rows have changed before they were read."""
        return len(self._kept)

    def __len__(self) -> int:
        """How many rows there are to read."""
        return self._in_memory + (0 if self._held_cold is None else len(self._held_cold))

    @property
    def _in_memory(self) -> int:
        return self._end if self._wanted is None else len(self._wanted)

    def keep(self, places: Array, counts_only: bool) -> None:
        """Takes what is at `places` (int64 [n], unique), which is about to change; or only counts are."""
        if counts_only and not self._whole:
            return
        places = places[(places >= self._first) & (places < self._end)]
        places = places[self._marks.take(places) == 0]
        if len(places):
            state = self._rows.at(places) if self._whole else TableState(*self._rows.ids_and_rows_at(places))
            self._marks[places] = np.arange(len(self._kept) + 1, len(self._kept) + len(places) + 1)
            self._kept.fill(state)

    def lookup(self, ids: Array) -> Array:
        """The rows of `ids` (int64 [n], unique), a new array [n, dim]."""
        result = np.empty((len(ids), self._rows.dim), self._rows.dtype)
        kept, places = self._kept.index.find(ids), self._rows.index.find(ids)
        known = (kept < 0) & (places >= 0) & (places < self._end)
        # In the place of a row that was kept, there may be another one by now.
        present = np.flatnonzero(known)
        present = present[self._marks.take(places[present]) == 0]
        changed = np.flatnonzero(kept >= 0)
        new = np.ones(len(ids), bool)
        new[present] = new[changed] = False
        result[changed] = self._kept.read(kept[changed])
        result[present] = self._rows.read(places[present])
        if self._cold is not None and new.any():
            wanted = np.flatnonzero(new)
            found, state = self._cold(ids[wanted])
            result[wanted[found]] = state.rows
            new[wanted[found]] = False
        if new.any():
            assert self._initial_rows is not None
            result[new] = self._initial_rows(ids[new])
        return result

    def read(self, start: int, count: int) -> TableState:
        """Copies of rows [start, start + count) of all that there are to read, with slots and counts.

        The same may be read again, but none before `start`: they are not kept any more. Raises `ElasticCBError` after
        `release`.
        """
        if self not in self._rows.snapshots:  # rows have changed, and were not kept
            raise ElasticCBError(
                "An embedding table is not held any more as it was: the export or the checkpoint that it was held for "
                "is over."
            )
        end = min(start + count, self._in_memory)
        if start >= end:
            self._first = self._end
            if self._held_cold is not None:
                return self._held_cold.read(start - self._in_memory, count)
            return self._rows.slice(0, 0)
        places = np.arange(start, end) if self._wanted is None else self._wanted[start:end]
        self._first = int(places[0])
        marks = self._marks[places]
        # There may be fewer rows by now; those behind the last one are kept.
        if not len(self._rows):
            return self._kept.at(marks - 1)
        if self._wanted is None and end <= len(self._rows):
            state = self._rows.slice(start, end - start)
        else:
            state = self._rows.at(np.minimum(places, len(self._rows) - 1))
        changed = np.flatnonzero(marks)
        if len(changed):
            kept = self._kept.at(marks[changed] - 1)
            assert state.hits is not None
            assert state.used is not None
            state.ids[changed], state.rows[changed] = kept.ids, kept.rows
            state.hits[changed], state.used[changed] = kept.hits, kept.used
            for name, slot in state.slots.items():
                slot[changed] = kept.slots[name]
        return state

    def release(self) -> None:
        """Keeps nothing any more, and gives nothing."""
        if self in self._rows.snapshots:
            self._rows.snapshots.remove(self)
        self._cold = self._held_cold = None


class HeldTable:
    """A whole table as it was at one time, read in pieces by a thread of its own.

    Args:
        snapshot: whole.
        lock: under which the table changes; it is held for one piece at a time.
    """

    def __init__(self, snapshot: TableSnapshot, row_bytes: int, lock: AbstractContextManager[Any]) -> None:
        self._snapshot, self._lock = snapshot, lock
        self._rows = max(1, CHUNK_BYTES // row_bytes)  # of a piece

    def __len__(self) -> int:
        return len(self._snapshot)

    def read(self, start: int) -> TableState:
        """The piece that begins with row `start`; none before it may be read any more. Behind the last row, an empty
        one. Raises `ElasticCBError` after `release`."""
        with self._lock:
            return self._snapshot.read(start, self._rows)

    def pieces(self) -> Iterator[TableState]:
        """All of it, in order; at least one piece."""
        start = 0
        while True:
            piece = self.read(start)
            yield piece
            start += len(piece.ids)
            if start >= len(self):
                return

    def release(self) -> None:
        """It is not needed any more."""
        self._snapshot.release()
