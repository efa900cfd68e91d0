"""Finds the row of an id: a hash table in NumPy arrays, which grow without being copied."""

from __future__ import annotations

import contextlib
import math
import mmap
from collections import OrderedDict

import numpy as np
import numpy.typing as npt

from elasticcb.rpc.tensors import Array


class GrowingArray:
    """An array of zeros whose first axis grows.

    It owns its memory pages. The system allocates them at the first write, and moves them by remapping when the array
    grows, so neither growth nor reserved capacity costs anything per row.

    Attributes:
        array: all reserved rows, [capacity, *row_shape]. Read it again after each `reserve`.
    """

    def __init__(self, row_shape: tuple[int, ...], dtype: npt.DTypeLike) -> None:
        self._row_shape, self._dtype = row_shape, np.dtype(dtype)
        self._row_bytes = max(1, math.prod(row_shape) * self._dtype.itemsize)
        self._pages = _pages(mmap.PAGESIZE)
        self.array = self._view()

    def reserve(self, rows: int) -> None:
        """Reserves at least `rows` rows."""
        if rows <= len(self.array):
            return
        size = len(self._pages)
        while size < rows * self._row_bytes:
            size *= 2
        held = self.array
        del self.array
        try:
            del held
            self._pages.resize(size)
        except (BufferError, OSError, SystemError, ValueError):
            # The array is still referenced, or the system can't remap pages.
            old, self._pages = self._pages, _pages(size)
            self._pages[: len(old)] = old[:]
        _use_large_pages(self._pages)
        self.array = self._view()

    def _view(self) -> Array:
        capacity = len(self._pages) // self._row_bytes
        array: Array = np.ndarray((capacity, *self._row_shape), self._dtype, self._pages)
        return array


def _pages(size: int) -> mmap.mmap:
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _use_large_pages(pages: mmap.mmap) -> None:
    """Rows are accessed at random: with large pages the processor needs fewer address translations."""
    if hasattr(mmap, "MADV_HUGEPAGE") and len(pages) >= 4 << 20:
        with contextlib.suppress(OSError):
            pages.madvise(mmap.MADV_HUGEPAGE)


_MOST_IDS = 1 << 20  # per table: 16 MiB

_Key = tuple[int, int, int]


class RecentIds:
    """Remembers ids and the positions of their rows, until rows are removed.

    Comparing ids takes a fiftieth of the time of finding them.
    """

    def __init__(self) -> None:
        self._found: OrderedDict[_Key, tuple[bytes, Array]] = OrderedDict()
        self._count = 0

    def note(self, ids: Array, places: Array) -> None:
        """The rows of `ids` (int64 [n], unique) are at `places` (int64 [n], must not change later)."""
        if not 0 < len(ids) <= _MOST_IDS:
            return
        self._drop(_key_of(ids))
        while self._count + len(ids) > _MOST_IDS:
            self._drop(next(iter(self._found)))
        self._found[_key_of(ids)] = ids.tobytes(), places
        self._count += len(ids)

    def find(self, ids: Array) -> Array | None:
        """The positions of `ids` (any array of ids), int64 [n], read-only.

        None: these were not looked up together in this order, or too long ago.
        """
        if ids.dtype != np.int64 or ids.ndim != 1 or not len(ids):
            return None
        known = self._found.get(_key_of(ids))
        return known[1] if known is not None and known[0] == ids.tobytes() else None

    def clear(self) -> None:
        """Rows have moved."""
        self._found.clear()
        self._count = 0

    def _drop(self, key: _Key) -> None:
        if key in self._found:
            self._count -= len(self._found.pop(key)[1])


def _key_of(ids: Array) -> _Key:
    """Different for most batches."""
    return len(ids), int(ids[0]), int(ids[-1])


# Entries of the hash table: empty, deleted, or a position + _FIRST. Ids are stored in an array at the same number,
# where the first two elements are not ids and match no id.
_EMPTY, _REMOVED, _FIRST = 0, 1, 2
_SMALLEST = 1 << 10  # buckets
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio: Knuth's multiplicative hashing


class IdIndex:
    """Gives ids (int64 >= 0) the places 0, 1, 2, … without gaps.

    Open addressing with linear probing, at most half full: 16 to 32 bytes per id, of which 8 are the id. All calls are
    vectorized and take a few dozen nanoseconds per id.

    Nothing is hashed while each id equals its position, as in a keras.layers.Embedding with all rows on one server.

    Attributes:
        recent: recently looked-up ids, and their positions.
    """

    def __init__(self) -> None:
        self._ids = GrowingArray((), np.int64)
        self._ids.array[:_FIRST] = -1
        self._count = self._removed = 0
        self._is_identity = True  # each id equals its position, and the table below is empty
        self._table, self._mask, self._shift = _empty_table(_SMALLEST)
        self.recent = RecentIds()

    def __len__(self) -> int:
        return self._count

    @property
    def ids(self) -> Array:
        """The ids by position, int64 [n]: a view, valid until the next change."""
        return self._ids.array[_FIRST : _FIRST + self._count]

    def find(self, ids: Array) -> Array:
        """Positions of `ids` (int64 [n]), int64 [n]; -1 for missing ones."""
        if self._is_identity:
            same = ids < self._count
            return ids.copy() if same.all() else np.where(same, ids, -1)
        positions = self._starts(ids)
        marks = self._table.take(positions)
        known = self._ids.array
        same = known.take(marks) == ids
        places: Array = marks.astype(np.int64)
        if not same.all():
            waiting = np.flatnonzero(~same)
            places[waiting] = _FIRST - 1
            waiting = waiting[marks.take(waiting) != _EMPTY]
            positions, wanted = positions.take(waiting), ids.take(waiting)
            while waiting.size:
                positions = (positions + 1) & self._mask
                marks = self._table.take(positions)
                same = known.take(marks) == wanted
                places[waiting[same]] = marks[same]
                rest = np.flatnonzero(~same & (marks != _EMPTY))
                waiting, positions, wanted = waiting.take(rest), positions.take(rest), wanted.take(rest)
        places -= _FIRST
        return places

    def insert(self, ids: Array) -> Array:
        """Inserts `ids` (int64 [n], unique, all new) at the next positions, which are returned, int64 [n]."""
        first = self._count + _FIRST
        end = first + len(ids)
        self._ids.reserve(end)
        self._ids.array[first:end] = ids
        self._count += len(ids)
        places = np.arange(first - _FIRST, end - _FIRST)
        if self._is_identity:
            if not np.array_equal(ids, places):
                self._begin_to_hash()
        elif 2 * (self._count + self._removed) > len(self._table):
            self._rebuild()
        else:
            self._fill(ids, np.arange(first, end, dtype=np.int32))
        return places

    def remove(self, places: Array) -> tuple[Array, Array]:
        """Removes the ids at `places` (int64 [n], unique). The last ones move into the gaps.

        Returns: (positions filled again, their ids' previous positions), so that the caller can move the rows.
        """
        self.recent.clear()
        if self._is_identity:
            self._begin_to_hash()
        count = self._count - len(places)
        gaps = places[places < count]
        stays = np.ones(len(places), bool)
        stays[places[places >= count] - count] = False
        moved = np.flatnonzero(stays) + count
        at = self._positions(np.concatenate([places, moved]))
        self._table[at[: len(places)]] = _REMOVED
        self._table[at[len(places) :]] = gaps + _FIRST
        self._ids.array[gaps + _FIRST] = self._ids.array[moved + _FIRST]
        self._count = count
        self._removed += len(places)
        if 4 * self._removed > len(self._table):
            self._rebuild()
        return gaps, moved

    def _starts(self, ids: Array) -> Array:
        """Where the search for each id starts."""
        hashed = ids.view(np.uint64) ^ (ids >> 32).view(np.uint64)
        hashed *= _MULTIPLIER
        hashed >>= self._shift
        return hashed.view(np.int64)

    def _positions(self, places: Array) -> Array:
        """Positions in the table of the entries for `places`."""
        marks = (places + _FIRST).astype(np.int32)
        positions = self._starts(self._ids.array.take(marks))
        wrong = np.flatnonzero(self._table.take(positions) != marks)
        while wrong.size:
            positions[wrong] = (positions[wrong] + 1) & self._mask
            wrong = wrong[self._table.take(positions[wrong]) != marks[wrong]]
        return positions

    def _fill(self, ids: Array, marks: Array) -> None:
        positions = self._starts(ids)
        while positions.size:
            free = self._table.take(positions) < _FIRST
            # If several entries claim one bucket, the last one written has it.
            self._table[positions[free]] = marks[free]
            rest = np.flatnonzero(self._table.take(positions) != marks)
            positions, marks = (positions.take(rest) + 1) & self._mask, marks.take(rest)

    def _begin_to_hash(self) -> None:
        self._is_identity = False
        self._rebuild()

    def _rebuild(self) -> None:
        buckets = _SMALLEST
        while buckets < 3 * self._count:
            buckets *= 2
        self._table, self._mask, self._shift = _empty_table(buckets)
        self._removed = 0
        self._fill(self.ids, np.arange(_FIRST, _FIRST + self._count, dtype=np.int32))


def _empty_table(buckets: int) -> tuple[Array, np.int64, np.uint64]:
    """An empty table, the mask of its positions, and the shift that turns a hash into one."""
    return np.zeros(buckets, np.int32), np.int64(buckets - 1), np.uint64(64 - buckets.bit_length() + 1)
