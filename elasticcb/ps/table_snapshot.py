"""An embedding table at one moment, while training continues."""

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

CHUNK_BYTES = 4 << 20  # rows read under the lock at a time


class TableSnapshot:
    """Copy on write: rows are copied when they change, and otherwise read from the table.

    Args:
        initial_rows: initial rows of ids; enables lookups by id. Without it, rows are read from first to last, with
            slots and counts.
        since: read only rows trained after this version; None: all.
        cold: reads the current rows on disk by id; None: there are none.
        held_cold: rows on disk to read after the others.
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
        self._first = 0  # earlier positions are not read any more
        # By position: 0 while the row is unchanged, else its position in `_kept`, from 1; -1 for rows never read.
        self._marks = np.zeros(self._end, np.int32)
        self._wanted: Array | None = None  # positions in order; None: all
        if since is not None:
            wanted = rows.used > since
            self._wanted = np.flatnonzero(wanted)
            np.subtract(wanted, 1, out=self._marks, dtype=np.int32)
        slots = rows.initial_slots if self._whole else {}
        self._kept = TableRows(rows.dim, rows.dtype, slots, rows.held_dtype)
        rows.snapshots.append(self)

    def __len__(self) -> int:
        """Number of rows to read."""
        return self._in_memory + (0 if self._held_cold is None else len(self._held_cold))

    @property
    def _in_memory(self) -> int:
        return self._end if self._wanted is None else len(self._wanted)

    def keep(self, places: Array, counts_only: bool) -> None:
        """Copies the rows at `places` (int64 [n], unique), which, or whose counts, are about to change."""
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
        # A row that was copied may have been replaced by another row.
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
        """Copies of rows [start, start + count) of those to read, with slots and counts.

        The same rows may be read again, but none before `start`, which are dropped. Raises `ElasticCBError` after
        `release`.
        """
        if self not in self._rows.snapshots:  # rows have changed and were not copied
            raise ElasticCBError(
                "A snapshot of an embedding table was released: the export or the checkpoint that it was made for "
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
        # There may be fewer rows by now; those after the last one were copied.
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
        """Drops all copies; reading fails from now on."""
        if self in self._rows.snapshots:
            self._rows.snapshots.remove(self)
        self._cold = self._held_cold = None


class HeldTable:
    """A whole table at one moment, read in pieces by another thread.

    Args:
        lock: protects the table; held for one piece at a time.
    """

    def __init__(self, snapshot: TableSnapshot, row_bytes: int, lock: AbstractContextManager[Any]) -> None:
        self._snapshot, self._lock = snapshot, lock
        self._rows = max(1, CHUNK_BYTES // row_bytes)  # per piece

    def __len__(self) -> int:
        return len(self._snapshot)

    def read(self, start: int) -> TableState:
        """The piece that starts with row `start`; earlier rows can't be read any more. After the last row, an empty
        one. Raises `ElasticCBError` after `release`."""
        with self._lock:
            return self._snapshot.read(start, self._rows)

    def pieces(self) -> Iterator[TableState]:
        """All pieces in order; at least one."""
        start = 0
        while True:
            piece = self.read(start)
            yield piece
            start += len(piece.ids)
            if start >= len(self):
                return

    def release(self) -> None:
        """Releases the snapshot."""
        self._snapshot.release()
