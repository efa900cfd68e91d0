"""One server's rows of an embedding table, which are created on first use.

Not thread-safe: the caller serializes calls, and has checked that ids are int64 >= 0 and unique within each call.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from elasticcb.errors import TableError
from elasticcb.ps.id_index import GrowingArray, IdIndex
from elasticcb.ps.stored_table import StoredTable
from elasticcb.ps.table_limits import TableLimits
from elasticcb.ps.table_rows import TableRows
from elasticcb.ps.table_snapshot import TableSnapshot
from elasticcb.rpc.tensors import Array, dtype_of
from elasticcb.settings.choices import WhenFull, seconds_of
from elasticcb.settings.table import TableOptions
from elasticcb.sharding.table_counts import Growth

WINDOW_SECONDS = 60.0
_MARK_SECONDS = 5.0
_LOOKS_PER_AGE = 8  # how often per maximum age to look for old rows
_MARKS_PER_AGE = 64  # precision of times: rows may stay up to a 64th too long


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

    def lately(self, now: float) -> Growth:
        """Rows created and removed in the last minute, or since the last tick if that is longer ago."""
        begun, made, removed = self._marks[0] if self._marks else (now, 0, 0)
        return Growth(now - begun, self.made - made, self.removed - removed)


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


class EmbeddingTable(StoredTable):
    """Rows by id, which are trained, and evicted when there are too many.

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
        super().__init__(TableRows(dim, dtype, slots, held_dtype), self._limits.store, name)
        self._min_count = options.min_count or 1
        self.ages = RowAges(options.max_age or 0, now)
        self.max_rows = options.max_rows or 0
        self.candidates = _Candidates(self._min_count)
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

    # -------------------------------------------------------------- all rows

    def snapshot(self) -> TableSnapshot:
        """The current rows, for lookups unaffected by later training. Release it after use."""
        return TableSnapshot(self._rows, self.initial_rows, cold=self._cold.snapshot() if self._cold else None)

    def _room_at_start(self, rows: int) -> int:
        return self._limits.room_at_start(self, rows)

    def _begin_anew(self, version: int) -> None:
        super()._begin_anew(version)
        self.candidates.clear()
        self.ages.begin(version)


class _Candidates:
    """Ids looked up in training, but not often enough yet to get a row."""

    row_bytes = 32 + 4 + 8  # per id: its entry in the index, a count and a version

    def __init__(self, min_count: int) -> None:
        self._min_count = min_count
        self._index, self._counts, self._seen = _nothing()

    def __len__(self) -> int:
        return len(self._index)

    @property
    def used(self) -> Array:
        """The version at which each was last looked up, int64 [n]: a view, valid until the next change."""
        return self._seen.array[: len(self)]

    @property
    def bytes(self) -> int:
        return len(self) * self.row_bytes

    def count(self, ids: Array, version: int) -> Array:
        """Counts a lookup of `ids` (int64 [n], unique); returns which ones have reached the minimum, bool [n], and
        removes those."""
        if self._min_count <= 1:
            return np.ones(len(ids), bool)
        places = self._index.find(ids)
        new = np.flatnonzero(places < 0)
        if len(new):
            places[new] = self._index.insert(ids[new])
            for array in (self._counts, self._seen):
                array.reserve(len(self._index))
            self._counts.array[places[new]] = 0
        counts = self._counts.array.take(places) + 1
        self._counts.array[places] = counts
        self._seen.array[places] = version
        enough: Array = counts >= self._min_count
        if enough.any():
            self.evict(places[enough])
        return enough

    def lookups(self, id: int) -> int:
        """How often an id was looked up; 0: not a candidate."""
        (place,) = self._index.find(np.array([id], np.int64))
        return int(self._counts.array[place]) if place >= 0 else 0

    def forget_older(self, version: int) -> None:
        """Drops ids not looked up since before `version`."""
        old = np.flatnonzero(self.used < version)
        if len(old):
            self.evict(old)

    def clear(self) -> None:
        self._index, self._counts, self._seen = _nothing()

    def evict(self, places: Array) -> None:
        """Drops the ids at `places` (int64 [n], unique); others may move."""
        gaps, moved = self._index.remove(places)
        for array in (self._counts, self._seen):
            array.array[gaps] = array.array[moved]


def _nothing() -> tuple[IdIndex, GrowingArray, GrowingArray]:
    """Ids, their lookups, and the versions of their last lookups; empty."""
    return IdIndex(), GrowingArray((), np.int32), GrowingArray((), np.int64)


class RowAges:
    """Finds the version before which rows were trained too long ago.

    A row stores the version at which it was last trained. For time-based ages, marks record when the model had which
    version, so that rows need no timestamps.

    Args:
        max_age: versions, or a time ("7d"); 0: rows never expire.
        now: system clock in seconds: marks outlive this process.
    """

    def __init__(self, max_age: int | str, now: Callable[[], float]) -> None:
        self._seconds = seconds_of(max_age)
        self._versions = 0 if self._seconds else int(max_age)
        self._now = now
        # Version or time of the last look: for times, look at once, since a job may be shorter than the interval.
        self._looked = -math.inf if self._seconds else 0.0
        # (version, seconds): rows of earlier versions were last trained before that time.
        self._marks: list[tuple[int, float]] = []
        self._last = (0, now() if self._seconds else 0.0)  # version and time of the last call

    def begin(self, version: int) -> None:
        """The rows were replaced by those of `version`."""
        if not self._seconds:
            self._looked = version
            return
        self._marks = [mark for mark in self._marks if mark[0] <= version]
        self._last = (version, self._now())

    def due(self, version: int) -> int | None:
        """The version before which rows are too old; None: no need to look now, because looking scans all rows.

        Args:
            version: current version of the model. Call this at every version.
        """
        if self._seconds:
            return self._due_by_time(version)
        if not self._versions or version - self._looked < max(1, self._versions // _LOOKS_PER_AGE):
            return None
        self._looked = version
        return version - self._versions

    def _due_by_time(self, version: int) -> int | None:
        now = self._now()
        before = self._before(version)
        if before is not None:
            self._marks.append(before)
            if len(self._marks) > 2 and before[1] - self._marks[-3][1] < self._seconds / _MARKS_PER_AGE:
                del self._marks[-2]
        self._last = (version, now)
        if 0 <= now - self._looked < self._seconds / _LOOKS_PER_AGE:  # the clock may have been set back
            return None
        self._looked = now
        while len(self._marks) > 1 and self._marks[1][1] <= now - self._seconds:
            del self._marks[0]
        return self._marks[0][0] if self._marks and self._marks[0][1] <= now - self._seconds else None

    def _before(self, version: int) -> tuple[int, float] | None:
        """A mark for everything trained up to the last call; None if `version` has not increased, or the mark would be
        out of order."""
        last, seconds = self._last
        if version <= last or (self._marks and (last < self._marks[-1][0] or seconds < self._marks[-1][1])):
            return None
        return last + 1, seconds

    def export(self, version: int) -> Array | None:
        """State for `restore`, versions and seconds, int64 [n, 2]; None: nothing to save."""
        if not self._seconds:
            return None
        newest = self._before(version + 1)
        return np.ceil([*self._marks, *([newest] if newest else [])]).astype(np.int64).reshape(-1, 2)

    def restore(self, marks: Array, version: int, stood_still: bool) -> None:
        """Restores the state of `export`.

        Args:
            version: current version of the model; the next rows trained get the following version.
            stood_still: the time since then does not count, because the job could not train.
        """
        if not self._seconds or not len(marks):
            return
        now = self._now()
        pause = max(0.0, now - float(marks[-1, 1])) if stood_still else 0.0
        known = [(int(mark), float(seconds)) for mark, seconds in marks.tolist() if mark <= version + 1]
        self._marks = [(mark, min(seconds + pause, now)) for mark, seconds in known]
