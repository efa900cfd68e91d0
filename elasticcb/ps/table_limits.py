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

_EVICTED_AT_ONCE = 1 / 16  # of the cap: to find the oldest rows, all are looked at
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
            wanted = max(len(table.used) + rows - table.max_rows, int(table.max_rows * _EVICTED_AT_ONCE))
            self._evict([table], wanted * table.row_bytes, table, keep)
            allowed = _allowed(table, rows)
        fitting = self._fitting(table, allowed)
        # Without new rows, ids that are counted now may need it.
        if fitting < allowed or (self.memory_bytes and self.bytes > self.memory_bytes):
            wanted = max(
                allowed * table.row_bytes - (self.memory_bytes - self.bytes), int(self.memory_bytes * _EVICTED_AT_ONCE)
            )
            # Rows and counts of ids without a row go by the same rule: if counts went first, ids that come rarely would
            # never get a row, however old the rows are that stay.
            losing: list[Evictable] = [each.candidates for each in self.tables]
            losing += [each for each in self.tables if self._may_go(each)]
            self._evict(losing, wanted, table, keep)
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

    @staticmethod
    def _evict(losing: Sequence[Evictable], wanted_bytes: int, table: Limited, keep: Array | None) -> None:
        """Frees `wanted_bytes` of what `losing` hold, the oldest first, or all that may go."""
        losing = [each for each in losing if len(each.used)]
        if not losing:
            return
        ages = [each.used.copy() for each in losing]
        newest = max(int(age.max()) for age in ages) + 1
        if keep is not None and table in losing:
            places = table.places(keep)
            ages[losing.index(table)][places[places >= 0]] = newest
        last = _last_version_to_go(ages, [each.row_bytes for each in losing], wanted_bytes, newest)
        going = [np.flatnonzero(age < last) for age in ages]
        wanted_bytes -= sum(len(places) * each.row_bytes for each, places in zip(losing, going, strict=True))
        for each, age, places in zip(losing, ages, going, strict=True):
            if last < newest and wanted_bytes > 0:  # of those last trained at that version, only as many as needed
                same = np.flatnonzero(age == last)[: -(-wanted_bytes // each.row_bytes)]
                wanted_bytes -= len(same) * each.row_bytes
                places = np.concatenate([places, same])
            if len(places):
                each.evict(places)


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


def _last_version_to_go(ages: Iterable[Array], row_bytes: Iterable[int], wanted_bytes: int, newest: int) -> int:
    """The smallest version such that rows last trained then or before cost `wanted_bytes`; at most `newest`."""
    held = list(zip(ages, row_bytes, strict=True))
    low, high = min(int(age.min()) for age, _ in held), newest
    while low < high:
        middle = (low + high) // 2
        if sum(np.count_nonzero(age <= middle) * size for age, size in held) >= wanted_bytes:
            high = middle
        else:
            low = middle + 1
    return low
