"""One server's rows of an embedding table, which are made on first use.

Not thread-safe: the caller lets one in at a time, and has checked ids: int64 >= 0, unique within each call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from elasticcb.errors import TableError
from elasticcb.ps.row_ages import RowAges
from elasticcb.ps.stored_table import StoredTable
from elasticcb.ps.table_candidates import Candidates
from elasticcb.ps.table_growth import RowFlow
from elasticcb.ps.table_limits import TableLimits
from elasticcb.ps.table_rows import TableRows
from elasticcb.ps.table_snapshot import TableSnapshot
from elasticcb.rpc.tensors import Array, dtype_of
from elasticcb.settings.choices import WhenFull
from elasticcb.settings.table import TableOptions

InitialRows = Callable[[Array], Array]  # of ids, int64 [n]: [n, dim]


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


class EmbeddingTable(StoredTable):
    """Rows by id, which are trained, and go when there are too many.

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
        self._initial_values = initial_values
        self._limits = TableLimits() if limits is None else limits
        options = options or TableOptions()
        held_dtype = dtype_of(options.held_dtype(np.dtype(dtype).name))
        super().__init__(TableRows(dim, dtype, slots, held_dtype), self._limits.store, name)
        self._min_count = options.min_count or 1
        self.ages = RowAges(options.max_age or 0, now)
        self.max_rows = options.max_rows or 0
        self._candidates = Candidates(self._min_count)
        self.flow = RowFlow()
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
    def bytes(self) -> int:
        """What the table holds in memory, with slots, counts and the index."""
        return len(self._rows) * self._rows.row_bytes + self._candidates.bytes

    @property
    def may_lose_rows(self) -> bool:
        return self._initial_values is not None

    @property
    def evicted(self) -> int:
        """How many rows, so far."""
        return self.flow.removed

    def evict(self, places: Array) -> None:
        """Removes rows from memory; without a disk for them, their ids have initial values again."""
        if self._cold is not None:
            self._move_to_disk(places)
        else:
            self.flow.removed += len(places)
            self._remove(places)

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

    def _room_at_start(self, rows: int) -> int:
        return self._limits.room_at_start(self, rows)

    def _begin_anew(self, version: int) -> None:
        super()._begin_anew(version)
        self._candidates.clear()
        self.ages.begin(version)

    def take_over(self, before: EmbeddingTable, keeps: Callable[[Array], Array]) -> None:
        """Adds to its rows those of `before`, which is of no use any more. Counts of ids without a row come along.

        Args:
            before: of the same dimension and slots.
            keeps: tells which ids (int64 [n]) of it come, of none of which a row is here: bool [n].
        """
        self._candidates, self.ages, self.flow = before._candidates, before.ages, before.flow
        self._take_rows(before, keeps)
