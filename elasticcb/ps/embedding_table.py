"""One server's rows of an embedding table, in memory and on disk, which are created on first use.

Not thread-safe: the caller serializes calls, and has checked that ids are int64 >= 0 and unique within each call.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from elasticcb.errors import ElasticCBError, TableError
from elasticcb.ps import table_snapshot
from elasticcb.ps.cold_rows import ColdRows
from elasticcb.ps.table_limits import Candidates, Newest, RowAges, TableLimits
from elasticcb.ps.table_rows import TableRows
from elasticcb.ps.table_snapshot import HeldTable, TableSnapshot
from elasticcb.rpc.tensors import Array, dtype_of
from elasticcb.settings.choices import WhenFull
from elasticcb.settings.table import TableOptions
from elasticcb.sharding.table_state import TableSource, TableState, joined

WINDOW_SECONDS = 60.0
_MARK_SECONDS = 5.0
_MOVED_AT_ONCE = 1 << 15  # rows moved to disk at a time


class RowFlow:
    """Counts created and removed rows, and remembers the counts over the last minute."""

    def __init__(self) -> None:
        self.made = self.removed = 0
        self._marks: deque[tuple[float, int, int]] = deque()  # time, and counts at that time

    def tick(self, now: float) -> None:
        """The time is `now`, in seconds; rates are unknown before the first call."""
        if not self._marks or now - self._marks[-1][0] >= _MARK_SECONDS:
            self._marks.append((now, self.made, self.removed))
            while len(self._marks) > 1 and self._marks[1][0] <= now - WINDOW_SECONDS:
                self._marks.popleft()

    def lately(self, now: float) -> tuple[float, int, int]:
        """(seconds, rows created, rows removed): in the last minute, or since the last tick if that is longer ago."""
        begun, made, removed = self._marks[0] if self._marks else (now, 0, 0)
        return now - begun, self.made - made, self.removed - removed


InitialRows = Callable[[Array], Array]  # of ids, int64 [n]: [n, dim]


class RowPlaces(NamedTuple):
    """Positions of rows in memory, valid while no row leaves memory: int64 [n], -1 for missing rows."""

    places: Array
    missing: Array  # ids with no row, in memory or on disk, int64 [m]
    left: int  # how many rows had left memory at that time
    on_disk: Array  # ids of rows on disk, int64 [m]
    disk_rows: Array  # [m, dim]


class RowChange(NamedTuple):
    """Rows about to be updated: int64 [n] ids and positions, rows and gradients [n, dim], slots [n, …]."""

    ids: Array
    places: Array
    rows: Array
    slots: dict[str, Array]
    gradients: Array
    left: int  # how many rows had left memory at that time


class EmbeddingTable:
    """Rows by id, in memory and on disk, which are trained, and leave memory when there are too many.

    Args:
        initial_values: returns initial rows of new ids; None if all rows are given (`load`) and stay.
        slots: initial row of each optimizer slot, [dim] or another width, by name.
        options: unset options limit nothing; `max_rows` applies to this server.
        now: system clock in seconds, by which rows age if `max_age` is a time.

    Attributes:
        max_rows: maximum number of rows in memory; 0: no limit.
    """

    def __init__(
        self,
        dim: int,
        dtype: npt.DTypeLike,
        initial_values: InitialRows | None,
        slots: Mapping[str, Array],
        limits: TableLimits | None = None,
        name: str = "the embedding table",
        options: TableOptions | None = None,
        now: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._initial_values = initial_values
        self._limits = TableLimits() if limits is None else limits
        options = options or TableOptions()
        held_dtype = dtype_of(options.held_dtype(np.dtype(dtype).name))
        self.name = name
        self._rows = TableRows(dim, dtype, slots, held_dtype)
        self._version = 0  # of the model
        self._left = 0  # number of rows that have left memory, or moved within it
        self._cold = self._no_rows_on_disk()
        # Versions, and ids of the rows that were removed then; None: nobody asks for them.
        self._gone: list[tuple[int, Array]] | None = None
        self._min_count = options.min_count or 1
        self.ages = RowAges(options.max_age or 0, now)
        self.max_rows = options.max_rows or 0
        self.candidates = Candidates(self._min_count)
        self.flow = RowFlow()
        self._limits.tables.append(self)

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

    # -------------------------------------------------------------- training

    def find(self, ids: Array, create: bool = False) -> RowPlaces:
        """Which of `ids` (int64 [n]) have rows; for `lookup`, with the same `create`."""
        if create:
            self._bring_back(ids)
        places = self.places(ids)
        missing = np.flatnonzero(places < 0)
        on_disk, disk_rows = missing[:0], np.empty((0, self._rows.dim), self._rows.dtype)
        if self._cold and len(missing) and not create:
            found, state = self._cold.read(ids[missing])
            on_disk, disk_rows, missing = missing[found], state.rows, np.delete(missing, found)
        return RowPlaces(places, missing, self._left, on_disk, disk_rows)

    def _bring_back(self, ids: Array) -> None:
        """Moves rows of `ids` from disk into memory; other rows make room."""
        if not self._cold:
            return
        missing = ids[self.places(ids) < 0]
        state = self._cold.read(missing)[1]
        if len(state.ids):
            self._limits.room(self, len(state.ids), ids)
            self._cold.remove(state)
            # Treated as new: it is about to be trained, and should not be evicted next.
            self._rows.fill(replace(state, used=np.full(len(state.ids), self._version)))

    def lookup(self, ids: Array, create: bool, found: RowPlaces | None = None, initial: Array | None = None) -> Array:
        """The rows of `ids` (int64 [n]), a new array [n, dim].

        Args:
            create: for training: new ids get rows, within the limits; without it nothing changes.
            found: result of `find` for these ids, if available.
            initial: with `found`, initial rows of the ids missing there.

        Raises `TableError` when the table is full.
        """
        if found is None or found.left != self._left:  # another table needed the memory
            found, initial = self.find(ids, create), None
        places, missing = found.places, found.missing
        if not len(missing) and not len(found.on_disk):
            if create:
                self._train_soon(ids, places)
            return self._rows.read(places)
        if initial is not None:
            initial = self._rows.as_held(initial)
        elif len(missing):
            initial = self.initial_rows(ids[missing])
        if create:
            assert initial is not None
            self._make_rows(ids, places, missing, initial)
        present = places >= 0
        if create:
            self._train_soon(ids[present], places[present])
        rows = np.empty((len(ids), self._rows.dim), self._rows.dtype)
        if len(missing):
            rows[missing] = initial
        rows[found.on_disk] = found.disk_rows
        rows[present] = self._rows.read(places[present])
        return rows

    def _train_soon(self, ids: Array, places: Array) -> None:
        """Records a lookup in training: gradients of these rows will follow."""
        self._rows.count_hits(places)
        self._rows.index.recent.note(ids, places)

    def knows(self, ids: Array) -> bool:
        """Whether exactly these `ids`, in this order, were looked up in training, and so have been checked."""
        return self._rows.index.recent.find(ids) is not None

    def prepare(self, ids: Array, gradients: Array) -> RowChange:
        """The change that `gradients` ([n, dim]) of the rows of `ids` (int64 [n]) will make.

        The gradient of an id without a row (evicted since, or looked up too rarely) is dropped. If rows are limited
        only by age, the row is created again.
        """
        recent = self._rows.index.recent.find(ids)
        if recent is not None:
            return self._change(ids, recent, gradients)
        self._bring_back(ids)
        places = self.places(ids)
        missing = np.flatnonzero(places < 0)
        if len(missing):
            # If this evicts no other row.
            if self._min_count <= 1 and self._limits.when_full in (WhenFull.ERROR, WhenFull.DISK):
                self._make_rows(ids, places, missing, self.initial_rows(ids[missing]))
            present = places >= 0
            ids, gradients, places = ids[present], gradients[present], places[present]
        return self._change(ids, places, gradients)

    def _change(self, ids: Array, places: Array, gradients: Array) -> RowChange:
        slots = self._rows.read_slots(places)
        return RowChange(ids, places, self._rows.read(places), slots, gradients, self._left)

    def commit(self, change: RowChange, rows: Array, slots: Mapping[str, Array], version: int) -> None:
        """Sets new rows [n, dim] and slots [n, …]; none of these may have changed since `prepare`."""
        places = change.places
        if change.left != self._left:  # moved to disk: another table needed the memory
            self._bring_back(change.ids)
            places = self.places(change.ids)
        self._rows.write(places, rows, slots, version)
        self.advance(version)

    def advance(self, version: int) -> None:
        """Sets the current version of the model, by which rows age."""
        self._version = max(self._version, version)
        self._sweep()

    def initial_rows(self, ids: Array) -> Array:
        """Initial rows [n, dim] of ids. Raises `TableError` if the table can't create rows."""
        if self._initial_values is None:
            raise TableError(
                f"{self.name} has no row for id {int(ids[0])}: all its rows were given at the start, and it can't "
                "create new ones."
            )
        rows = np.asarray(self._initial_values(ids), self._rows.dtype).reshape(len(ids), self._rows.dim)
        return self._rows.as_held(rows)

    def _make_rows(self, ids: Array, places: Array, missing: Array, initial: Array) -> None:
        """Adds rows for `ids[missing]` with values `initial`, within the limits; stores their positions in `places`."""
        admitted = self.candidates.count(ids[missing], self._version)
        chosen = np.flatnonzero(admitted)
        before = self._left
        room = self._limits.room(self, len(chosen), ids)
        if self._left != before:  # other rows may have moved
            places[:] = self.places(ids)
        chosen = chosen[:room]
        if len(chosen):
            places[missing[chosen]] = self._rows.add(ids[missing[chosen]], initial[chosen], self._version)
            self.flow.made += len(chosen)

    # -------------------------------------------------------------- limits

    @property
    def bytes(self) -> int:
        """Memory used by the table, including slots, counts and index."""
        return len(self._rows) * self._rows.row_bytes + self.candidates.bytes

    @property
    def may_lose_rows(self) -> bool:
        return self._initial_values is not None

    def evict(self, places: Array) -> None:
        """Evicts rows from memory. Without a disk store, their ids restart from initial values."""
        if self._cold is not None:
            self._move_to_disk(places)
        else:
            self.flow.removed += len(places)
            self._note_gone(self._rows.index.ids[places])
            self._remove(places)

    def export_ages(self) -> Array | None:
        """State of `ages`, to continue elsewhere or later."""
        return self.ages.export(self._version)

    def _sweep(self) -> None:
        """Removes rows and candidates that are too old, at intervals."""
        oldest = self.ages.due(self._version)
        if oldest is None:
            return
        self.candidates.forget_older(oldest)
        old = np.flatnonzero(self._rows.used < oldest)
        if not self.may_lose_rows:
            return
        if self._cold:
            removed = self._cold.forget_older(oldest)
            self.flow.removed += len(removed)
            self._note_gone(removed)
        if len(old):
            self.flow.removed += len(old)
            self._note_gone(self._rows.index.ids[old])
            self._remove(old)

    def _no_rows_on_disk(self) -> ColdRows | None:
        """None if rows may not go to disk."""
        store = self._limits.store
        return None if store is None else ColdRows(store, self._rows.slice(0, 0))

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

    def snapshot(self) -> TableSnapshot:
        """The current rows, for lookups unaffected by later training. Release it after use."""
        return TableSnapshot(self._rows, self.initial_rows, cold=self._cold.snapshot() if self._cold else None)

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
        """Ids of rows that were removed from version `since` on, and not trained after it since then, int64 [n]."""
        ids = np.unique(np.concatenate([np.empty(0, np.int64), *(ids for at, ids in self._gone or () if at >= since)]))
        trained = self.select(ids)
        assert trained.used is not None
        return np.setdiff1d(ids, trained.ids[trained.used > since])

    def _note_gone(self, ids: Array) -> None:
        if self._gone is not None:
            self._gone.append((self._version, ids.copy()))

    def ids(self, since: int = np.iinfo(np.int64).min) -> Array:
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
        pieces = (_completed(self._checked(piece), before, cold_before, version) for piece in source.pieces())
        first = next(pieces)  # report mismatches before anything changes
        # Snapshots keep the old rows, which no longer change.
        self._rows = TableRows(before.dim, before.dtype, before.initial_slots, before.held_dtype)
        self._version = version
        self.candidates.clear()
        self.ages.begin(version)
        self._cold = self._no_rows_on_disk()
        self._left += 1  # rows have moved
        rows = len(source)
        room = self._limits.room_at_start(self, rows)
        newest = Newest(_ages(source, before, cold_before, version), room) if room < rows else None
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


def _ages(source: TableSource, rows: TableRows, cold_rows: ColdRows | None, version: int) -> Iterator[Array]:
    """The versions at which the rows of `source` count as last trained, in pieces."""
    for ids, used in source.ages():
        if used is None:
            used = _completed(TableState(ids, np.empty((len(ids), 0))), rows, cold_rows, version).used
            assert used is not None
        yield np.minimum(used, version)
