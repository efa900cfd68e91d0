"""The rows of an embedding table that are on disk, because they have not been used for the longest time.

A record per id holds the row's values, slots and counts. A second key per row, of the version at which it was last
trained and its id, finds the rows trained since a version, or not since.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from elasticcb.errors import ElasticCBError
from elasticcb.rpc.tensors import Array
from elasticcb.sharding.table_state import TableState

if TYPE_CHECKING:
    from elasticcb.storage.cold_store import ColdStore

_AT_ONCE = 1 << 15  # rows
_READ_BYTES = 1 << 20  # of a snapshot's records, read at a time: the table's lock is held meanwhile
_ROW_KEY = np.dtype([("space", ">u4"), ("id", ">i8")])
_USED_KEY = np.dtype([("space", ">u4"), ("used", ">u8"), ("id", ">i8")])  # in the order of the versions

_FIRST_VERSION = np.iinfo(np.int64).min  # rows of a warm start were trained before version 0

ReadRows = Callable[[Array], tuple[Array, TableState]]  # of ids, int64 [n]: (ids found, int64 [m], their rows)


class ColdRows:
    """Rows by id, of one table.

    Not thread-safe, like the table; results of `hold` and `snapshot` may be read by other threads.
    """

    def __init__(self, store: ColdStore, like: TableState) -> None:
        self._store = store
        self._record = _Record(like)
        self._rows, self._used = store.new_space(), store.new_space()
        self._count = 0
        # Positions and the keys found there: of the first row, and of the last rows read.
        self._marks = [(0, _space_key(self._rows))]
        for space in (self._rows, self._used):
            weakref.finalize(self, store.drop, _space_key(space), _space_key(space + 1)).atexit = False

    def __len__(self) -> int:
        return self._count

    def put(self, state: TableState) -> None:
        """Adds complete rows; none of them is here yet."""
        order = np.argsort(state.ids)
        for first in range(0, len(order), _AT_ONCE):
            part = state.select(order[first : first + _AT_ONCE])
            row_keys, used_keys = self._keys(part)
            puts = [*zip(row_keys, self._record.packed(part), strict=True), *((key, b"") for key in used_keys)]
            self._store.write(puts)
            self._count += len(part.ids)

    def read(self, ids: Array) -> tuple[Array, TableState]:
        """(ids found among `ids`, int64 [n]; their rows)."""
        return self._found(ids, None)

    def remove(self, state: TableState) -> None:
        """Removes rows returned by `read`."""
        for first in range(0, len(state.ids), _AT_ONCE):
            part = state.select(np.arange(first, min(first + _AT_ONCE, len(state.ids))))
            row_keys, used_keys = self._keys(part)
            self._store.write((), [*row_keys, *used_keys])
            self._count -= len(part.ids)

    def forget_older(self, version: int) -> Array:
        """Removes rows last trained before `version`; returns their ids, int64 [n]."""
        removed = [np.empty(0, np.int64)]
        for ids in self._ids(_FIRST_VERSION, version):
            removed.append(ids)
            self.remove(self.read(ids)[1])
        return np.concatenate(removed)

    def ids(self, since: int = _FIRST_VERSION) -> Array:
        """Ids of rows created or trained from version `since` on, int64 [n]."""
        return np.concatenate([np.empty(0, np.int64), *self._ids(since)])

    def pieces(self) -> Iterator[TableState]:
        """All current rows in order of ids, in pieces."""
        return self._pieces(_space_key(self._rows), _AT_ONCE)

    def rows(self, start: int, count: int) -> TableState:
        """Current rows [start, start + count) in order of ids; fewer at the end."""
        position, key = max(mark for mark in self._marks if mark[0] <= start)
        end = _space_key(self._rows + 1)
        if position < start:
            key = next(islice(self._store.items(key, end, keys_only=True), start - position, None), end)
        piece = next(self._pieces(key, max(1, count)), self._record.unpacked(np.empty(0, np.int64), ()))
        self._marks = [self._marks[0], (start, key)]
        if len(piece.ids):
            self._marks.append((start + len(piece.ids), _behind(self._row_keys(piece.ids[-1:])[0])))
        return piece

    def snapshot(self) -> ReadRows:
        """A `read` function for the current rows, unaffected by later changes; it uses disk space until dropped."""
        return partial(self._found, snapshot=self._store.snapshot())

    def hold(self, since: int | None = None) -> HeldColdRows:
        """The current rows, to be read one after another; only those trained after `since`."""
        if since is None:
            items = self._store.items(_space_key(self._rows), _space_key(self._rows + 1))
            return HeldColdRows(self, items, self._count)
        ids = self.ids(since + 1)
        return HeldColdRows(self, self._items_at(self._store.snapshot(), ids), len(ids))

    def _items_at(self, snapshot: Any, ids: Array) -> Iterator[tuple[bytes, bytes]]:
        rows = max(1, _READ_BYTES // self._record.bytes)
        for first in range(0, len(ids), rows):
            keys = self._row_keys(np.sort(ids[first : first + rows]))  # neighbours in the files are read together
            for key, record in zip(keys, self._store.get_at(snapshot, keys), strict=True):
                if record is not None:
                    yield key, record

    def _found(self, ids: Array, snapshot: Any) -> tuple[Array, TableState]:
        order = np.argsort(ids)  # neighbours in the files are read together
        keys = self._row_keys(ids[order])
        records = self._store.get(keys) if snapshot is None else self._store.get_at(snapshot, keys)
        found = order[[record is not None for record in records]]
        return found, self._record.unpacked(ids[found], [record for record in records if record is not None])

    def _pieces(self, first: bytes, count: int) -> Iterator[TableState]:
        items = self._store.items(first, _space_key(self._rows + 1))
        while len((piece := self.piece(items, count)).ids):
            yield piece

    def piece(self, items: Iterator[tuple[bytes, bytes]], count: int) -> TableState:
        """The next `count` rows of these keys and records."""
        found = list(islice(items, count))
        ids = np.frombuffer(b"".join([key for key, _ in found]), _ROW_KEY)["id"].astype(np.int64)
        return self._record.unpacked(ids, [record for _, record in found])

    def _ids(self, first: int, end: int | None = None) -> Iterator[Array]:
        """Ids of rows last trained from version `first` up to, but excluding, `end`."""
        begin = _used_keys(self._used, np.array([first]), np.zeros(1, np.int64))[0]
        bound = _space_key(self._used + 1)
        if end is not None:
            bound = _used_keys(self._used, np.array([end]), np.zeros(1, np.int64))[0]
        keys = self._store.items(begin, bound, keys_only=True)
        while found := b"".join(islice(keys, _AT_ONCE)):
            yield np.frombuffer(found, _USED_KEY)["id"].astype(np.int64)

    def _keys(self, state: TableState) -> tuple[list[bytes], list[bytes]]:
        assert state.used is not None
        return self._row_keys(state.ids), _used_keys(self._used, state.used, state.ids)

    def _row_keys(self, ids: Array) -> list[bytes]:
        keys = np.empty(len(ids), _ROW_KEY)
        keys["space"], keys["id"] = self._rows, ids
        return _bytes(keys)


class HeldColdRows:
    """Rows at one moment, to be read one after another."""

    def __init__(self, rows: ColdRows, items: Iterator[tuple[bytes, bytes]], count: int) -> None:
        self._rows, self._items, self._count = rows, items, count
        self._start, self._piece = 0, TableState(np.empty(0, np.int64), np.empty((0, 0)))

    def __len__(self) -> int:
        return self._count

    def read(self, start: int, count: int) -> TableState:
        """Rows [start, start + count), or fewer; either the same rows again, or the following ones."""
        if start == self._start + len(self._piece.ids):
            self._start, self._piece = start, self._rows.piece(self._items, count)
        if start != self._start:
            raise ElasticCBError(f"Row {start} of an embedding table was read out of order, after row {self._start}.")
        return self._piece


class _Record:
    """A stored row, as bytes."""

    def __init__(self, like: TableState) -> None:
        self._slots = list(like.slots)
        arrays = [like.rows, *like.slots.values(), like.hits, like.used]
        fields = [(f"{i}", array.dtype, array.shape[1:]) for i, array in enumerate(arrays) if array is not None]
        self._dtype: np.dtype[Any] = np.dtype(fields)
        self.bytes = self._dtype.itemsize

    def packed(self, state: TableState) -> list[bytes]:
        """One record per row."""
        assert self._dtype.names is not None
        records = np.empty(len(state.ids), self._dtype)
        arrays = [state.rows, *(state.slots[name] for name in self._slots), state.hits, state.used]
        for name, array in zip(self._dtype.names, arrays, strict=True):
            records[name] = array
        return _bytes(records)

    def unpacked(self, ids: Array, records: Iterable[bytes]) -> TableState:
        assert self._dtype.names is not None
        whole = np.frombuffer(b"".join(records), self._dtype)
        rows, *slots, hits, used = (np.ascontiguousarray(whole[name]) for name in self._dtype.names)
        return TableState(ids, rows, dict(zip(self._slots, slots, strict=True)), hits, used)


def _bytes(records: Array) -> list[bytes]:
    """The bytes of each element."""
    found: list[bytes] = records.view(f"V{records.itemsize}").tolist()
    return found


def _used_keys(space: int, used: Array, ids: Array) -> list[bytes]:
    keys = np.empty(len(ids), _USED_KEY)
    keys["space"], keys["id"] = space, ids
    keys["used"] = used.astype(np.int64).view(np.uint64) ^ np.uint64(1 << 63)
    return _bytes(keys)


def _space_key(space: int) -> bytes:
    """The smallest key that begins with this number."""
    return space.to_bytes(4, "big")


def _behind(key: bytes) -> bytes:
    """The next key in order."""
    return key + b"\0"
