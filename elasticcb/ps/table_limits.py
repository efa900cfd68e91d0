"""How much embedding tables may hold, and which rows have to go."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np

from elasticcb.errors import TableError
from elasticcb.rpc.tensors import Array
from elasticcb.settings.choices import WhenFull

if TYPE_CHECKING:
    from elasticcb.storage.cold_store import ColdStore

_CHOSEN_AT_ONCE = 1 / 16  # of the cap: to find the oldest rows, all are looked at, some 20 times
_EVICTED_AT_ONCE = 1 << 15  # rows of those, unless more are needed: whoever waits for them should not wait long
_AGES_AT_ONCE = 1 << 20  # rows whose versions are compared, at least


class Evictable(Protocol):
    """What holds something for each of many ids."""

    @property
    def row_bytes(self) -> int:
        """What one id costs."""

    @property
    def used(self) -> Array:
        """The version at which each was last trained, or asked for, int64 [n]."""

    def evict(self, places: Array) -> None: ...


class Limited(Evictable, Protocol):
    """A table, as the limits see it."""

    name: str
    max_rows: int  # in memory; 0: no limit

    def places(self, ids: Array) -> Array:
        """Of the rows of `ids`, -1 where there is none: int64 [n]."""

    @property
    def may_lose_rows(self) -> bool:
        """Rows that were given can't be made again."""

    @property
    def bytes(self) -> int: ...

    @property
    def candidates(self) -> Evictable:
        """The ids that have no row yet."""


@dataclass
class _Chosen:
    """The rows that are to go next: those that were last trained at `last` or before, as far as `left_bytes`."""

    last: int
    left_bytes: int


@dataclass
class TableLimits:
    """What all tables of one server may hold together, each within its own `max_rows`; they share this object.

    Attributes:
        memory_bytes: of rows, slots, counts and indices; 0: no limit.
        when_full: what becomes of a new id then, or in a table of `max_rows`. Counts of ids without a row go in any
            case when memory is short, those first that were not asked for for the longest time.
        store: where rows go with `WhenFull.DISK`, and only then.
    """

    memory_bytes: int = 0
    when_full: WhenFull = WhenFull.ERROR
    store: ColdStore | None = None
    tables: list[Limited] = field(default_factory=list, init=False, repr=False, compare=False)
    # By the table whose max_rows is reached; None: what all tables may hold is.
    _chosen: dict[Limited | None, _Chosen] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def bytes(self) -> int:
        """What all tables hold now."""
        return sum(table.bytes for table in self.tables)

    def room(self, table: Limited, rows: int, keep: Array | None = None) -> int:
        """How many of `rows` new rows `table` may add, after making room where that is allowed.

        Args:
            keep: ids of `table` whose rows stay, int64 [n].

        Raises `TableError` when they can't be added and the limits say so.
        """
        allowed = _allowed(table, rows)
        if allowed < rows and self._may_go(table):
            needed, most = len(table.used) + rows - table.max_rows, int(table.max_rows * _CHOSEN_AT_ONCE)
            self._evict([table], needed * table.row_bytes, most * table.row_bytes, table, keep)
            allowed = _allowed(table, rows)
        fitting = self._fitting(table, allowed)
        # Without new rows, ids that are counted now may need it.
        if fitting < allowed or (self.memory_bytes and self.bytes > self.memory_bytes):
            needed = allowed * table.row_bytes - (self.memory_bytes - self.bytes)
            # Rows and counts of ids without a row go by the same rule: if counts went first, ids that come rarely would
            # never get a row, however old the rows are that stay.
            losing: list[Evictable] = [each.candidates for each in self.tables]
            losing += [each for each in self.tables if self._may_go(each)]
            self._evict(losing, needed, int(self.memory_bytes * _CHOSEN_AT_ONCE), table, keep)
            fitting = self._fitting(table, allowed)
        if fitting < rows and self.when_full is not WhenFull.INITIAL:
            raise self._full(table, rows)
        return fitting

    def room_at_start(self, table: Limited, rows: int) -> int:
        """How many of `rows` rows `table` may take over, where it holds none.

        Raises `TableError` when that is not all, and none may be left out.
        """
        fitting = self._fitting(table, _allowed(table, rows))
        stays = self.when_full is WhenFull.ERROR or not (table.may_lose_rows or self._may_go(table))
        if fitting < rows and stays:
            raise self._full(table, rows)
        return fitting

    def _may_go(self, table: Limited) -> bool:
        """Whether rows of `table` may leave the memory."""
        return self.when_full is WhenFull.DISK or (self.when_full is WhenFull.EVICT and table.may_lose_rows)

    def _fitting(self, table: Limited, rows: int) -> int:
        if not self.memory_bytes:
            return rows
        return max(0, min(rows, (self.memory_bytes - self.bytes) // table.row_bytes))

    def _full(self, table: Limited, rows: int) -> TableError:
        if _allowed(table, rows) < rows:
            return TableError(
                f"{table.name[0].upper()}{table.name[1:]} is full: a parameter server holds {len(table.used):,} rows "
                f"of it, {rows:,} more are needed, and its share of max_rows is {table.max_rows:,}. "
                + self._advice("Raise max_rows")
            )
        return TableError(
            f"The embedding tables of a parameter server are full: they hold {self.bytes:,} bytes, {rows:,} new rows "
            f"need {rows * table.row_bytes:,} more, and {self.memory_bytes:,} are allowed. "
            + self._advice("Allow more (--embedding_memory_bytes), start more parameter servers (--num_ps)")
        )

    def _advice(self, more: str) -> str:
        if self.when_full in (WhenFull.EVICT, WhenFull.DISK):
            return f"All rows that may go have gone. {more}, or make batches smaller."
        return f"{more}, or choose another --embedding_when_full: 'disk', 'evict' or 'initial'."

    def _evict(
        self, losing: Sequence[Evictable], needed_bytes: int, most_bytes: int, table: Limited, keep: Array | None
    ) -> None:
        """Frees `needed_bytes` of what `losing` hold, the oldest first, or all that may go.

        Args:
            most_bytes: are chosen at once, of which some more than needed go now, and others at the next calls.
            table: needs the room; `keep` are its ids that stay.
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
        """Evicts some of the chosen rows, at least `needed_bytes` of them if there are so many; returns the bytes."""
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
    """Of rows that come in pieces, those that were trained last; of those trained at one version, the first.

    Args:
        ages: the version at which each was last trained, of all rows, int64 [n] each.
        count: of rows to choose; there are more.
    """

    def __init__(self, ages: Iterable[Array], count: int) -> None:
        newest: list[Array] = []
        for used in ages:
            newest.append(used)
            if sum(map(len, newest)) > 2 * count + _AGES_AT_ONCE:
                newest = [_largest(newest, count)]
        chosen = _largest(newest, count)
        self._oldest = int(chosen.min()) if count else np.iinfo(np.int64).max
        self._left = int(np.count_nonzero(chosen == self._oldest))  # to choose, of those that are as old as that

    def choose(self, used: Array) -> Array:
        """Which rows of the next piece are among them, bool [n]."""
        chosen: Array = used > self._oldest
        same = np.flatnonzero(used == self._oldest)[: self._left]
        chosen[same] = True
        self._left -= len(same)
        return chosen


def _largest(arrays: Sequence[Array], count: int) -> Array:
    whole = np.concatenate(arrays)
    return np.partition(whole, len(whole) - count)[len(whole) - count :] if 0 < count < len(whole) else whole[:count]


def _allowed(table: Limited, rows: int) -> int:
    """How many of `rows` more rows a table may have by its `max_rows`."""
    return max(0, min(rows, table.max_rows - len(table.used))) if table.max_rows else rows


def _last_to_go(losing: Sequence[Evictable], wanted_bytes: int, table: Limited, keep: Array | None) -> int:
    """The smallest version such that what was last trained then or before costs `wanted_bytes`, without what `keep`
    names; or one that is later than all."""
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
