"""Ids looked up in training, but not often enough yet to get a row."""

from __future__ import annotations

import numpy as np

from elasticcb.ps.growing_array import GrowingArray
from elasticcb.ps.id_index import IdIndex
from elasticcb.rpc.tensors import Array


class Candidates:
    """Counts lookups of such ids."""

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
