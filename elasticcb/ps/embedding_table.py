"""One server's rows of an embedding table, which are made on first use.

Not thread-safe: the caller lets one in at a time, and has checked ids: int64 >= 0, unique within each call.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from elasticcb.errors import ElasticCBError, TableError
from elasticcb.ps import table_snapshot
from elasticcb.ps.cold_rows import ColdRows
from elasticcb.ps.row_ages import RowAges
from elasticcb.ps.table_candidates import Candidates
from elasticcb.ps.table_growth import RowFlow
from elasticcb.ps.table_limits import Newest, TableLimits
from elasticcb.ps.table_rows import TableRows
from elasticcb.ps.table_snapshot import HeldTable, TableSnapshot
from elasticcb.rpc.tensors import Array, dtype_of
from elasticcb.settings.choices import WhenFull
from elasticcb.settings.table import TableOptions
from elasticcb.sharding.table_source import TableSource
from elasticcb.sharding.table_state import TableState, joined

InitialRows = Callable[[Array], Array]  # of ids, int64 [n]: [n, dim]

_MOVED_AT_ONCE = 1 << 15  # rows, to disk


class RowPlaces(NamedTuple):
    """Where rows are in memory, as long as none leaves it: int64 [n], -1 where there is none."""

    places: Array
    missing: Array  # which have none, on disk neither, int64 [m]
    left: int  # how many rows had left memory by then
    on_disk: Array  # which are there, int64 [m]
    disk_rows: Array  # [m, dim]


class RowChange(NamedTuple):
    """Rows that are about to be updated: int64 [n] ids and places, rows and gradients [n, dim], slots [n, …]."""

    ids: Array
    places: Array
    rows: Array
    slots: dict[str, Array]
    gradients: Array
    left: int  # how many rows had left memory by then


class EmbeddingTable:
    """Rows by id.

    Args:
        dim, dtype: of a row.
        initial_values: gives the rows of new ids; None where all rows are given (`load`), which then stay.
        slots: the initial row of each of the optimizer's slots, [dim] or of another width, by name.
        limits: shared by all tables of the server; None: none.
        name: for messages.
        options: what is not set there limits nothing; `max_rows` is that of this server.
        now: the system's clock, in seconds, by which rows age where `max_age` is a time.

    Attributes:
        ages: finds rows that are too old.
        flow: counts rows that are made for new ids, and evicted.
        max_rows: so many it may hold in memory; 0: no limit.
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
        self.name = name
        self._initial_values, self._initial_slots = initial_values, dict(slots)
        self._limits = TableLimits() if limits is None else limits
        options = options or TableOptions()
        self._rows = TableRows(dim, dtype, slots, dtype_of(options.held_dtype(np.dtype(dtype).name)))
        self._min_count = options.min_count or 1
        self.ages = RowAges(options.max_age or 0, now)
        self.max_rows = options.max_rows or 0
        self._candidates = Candidates(self._min_count)
        self._version = 0
        self.flow = RowFlow()
        self._left = 0  # rows that have left memory, or got other places in it
        self._cold = self._no_rows_on_disk()
        self._limits.tables.append(self)

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
        """Moves those rows of `ids` into memory that are on disk; others make room."""
        if not self._cold:
            return
        missing = ids[self.places(ids) < 0]
        state = self._cold.read(missing)[1]
        if len(state.ids):
            self._limits.room(self, len(state.ids), ids)
            self._cold.remove(state)
            # As if it was made now: it is about to be trained, and should not be the next to go.
            self._rows.fill(replace(state, used=np.full(len(state.ids), self._version)))

    def places(self, ids: Array) -> Array:
        """Where the rows of `ids` (int64 [n]) are in memory now, -1 where there is none: int64 [n]."""
        return self._rows.index.find(ids)

    def lookup(self, ids: Array, create: bool, found: RowPlaces | None = None, initial: Array | None = None) -> Array:
        """The rows of `ids` (int64 [n]), a new array [n, dim].

        Args:
            create: in training: new ids get rows, as far as the limits allow; without it nothing changes.
            found: what `find` gives of them, if it was asked before.
            initial: with `found`, the initial rows of those that are missing there.

        Raises `TableError` when the table is full.
        """
        if found is None or found.left != self._left:  # for another table, which needed the memory
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
        """Notes a lookup in training: gradients of these rows will come."""
        self._rows.count_hits(places)
        self._rows.index.recent.note(ids, places)

    def knows(self, ids: Array) -> bool:
        """Whether `ids` were looked up in training, in this order, and so were checked then."""
        return self._rows.index.recent.find(ids) is not None

    def prepare(self, ids: Array, gradients: Array) -> RowChange:
        """What is to be updated by `gradients` ([n, dim]) of the rows of `ids` (int64 [n]).

        A gradient of an id without a row (evicted since, or not asked for often enough) is dropped; where nothing but
        age limits rows, the row is made again.
        """
        recent = self._rows.index.recent.find(ids)
        if recent is not None:
            return self._change(ids, recent, gradients)
        self._bring_back(ids)
        places = self.places(ids)
        missing = np.flatnonzero(places < 0)
        if len(missing):
            # Where it takes no other row's place.
            if self._min_count <= 1 and self._limits.when_full in (WhenFull.ERROR, WhenFull.DISK):
                self._make_rows(ids, places, missing, self.initial_rows(ids[missing]))
            present = places >= 0
            ids, gradients, places = ids[present], gradients[present], places[present]
        return self._change(ids, places, gradients)

    def _change(self, ids: Array, places: Array, gradients: Array) -> RowChange:
        slots = self._rows.read_slots(places)
        return RowChange(ids, places, self._rows.read(places), slots, gradients, self._left)

    def commit(self, change: RowChange, rows: Array, slots: Mapping[str, Array], version: int) -> None:
        """Sets new rows [n, dim] and slots [n, …]; none of these has changed since `change` was prepared."""
        places = change.places
        if change.left != self._left:  # to disk, for another table, which needed the memory
            self._bring_back(change.ids)
            places = self.places(change.ids)
        self._rows.write(places, rows, slots, version)
        self.advance(version)

    def advance(self, version: int) -> None:
        """Tells which version the model has now, by which rows grow old."""
        self._version = max(self._version, version)
        self._sweep()

    def initial_rows(self, ids: Array) -> Array:
        """Of ids without a row, [n, dim]. Raises `TableError` where all rows should have been given."""
        if self._initial_values is None:
            raise TableError(
                f"{self.name} has no row of the id {int(ids[0])}: its rows were all given at the start, and new ones "
                "can't be made."
            )
        rows = np.asarray(self._initial_values(ids), self._rows.dtype).reshape(len(ids), self._rows.dim)
        return self._rows.as_held(rows)

    def _make_rows(self, ids: Array, places: Array, missing: Array, initial: Array) -> None:
        """Adds rows for `ids[missing]`, of the values `initial`, as far as allowed; `places` gets their places."""
        admitted = self._candidates.count(ids[missing], self._version)
        chosen = np.flatnonzero(admitted)
        before = self._left
        room = self._limits.room(self, len(chosen), ids)
        if self._left != before:  # the others may have moved
            places[:] = self.places(ids)
        chosen = chosen[:room]
        if len(chosen):
            places[missing[chosen]] = self._rows.add(ids[missing[chosen]], initial[chosen], self._version)
            self.flow.made += len(chosen)

    # -------------------------------------------------------------- limits

    @property
    def row_bytes(self) -> int:
        return self._rows.row_bytes

    @property
    def bytes(self) -> int:
        """What the table holds in memory, with slots, counts and the index."""
        return len(self._rows) * self._rows.row_bytes + self._candidates.bytes

    @property
    def used(self) -> Array:
        return self._rows.used

    @property
    def may_lose_rows(self) -> bool:
        return self._initial_values is not None

    @property
    def evicted(self) -> int:
        """How many rows, so far."""
        return self.flow.removed

    def evict(self, places: Array) -> None:
        """Removes rows from memory; without a disk for them, their ids have initial values again."""
        if self._cold is None:
            self.flow.removed += len(places)
            self._remove(places)
            return
        places = np.sort(places)[::-1]  # the last ones first, so that the others stay where they are meanwhile
        for first in range(0, len(places), _MOVED_AT_ONCE):
            moving = places[first : first + _MOVED_AT_ONCE]
            self._cold.put(self._rows.at(moving))
            self._remove(moving)

    def _remove(self, places: Array) -> None:
        self._left += len(places)
        self._rows.remove(places)

    def _no_rows_on_disk(self) -> ColdRows | None:
        """None where they may not go there."""
        return None if self._limits.store is None else ColdRows(self._limits.store, self._rows.slice(0, 0))

    @property
    def candidates(self) -> Candidates:
        """The ids that were not asked for often enough yet."""
        return self._candidates

    def export_ages(self) -> Array | None:
        """What `ages` need to go on elsewhere, or later."""
        return self.ages.export(self._version)

    def _sweep(self) -> None:
        """Removes rows and candidates that are too old, from time to time."""
        oldest = self.ages.due(self._version)
        if oldest is None:
            return
        self._candidates.forget_older(oldest)
        old = np.flatnonzero(self._rows.used < oldest)
        if not self.may_lose_rows:
            return
        if self._cold:
            self.flow.removed += self._cold.forget_older(oldest)
        if len(old):
            self.flow.removed += len(old)
            self._remove(old)

    # -------------------------------------------------------------- all rows

    def snapshot(self) -> TableSnapshot:
        """The rows as they are now, to look up, however training goes on. Release it after use."""
        return TableSnapshot(self._rows, self.initial_rows, cold=self._cold.snapshot() if self._cold else None)

    def hold(self, lock: AbstractContextManager[Any], since: int | None = None) -> HeldTable:
        """What `export` gives, to be read in pieces while training goes on. Release it after use.

        Args:
            lock: that is held at each call of this table; it must not be when the pieces are read.
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

    def ids(self, since: int = -1) -> Array:
        """Of all rows that were made or trained from version `since` on, int64 [n]."""
        ids = self._rows.index.ids[self._rows.used >= since]
        return np.concatenate([ids, self._cold.ids(since)]) if self._cold else ids

    def select(self, ids: Array) -> TableState:
        """The rows of those of `ids` (int64 [n], unique) that have one."""
        places = self.places(ids)
        state = self._rows.at(places[places >= 0])
        return joined([state, self._cold.read(ids[places < 0])[1]]) if self._cold else state

    def counts(self, start: int, count: int) -> tuple[Array, Array, Array]:
        """(ids, hits, used), int64 [n] each, of rows [start, start + count) of all: how often each was looked up in
        training, and at which version last trained."""
        if self._cold and start >= len(self._rows):
            state = self._cold.rows(start - len(self._rows), count)
            assert state.hits is not None
            assert state.used is not None
            return state.ids, state.hits, state.used
        return self._rows.counts(start, count)

    @property
    def value_bytes(self) -> int:
        """What the values of one row take."""
        return self._rows.dim * self._rows.held_dtype.itemsize

    @property
    def slots(self) -> Collection[str]:
        """The names of the optimizer's slots."""
        return self._initial_slots.keys()

    def put(self, state: TableState) -> None:
        """Takes rows, with slots and counts, in the place of what is here of the same ids. The limits do not count,
        unless rows may go to disk.

        Raises `ElasticCBError` when shapes or slots are others.
        """
        state = self._checked(state)
        if self._cold is not None:
            self._cold.remove(self._cold.read(state.ids)[1])
            new = np.flatnonzero(self.places(state.ids) < 0)
            rest = new[self._limits.room_at_start(self, len(new)) :]
            self._put_on_disk(state, rest)
            state = state.select(np.delete(np.arange(len(state.ids)), rest))
        self._rows.put(state)

    def _put_on_disk(self, state: TableState, chosen: Array) -> None:
        """Puts the rows `chosen` (int64 [n]) of `state` on disk. None of them is there, or here."""
        assert self._cold is not None
        for first in range(0, len(chosen), _MOVED_AT_ONCE):
            part = state.select(chosen[first : first + _MOVED_AT_ONCE])
            nothing = np.empty(0, np.int64)
            self._cold.put(self._rows.completed(part, nothing, nothing, self._version))

    def keep(self, ids: Array) -> None:
        """Removes all rows but those of `ids`, which are all here: int64 [n], unique."""
        if len(ids) < len(self):
            self._rows.remove(np.flatnonzero(~np.isin(self._rows.index.ids, ids)))
        if self._cold:
            self._cold.keep(lambda found: np.isin(found, ids))

    def take_over(self, before: EmbeddingTable, keeps: Callable[[Array], Array]) -> None:
        """Adds to its rows those of `before`, which is of no use any more. Counts of ids without a row come along.

        Args:
            before: of the same dimension and slots.
            keeps: tells which ids (int64 [n]) of it come, of none of which a row is here: bool [n].
        """
        own, own_cold = self._rows, self._cold
        self._cold = before._cold
        self._rows, self._candidates = before._rows, before._candidates
        self._version, self.ages = before._version, before.ages
        self.flow = before.flow
        leaving = np.flatnonzero(~keeps(self._rows.index.ids))
        if len(leaving):
            self._rows.remove(leaving)
        self._rows.fill(own.slice(0, len(own)))
        self._left += 1  # they have other places
        if self._cold is not None and own_cold is not None:
            self._cold.keep(keeps)
            for piece in own_cold.pieces():
                self._cold.put(piece)

    def rows(self, start: int, count: int) -> tuple[Array, Array]:
        """(ids int64 [n], rows [n, dim]) of a part of the rows, [start, start + count) of all; fewer at the end, and
        where they are large.

        In no order, which is the same from call to call as long as the table is not trained.
        """
        most = max(1, table_snapshot.CHUNK_BYTES // self._rows.row_bytes)
        count = max(0, min(count, most))
        if self._cold and start >= len(self._rows):
            state = self._cold.rows(start - len(self._rows), count)
            return state.ids, state.rows
        return self._rows.rows(start, count)

    def load(self, source: TableSource, version: int) -> None:
        """Replaces all rows by those of `source`, piece by piece. What it lacks (slots, counts) stays as it was for ids
        that stay, and begins anew for others.

        Args:
            version: of the model. Rows of which nobody knows when they were trained count as trained at it.

        Raises `ElasticCBError` when shapes or slots are others, or when there are more rows than the limits allow.
        """
        before, cold_before = self._rows, self._cold

        def completed(piece: TableState) -> TableState:
            return _completed(piece, before, cold_before, version)

        pieces = (completed(self._checked(piece)) for piece in source.pieces())
        first = next(pieces)  # what can't be taken over is found before anything changes
        # Snapshots have the rows before, which nobody changes any more.
        self._rows = TableRows(before.dim, before.dtype, self._initial_slots, before.held_dtype)
        self._candidates.clear()
        self._version = version
        self.ages.begin(version)
        self._cold = self._no_rows_on_disk()
        self._left += 1  # rows have other places
        rows = len(source)
        room = self._limits.room_at_start(self, rows)
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
        """`state`, with rows as they are held, also of those that go to disk."""
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
                f"{', '.join(slots) or '(none)'}. Train on with the same model and optimizer."
            )
        return replace(state, rows=self._rows.as_held(state.rows))

    def __len__(self) -> int:
        """In memory and on disk."""
        return len(self._rows) + (len(self._cold) if self._cold is not None else 0)


def _completed(state: TableState, rows: TableRows, cold_rows: ColdRows | None, version: int) -> TableState:
    """`state`, with what it lacks as it is in these rows. Others begin anew, trained at `version`."""
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
    # Versions may count anew, as with a fresh optimizer.
    return replace(completed, used=np.minimum(completed.used, version))


def _ages(source: TableSource, completed: Callable[[TableState], TableState], version: int) -> Iterator[Array]:
    """The versions at which the rows of `source` count as trained, in pieces."""
    for ids, used in source.ages():
        if used is None:
            used = completed(TableState(ids, np.empty((len(ids), 0)))).used
            assert used is not None
        yield np.minimum(used, version)
