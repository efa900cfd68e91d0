"""The rows of an embedding table in memory and on disk, and operations on the whole table."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from elasticcb.errors import ElasticCBError
from elasticcb.ps import table_snapshot
from elasticcb.ps.cold_rows import ColdRows
from elasticcb.ps.table_limits import Newest
from elasticcb.ps.table_rows import TableRows
from elasticcb.ps.table_snapshot import HeldTable, TableSnapshot
from elasticcb.rpc.tensors import Array
from elasticcb.sharding.table_spec import TableSource
from elasticcb.sharding.table_state import TableState, joined

if TYPE_CHECKING:
    from elasticcb.storage.cold_store import ColdStore

_MOVED_AT_ONCE = 1 << 15  # rows moved to disk at a time


class StoredTable:
    """Rows by id. Training and limits are in `EmbeddingTable`."""

    def __init__(self, rows: TableRows, store: ColdStore | None, name: str) -> None:
        self.name = name
        self._rows, self._store = rows, store
        self._version = 0  # of the model
        self._left = 0  # number of rows that have left memory, or moved within it
        self._cold = self._no_rows_on_disk()
        # Versions, and ids of the rows that were removed then; None: nobody asks for them.
        self._gone: list[tuple[int, Array]] | None = None

    def _room_at_start(self, rows: int) -> int:
        """How many of `rows` rows fit into an empty table's memory. Raises `ElasticCBError` when some don't, and none
        may be left out."""
        raise NotImplementedError

    def _begin_anew(self, version: int) -> None:
        """All rows are about to be replaced by those of `version`."""
        self._version = version

    def __len__(self) -> int:
        """Rows in memory and on disk."""
        return len(self._rows) + (len(self._cold) if self._cold is not None else 0)

    def places(self, ids: Array) -> Array:
        """Current positions of the rows of `ids` (int64 [n]) in memory, -1 for missing ones: int64 [n]."""
        return self._rows.index.find(ids)

    @property
    def row_bytes(self) -> int:
        return self._rows.row_bytes

    @property
    def used(self) -> Array:
        return self._rows.used

    @property
    def value_bytes(self) -> int:
        """Bytes of the values of one row."""
        return self._rows.dim * self._rows.held_dtype.itemsize

    @property
    def slots(self) -> Collection[str]:
        """The names of the optimizer's slots."""
        return self._rows.initial_slots.keys()

    # -------------------------------------------------------------- moving to disk, removing

    def _no_rows_on_disk(self) -> ColdRows | None:
        """None if rows may not go to disk."""
        return None if self._store is None else ColdRows(self._store, self._rows.slice(0, 0))

    def _move_to_disk(self, places: Array) -> None:
        """Moves the rows at `places` (int64 [n])."""
        assert self._cold is not None
        places = np.sort(places)[::-1]  # the last ones first, so that the others keep their positions meanwhile
        for first in range(0, len(places), _MOVED_AT_ONCE):
            moving = places[first : first + _MOVED_AT_ONCE]
            self._cold.put(self._rows.at(moving))
            self._remove(moving)

    def _remove(self, places: Array) -> None:
        self._left += len(places)
        self._rows.remove(places)

    # -------------------------------------------------------------- all rows

    def hold(self, lock: AbstractContextManager[Any], since: int | None = None) -> HeldTable:
        """Like `export`, but read in pieces while training continues. Release it after use.

        Args:
            lock: must be held at each call of this table, but not while the pieces are read.
        """
        cold = self._cold.hold(since) if self._cold else None
        return HeldTable(TableSnapshot(self._rows, since=since, held_cold=cold), self._rows.row_bytes, lock)

    def export(self, since: int | None = None) -> TableState:
        """Everything, or what was trained after version `since`, as arrays that are never written again."""
        if since is None:
            state = self._rows.slice(0, len(self._rows))
        else:
            state = self._rows.at(np.flatnonzero(self._rows.used > since))
        if self._cold:
            cold = self._cold.hold(since)
            state = joined([state, cold.read(0, len(cold))])
        return state

    def keep_gone(self, since: int) -> None:
        """Remembers which rows were removed from this version on."""
        self._gone = [each for each in self._gone or () if each[0] >= since]

    def gone(self, since: int) -> Array:
        """Ids of rows that were removed from version `since` on, and do not exist now, int64 [n]."""
        ids = np.unique(np.concatenate([np.empty(0, np.int64), *(ids for at, ids in self._gone or () if at >= since)]))
        ids = ids[self.places(ids) < 0]
        return np.delete(ids, self._cold.read(ids)[0]) if self._cold else ids

    def _note_gone(self, ids: Array) -> None:
        if self._gone is not None:
            self._gone.append((self._version, ids.copy()))

    def ids(self, since: int = -1) -> Array:
        """Ids of all rows created or trained from version `since` on, int64 [n]."""
        ids = self._rows.index.ids[self._rows.used >= since]
        return np.concatenate([ids, self._cold.ids(since)]) if self._cold else ids

    def select(self, ids: Array) -> TableState:
        """The existing rows among `ids` (int64 [n], unique)."""
        places = self.places(ids)
        state = self._rows.at(places[places >= 0])
        return joined([state, self._cold.read(ids[places < 0])[1]]) if self._cold else state

    def counts(self, start: int, count: int) -> tuple[Array, Array, Array]:
        """(ids, hits, used), int64 [n] each, of rows [start, start + count): how often each was looked up in training,
        and the version at which it was last trained."""
        if self._cold and start >= len(self._rows):
            state = self._cold.rows(start - len(self._rows), count)
            assert state.hits is not None
            assert state.used is not None
            return state.ids, state.hits, state.used
        return self._rows.counts(start, count)

    def rows(self, start: int, count: int) -> tuple[Array, Array]:
        """(ids int64 [n], rows [n, dim]) of rows [start, start + count); fewer at the end, and if rows are large.

        The order is arbitrary but stable while the table is not trained.
        """
        most = max(1, table_snapshot.CHUNK_BYTES // self._rows.row_bytes)
        count = max(0, min(count, most))
        if self._cold and start >= len(self._rows):
            state = self._cold.rows(start - len(self._rows), count)
            return state.ids, state.rows
        return self._rows.rows(start, count)

    def load(self, source: TableSource, version: int) -> None:
        """Replaces all rows by those of `source`, piece by piece. Missing slots and counts stay as they were for
        existing ids, and start fresh for others.

        Args:
            version: version of the model, used for rows whose training time is unknown.

        Raises `ElasticCBError` when shapes or slots don't match, or when there are more rows than the limits allow.
        """
        before, cold_before = self._rows, self._cold

        def completed(piece: TableState) -> TableState:
            return _completed(piece, before, cold_before, version)

        pieces = (completed(self._checked(piece)) for piece in source.pieces())
        first = next(pieces)  # report mismatches before anything changes
        # Snapshots keep the old rows, which no longer change.
        self._rows = TableRows(before.dim, before.dtype, before.initial_slots, before.held_dtype)
        self._begin_anew(version)
        self._cold = self._no_rows_on_disk()
        self._left += 1  # rows have moved
        rows = len(source)
        room = self._room_at_start(rows)
        newest = Newest(_ages(source, completed, version), room) if room < rows else None
        for piece in itertools.chain([first], pieces):
            if newest is not None:
                assert piece.used is not None
                stays = newest.choose(piece.used)
                if self._cold is not None:
                    self._cold.put(piece.select(~stays))
                piece = piece.select(stays)
            self._rows.fill(piece)

    def _checked(self, state: TableState) -> TableState:
        """`state`, with rows in their stored dtype, also those for disk."""
        own = {"rows": (self._rows.dim,)} | {name: row.shape for name, row in self._rows.initial_slots.items()}
        given = {"rows": state.rows, **state.slots}
        wrong = [
            f"{name}, {array.dtype.name}{list(array.shape)}"
            for name, array in given.items()
            if array.shape != (len(state.ids), *own.get(name, array.shape[1:]))
            or not np.can_cast(array.dtype, self._rows.dtype, "same_kind")
        ]
        wrong += [f"the slot {name}" for name in sorted(given.keys() - own.keys())]
        if wrong:
            slots = [f"{name} {list(shape)}" for name, shape in sorted(own.items()) if name != "rows"]
            raise ElasticCBError(
                f"{self.name} can't take over {', '.join(wrong)}: it has rows of {self._rows.dim} and the slots "
                f"{', '.join(slots) or '(none)'}. Continue training with the same model and optimizer."
            )
        return replace(state, rows=self._rows.as_held(state.rows))


def _completed(state: TableState, rows: TableRows, cold_rows: ColdRows | None, version: int) -> TableState:
    """`state`, with missing parts taken from these rows. Other ids start fresh, as trained at `version`."""
    places = rows.index.find(state.ids)
    here, elsewhere = np.flatnonzero(places >= 0), np.flatnonzero(places < 0)
    completed = rows.completed(state, here, places[here], version)
    assert completed.used is not None
    lacking = completed.slots.keys() - state.slots.keys()
    if cold_rows and (lacking or state.hits is None or state.used is None):
        found, cold = cold_rows.read(state.ids[elsewhere])
        known = elsewhere[found]
        for name in lacking:
            completed.slots[name][known] = cold.slots[name]
        for given, counts, count in (
            (state.hits, completed.hits, cold.hits),
            (state.used, completed.used, cold.used),
        ):
            if given is None:
                assert counts is not None
                counts[known] = count
    # Versions may restart, as with a fresh optimizer.
    return replace(completed, used=np.minimum(completed.used, version))


def _ages(source: TableSource, completed: Callable[[TableState], TableState], version: int) -> Iterator[Array]:
    """The versions at which the rows of `source` count as last trained, in pieces."""
    for ids, used in source.ages():
        if used is None:
            used = completed(TableState(ids, np.empty((len(ids), 0)))).used
            assert used is not None
        yield np.minimum(used, version)
