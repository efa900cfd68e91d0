"""The rows of an embedding table in memory, with their slots and counts; in bfloat16 they are rounded stochastically.

With rounding to nearest, a row near 1 ignores updates below 0.4 % of it, however often they come. Rounding up with the
probability of the truncated part preserves them on average (Gupta et al. 2015, "Deep Learning with Limited Numerical
Precision"; Zamirai et al. 2020, "Revisiting BFloat16 Training").

The random bits are a function of the row's id and new values and of the model's version. So a server that replays the
changes of a lost one gets the same rows, whichever other rows are updated with them. Several updates of a row within
one version differ by its values.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from elasticcb.ps.id_index import GrowingArray, IdIndex
from elasticcb.rpc.tensors import Array, aligned, all_finite, dtype_of
from elasticcb.sharding.table_state import TableState

# From SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", OOPSLA 2014): one of its two
# rounds mixes the row's identity, the other the words of the row.
_GOLDEN, _MULTIPLIER = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9)
_OF_VERSION = 0x94D049BB133111EB
_CUT = 16  # bits


def rounded(rows: Array, ids: Array, version: int) -> Array:
    """`rows` (float32 [n, dim]) as bfloat16: each element becomes one of its two neighbours, or itself."""
    bits = np.ascontiguousarray(rows, np.float32).view(np.uint32)
    noise = _noise(ids, version, bits)
    noise += bits
    noise >>= np.uint32(_CUT)
    result: Array = noise.astype(np.uint16).view(dtype_of("bfloat16"))
    if not all_finite(rows):  # infinity must stay unchanged, and NaN with low bits must not become another number
        unknown = np.isnan(rows)
        result[unknown] = np.nan
    return result


def _noise(ids: Array, version: int, bits: Array) -> Array:
    """Random numbers below 2^16, uint32 [n, dim]."""
    seeds = ids.astype(np.uint64) * _GOLDEN
    seeds += np.uint64(version * _OF_VERSION % 2**64)
    seeds ^= np.einsum("ij->i", bits).astype(np.uint64) << np.uint64(32)
    seeds = _mixed(seeds)
    words = _mixed(seeds[:, None] * _columns(bits.shape[1]))
    return words.view(np.uint16)[:, : bits.shape[1]].astype(np.uint32)


@functools.cache
def _columns(dim: int) -> Array:
    """An odd number for each 64 bits of a row's noise, uint64 [n]."""
    return np.arange(1, -(-_CUT * dim // 64) + 1, dtype=np.uint64) * _GOLDEN | np.uint64(1)


def _mixed(words: Array) -> Array:
    """One mixing round on uint64, in place."""
    words ^= words >> np.uint64(32)
    words *= _MULTIPLIER
    words ^= words >> np.uint64(29)
    return words


# Bytes of a row besides its values: two counts, and its entry in the index.
OVERHEAD_BYTES = 16 + 32


class Keeper(Protocol):
    """An observer that needs the old rows before a change."""

    def keep(self, places: Array, counts_only: bool) -> None:
        """The rows at `places` (int64 [n], unique), or only their counts, are about to change."""


class TableRows:
    """Rows at positions 0, 1, 2, … without gaps, found by id.

    Args:
        slots: initial row of each slot, [dim] or another width, by name.
        held_dtype: dtype in memory: `dtype` or bfloat16; None: `dtype`. Trained rows are rounded stochastically, given
            rows to nearest.
    """

    def __init__(
        self, dim: int, dtype: npt.DTypeLike, slots: Mapping[str, Array], held_dtype: npt.DTypeLike | None = None
    ) -> None:
        self.dim, self.dtype = dim, np.dtype(dtype)
        self.held_dtype = self.dtype if held_dtype is None else np.dtype(held_dtype)
        self.index = IdIndex()
        self.initial_slots = {name: np.asarray(row, self.dtype) for name, row in slots.items()}
        self._rows = GrowingArray((dim,), self.held_dtype)
        self._slots = {name: GrowingArray(row.shape, self.dtype) for name, row in self.initial_slots.items()}
        self._hits = GrowingArray((), np.int64)
        self._used = GrowingArray((), np.int64)
        self.snapshots: list[Keeper] = []

    def __len__(self) -> int:
        return len(self.index)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row, with everything stored for it."""
        slots = sum(row.nbytes for row in self.initial_slots.values())
        return self.dim * self.held_dtype.itemsize + slots + OVERHEAD_BYTES

    @property
    def used(self) -> Array:
        """The version at which each was last trained, int64 [n]: a view, valid until the next change."""
        return self._used.array[: len(self)]

    @property
    def hits(self) -> Array:
        """How often each was looked up in training, int64 [n]: a view, valid until the next change."""
        return self._hits.array[: len(self)]

    def add(self, ids: Array, rows: Array, version: int) -> Array:
        """Adds `rows` ([n, dim]) of `ids` (int64 [n], unique, all new); returns their positions."""
        places = self.index.insert(ids)
        first, end = len(self) - len(ids), len(self)
        self._reserve(end)
        self._rows.array[first:end] = rows
        for name, slot in self._slots.items():
            slot.array[first:end] = self.initial_slots[name]
        self._hits.array[first:end] = 0
        self._used.array[first:end] = version
        return places

    def remove(self, places: Array) -> None:
        """Removes the rows at `places` (int64 [n], unique); other rows may move."""
        count = len(self) - len(places)
        self._changing(np.concatenate([places[places < count], np.arange(count, len(self))]))
        gaps, moved = self.index.remove(places)
        for array in (self._rows, *self._slots.values(), self._hits, self._used):
            array.array[gaps] = array.array[moved]

    def read(self, places: Array) -> Array:
        """A new array [n, dim]."""
        held = _gather(self._rows.array, places)
        if self.held_dtype == self.dtype:
            return held
        rows = aligned(held.shape, self.dtype)
        rows[:] = held
        return rows

    def as_held(self, rows: Array) -> Array:
        """What `read` would return for `rows` ([n, dim]) after adding them."""
        return rows.astype(self.held_dtype, copy=False).astype(self.dtype, copy=False)

    def read_slots(self, places: Array) -> dict[str, Array]:
        """New arrays [n, …]."""
        return {name: _gather(slot.array, places) for name, slot in self._slots.items()}

    def write(self, places: Array, rows: Array, slots: Mapping[str, Array], version: int) -> None:
        """Sets rows [n, dim] and slots [n, …] trained at `version`."""
        self._changing(places)
        if self.held_dtype != self.dtype:
            rows = rounded(rows, self.index.ids[places], version)
        _scatter(self._rows.array, places, rows)
        for name, slot in self._slots.items():
            _scatter(slot.array, places, slots[name])
        self._used.array[places] = version

    def count_hits(self, places: Array) -> None:
        """Counts one more lookup of each of `places` (unique)."""
        self._changing(places, counts_only=True)
        self._hits.array[places] = self._hits.array.take(places) + 1

    def slice(self, start: int, count: int) -> TableState:
        """Copies of rows [start, start + count), as far as they exist."""
        end = min(start + count, len(self))
        return TableState(
            self.index.ids[start:end].copy(),
            self._rows.array[start:end].astype(self.dtype),
            {name: slot.array[start:end].copy() for name, slot in self._slots.items()},
            self._hits.array[start:end].copy(),
            self._used.array[start:end].copy(),
        )

    def at(self, places: Array) -> TableState:
        """Copies of the rows at `places` (int64 [n])."""
        return TableState(
            *self.ids_and_rows_at(places),
            self.read_slots(places),
            self._hits.array[places],
            self._used.array[places],
        )

    def counts(self, start: int, count: int) -> tuple[Array, Array, Array]:
        """(ids, hits, used) of rows [start, start + count), copied."""
        part = slice(start, min(start + count, len(self)))
        return self.index.ids[part].copy(), self.hits[part].copy(), self.used[part].copy()

    def ids_and_rows_at(self, places: Array) -> tuple[Array, Array]:
        """(ids, rows) of the rows at `places`."""
        return self.index.ids[places], self.read(places)

    def rows(self, start: int, count: int) -> tuple[Array, Array]:
        """(ids, rows) of rows [start, start + count)."""
        end = min(start + count, len(self))
        return self.index.ids[start:end].copy(), self._rows.array[start:end].astype(self.dtype)

    def fill(self, state: TableState) -> None:
        """Adds all of `state`; none of it exists yet. Missing slots start fresh."""
        first, end = len(self), len(self) + len(state.ids)
        self.add(state.ids, state.rows, 0)
        for name, slot in state.slots.items():
            self._slots[name].array[first:end] = slot
        if state.hits is not None:
            self._hits.array[first:end] = state.hits
        if state.used is not None:
            self._used.array[first:end] = state.used

    def completed(self, state: TableState, chosen: Array, places: Array, version: int) -> TableState:
        """`state`, with missing slots and counts taken from existing rows. Others start fresh.

        Args:
            chosen: which of its rows exist here, int64 [n].
            places: their positions, int64 [n].
            version: version at which the others count as trained, if unknown.
        """
        count = len(state.ids)

        def filled(initial: Any, held: Array) -> Array:
            whole: Array = np.empty((count, *held.shape[1:]), held.dtype)
            whole[:] = initial
            whole[chosen] = held[places]
            return whole

        missing = {name: slot for name, slot in self._slots.items() if name not in state.slots}
        return replace(
            state,
            slots=state.slots | {name: filled(self.initial_slots[name], slot.array) for name, slot in missing.items()},
            hits=filled(0, self._hits.array) if state.hits is None else state.hits,
            used=filled(version, self._used.array) if state.used is None else state.used,
        )

    def _changing(self, places: Array, counts_only: bool = False) -> None:
        for snapshot in tuple(self.snapshots):
            snapshot.keep(places, counts_only)

    def _reserve(self, rows: int) -> None:
        for array in (self._rows, *self._slots.values(), self._hits, self._used):
            array.reserve(rows)


def _gather(array: Array, places: Array) -> Array:
    rows = aligned((len(places), *array.shape[1:]), array.dtype)
    # NumPy gathers directly into `out` only without bounds checks.
    _elements(array).take(places, out=_elements(rows), mode="clip")
    return rows


def _scatter(array: Array, places: Array, rows: Array) -> None:
    _elements(array)[places] = _elements(np.ascontiguousarray(rows, array.dtype))


def _elements(array: Array) -> Array:
    """Rows [n, …] as elements of one opaque dtype, [n]."""
    width = math.prod(array.shape[1:])
    view: Array = array.reshape(len(array), width).view(_opaque(array.itemsize * width)).reshape(len(array))
    return view


@functools.cache
def _opaque(size: int) -> np.dtype[Any]:
    """NumPy gathers and scatters numbers fastest, and elements of other sizes only as opaque types."""
    return np.dtype(f"u{size}" if size in (1, 2, 4, 8) else f"V{size}")
