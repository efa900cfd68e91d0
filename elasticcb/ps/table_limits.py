"""Size limits of embedding tables, and which rows to evict."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np

from elasticcb.errors import TableError
from elasticcb.rpc.tensors import Array
from elasticcb.settings import WhenFull, written

if TYPE_CHECKING:
    from elasticcb.storage.cold_store import ColdStore

_CHOSEN_AT_ONCE = 1 / 16  # share of the limit: finding the oldest rows scans all rows, some 20 times
_EVICTED_AT_ONCE = 1 << 15  # evict at most this many of them at once, unless more are needed, to keep calls short
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
