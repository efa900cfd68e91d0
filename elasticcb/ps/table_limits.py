"""Limits of embedding tables: their size, the age of rows, how often an id is looked up before it gets one; and which
rows to evict."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np

from elasticcb.errors import TableError
from elasticcb.ps.id_index import GrowingArray, IdIndex
from elasticcb.rpc.tensors import Array
from elasticcb.settings import WhenFull, written
from elasticcb.settings.choices import seconds_of

if TYPE_CHECKING:
    from elasticcb.storage.cold_store import ColdStore

_CHOSEN_AT_ONCE = 1 / 16  # share of the limit: finding the oldest rows scans all rows, some 20 times
_EVICTED_AT_ONCE = 1 << 15  # evict at most this many of them at once, unless more are needed, to keep calls short
_LOOKS_PER_AGE = 8  # how often per maximum age to look for old rows
_MARKS_PER_AGE = 64  # precision of times: rows may stay up to a 64th too long
_AGES_AT_ONCE = 1 << 20  # minimum number of rows whose versions are compared at a time


class Evictable(Protocol):
    """Something stored for each of many ids."""

    @property
    def row_bytes(self) -> int:
        """Bytes per id."""

    @property
    def used(self) -> Array:
        """The version at which each was last trained or looked up, int64 [n]."""

    def evict(self, places: Array) -> None: ...


class Limited(Evictable, Protocol):
    """A table as seen by the limits."""

    name: str
    max_rows: int  # in memory; 0: no limit

    def places(self, ids: Array) -> Array:
        """Positions of the rows of `ids`, -1 for missing ones: int64 [n]."""

    @property
    def may_lose_rows(self) -> bool:
        """Rows that were given can't be created again."""

    @property
    def bytes(self) -> int: ...

    @property
    def candidates(self) -> Evictable:
        """Ids without a row yet."""


@dataclass
class _Chosen:
    """The next rows to evict: those last trained at `last` or before, up to `left_bytes`."""

    last: int
    left_bytes: int


@dataclass
class TableLimits:
    """Limits shared by all tables of one server, besides each table's `max_rows`.

    Attributes:
        memory_bytes: of rows, slots, counts and indices; 0: no limit.
        when_full: what happens to a new id when a limit is reached. When memory is short, counts of ids without a row
            are dropped in any case, least recently used first.
        store: where rows go with `WhenFull.DISK`; else None.
        in_program: how messages name settings.
    """

    memory_bytes: int = 0
    when_full: WhenFull = WhenFull.ERROR
    store: ColdStore | None = None
    in_program: bool = False
    tables: list[Limited] = field(default_factory=list, init=False, repr=False, compare=False)
    # By table if its max_rows is reached; None: the total memory is reached.
    _chosen: dict[Limited | None, _Chosen] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def bytes(self) -> int:
        """Current size of all tables."""
        return sum(table.bytes for table in self.tables)

    def room(self, table: Limited, rows: int, keep: Array | None = None) -> int:
        """How many of `rows` new rows `table` may add, after making room if allowed.

        Args:
            keep: ids of `table` whose rows must stay, int64 [n].

        Raises `TableError` when rows don't fit and the limits require an error.
        """
        allowed = _allowed(table, rows)
        if allowed < rows and self._may_go(table):
            needed, most = len(table.used) + rows - table.max_rows, int(table.max_rows * _CHOSEN_AT_ONCE)
            self._evict([table], needed * table.row_bytes, most * table.row_bytes, table, keep)
            allowed = _allowed(table, rows)
        fitting = self._fitting(table, allowed)
        # Even without new rows, newly counted ids may need memory.
        if fitting < allowed or (self.memory_bytes and self.bytes > self.memory_bytes):
            needed = allowed * table.row_bytes - (self.memory_bytes - self.bytes)
            # Rows and counts of ids without a row are evicted by the same rule: if counts went first, rare ids would
            # never get a row, however old the existing rows are.
            losing: list[Evictable] = [each.candidates for each in self.tables]
            losing += [each for each in self.tables if self._may_go(each)]
            self._evict(losing, needed, int(self.memory_bytes * _CHOSEN_AT_ONCE), table, keep)
            fitting = self._fitting(table, allowed)
        if fitting < rows and self.when_full is not WhenFull.INITIAL:
            raise self._full(table, rows)
        return fitting

    def room_at_start(self, table: Limited, rows: int) -> int:
        """How many of `rows` rows an empty `table` may load.

        Raises `TableError` when not all fit, and none may be left out.
        """
        fitting = self._fitting(table, _allowed(table, rows))
        stays = self.when_full is WhenFull.ERROR or not (table.may_lose_rows or self._may_go(table))
        if fitting < rows and stays:
            raise self._full(table, rows)
        return fitting

    def _may_go(self, table: Limited) -> bool:
        """Whether rows of `table` may leave memory."""
        return self.when_full is WhenFull.DISK or (self.when_full is WhenFull.EVICT and table.may_lose_rows)

    def _fitting(self, table: Limited, rows: int) -> int:
        if not self.memory_bytes:
            return rows
        return max(0, min(rows, (self.memory_bytes - self.bytes) // table.row_bytes))

    def _full(self, table: Limited, rows: int) -> TableError:
        if _allowed(table, rows) < rows:
            return TableError(
                f"{table.name[0].upper()}{table.name[1:]} is full: a parameter server holds {len(table.used):,} of its "
                f"rows, {rows:,} more are needed, and the server's share of max_rows is {table.max_rows:,}. "
                + self._advice("Raise max_rows")
            )
        return TableError(
            f"The embedding tables of a parameter server are full: they hold {self.bytes:,} bytes, {rows:,} new rows "
            f"need {rows * table.row_bytes:,} more, and {self.memory_bytes:,} are allowed. "
            + self._advice("Allow more ({embedding_memory_bytes}), start more parameter servers ({num_ps})")
        )

    def _advice(self, more: str) -> str:
        if self.when_full in (WhenFull.EVICT, WhenFull.DISK):
            text = f"All rows that could be evicted were evicted. {more}, or use smaller batches."
        else:
            text = f"{more}, or set {{embedding_when_full}} to 'disk', 'evict' or 'initial'."
        return written(text, self.in_program)

    def _evict(
        self, losing: Sequence[Evictable], needed_bytes: int, most_bytes: int, table: Limited, keep: Array | None
    ) -> None:
        """Frees `needed_bytes` of `losing`, oldest first, or everything that may be evicted.

        Args:
            most_bytes: how much to choose at a time; some of it is evicted now, the rest at the next calls.
            table: the table that needs the room; `keep` are its ids that must stay.
        """
        subject = table if len(losing) == 1 else None
        chosen = self._chosen.get(subject)
        if chosen is not None and chosen.left_bytes >= needed_bytes:
            needed_bytes -= self._let_go(losing, chosen, needed_bytes, table, keep)  # some may have been trained since
        if needed_bytes > 0:
            most_bytes = max(needed_bytes, most_bytes)
            chosen = self._chosen[subject] = _Chosen(_last_to_go(losing, most_bytes, table, keep), most_bytes)
            self._let_go(losing, chosen, needed_bytes, table, keep)

    @staticmethod
    def _let_go(
        losing: Sequence[Evictable], chosen: _Chosen, needed_bytes: int, table: Limited, keep: Array | None
    ) -> int:
        """Evicts chosen rows, at least `needed_bytes` if there are as many; returns the bytes freed."""
        most = left = max(needed_bytes, min(chosen.left_bytes, _EVICTED_AT_ONCE * table.row_bytes))
        for is_older in (True, False):
            for each in losing:
                if left <= 0:
                    break
                goes = each.used < chosen.last if is_older else each.used == chosen.last
                if each is table and keep is not None:
                    places = table.places(keep)
                    goes[places[places >= 0]] = False
                going = np.flatnonzero(goes)[: -(-left // each.row_bytes)]
                if len(going):
                    left -= len(going) * each.row_bytes
                    each.evict(going)
        chosen.left_bytes -= most - left
        return most - left


class Newest:
    """Chooses the most recently trained rows among pieces; of equally old ones, the first.

    Args:
        ages: versions at which all rows were last trained, in pieces of int64 [n].
        count: number of rows to choose; there are more.
    """

    def __init__(self, ages: Iterable[Array], count: int) -> None:
        newest: list[Array] = []
        for used in ages:
            newest.append(used)
            if sum(map(len, newest)) > 2 * count + _AGES_AT_ONCE:
                newest = [_largest(newest, count)]
        chosen = _largest(newest, count)
        self._oldest = int(chosen.min()) if count else np.iinfo(np.int64).max
        self._left = int(np.count_nonzero(chosen == self._oldest))  # still to choose among rows exactly that old

    def choose(self, used: Array) -> Array:
        """Which rows of the next piece are chosen, bool [n]."""
        chosen: Array = used > self._oldest
        same = np.flatnonzero(used == self._oldest)[: self._left]
        chosen[same] = True
        self._left -= len(same)
        return chosen


def _largest(arrays: Sequence[Array], count: int) -> Array:
    whole = np.concatenate(arrays)
    return np.partition(whole, len(whole) - count)[len(whole) - count :] if 0 < count < len(whole) else whole[:count]


def _allowed(table: Limited, rows: int) -> int:
    """How many of `rows` more rows `max_rows` allows."""
    return max(0, min(rows, table.max_rows - len(table.used))) if table.max_rows else rows


def _last_to_go(losing: Sequence[Evictable], wanted_bytes: int, table: Limited, keep: Array | None) -> int:
    """The smallest version such that rows last trained then or before, without `keep`, take `wanted_bytes`; or a
    version later than all."""
    held = [(each.used.copy(), each.row_bytes) for each in losing]
    low = min((int(age.min()) for age, _ in held if len(age)), default=0)
    high = max((int(age.max()) for age, _ in held if len(age)), default=0) + 1
    for each, (age, _) in zip(losing, held, strict=True):
        if each is table and keep is not None:
            places = table.places(keep)
            age[places[places >= 0]] = high
    while low < high:
        middle = (low + high) // 2
        if sum(np.count_nonzero(age <= middle) * size for age, size in held) >= wanted_bytes:
            high = middle
        else:
            low = middle + 1
    return low


class Candidates:
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
