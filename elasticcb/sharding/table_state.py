"""What every process knows of an embedding table, a variable whose rows are distributed over servers by id; and its
content, as sent, saved in checkpoints, split between servers and joined again.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from elasticcb.errors import WireError
from elasticcb.rpc.tensors import Array
from elasticcb.settings.definition import build
from elasticcb.settings.table import TableOptions
from elasticcb.sharding.array_names import SLOTS, TABLE, by_index_and_name, named, of_kind
from elasticcb.sharding.partition import ShardMap


@dataclass
class TableState:
    """Rows by id, in any order; a `TableSource` of one piece.

    Attributes:
        ids: int64 [n], unique.
        slots: optimizer slots, by name: [n, dim] each, or of another width. Missing ones start fresh.
        hits: how often each was looked up in training, int64 [n]; None if not counted.
        used: the version at which each was last trained, int64 [n]; None if unknown.
    """

    ids: Array
    rows: Array
    slots: dict[str, Array] = field(default_factory=dict)
    hits: Array | None = None
    used: Array | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def ages(self) -> Iterator[tuple[Array, Array | None]]:
        yield self.ids, self.used

    def pieces(self) -> Iterator[TableState]:
        yield self

    def select(self, places: Array) -> TableState:
        """The rows at `places` (int64, or a mask)."""
        return TableState(
            self.ids[places],
            self.rows[places],
            {name: slot[places] for name, slot in self.slots.items()},
            None if self.hits is None else self.hits[places],
            None if self.used is None else self.used[places],
        )

    def part(self, index: int, shard_map: ShardMap) -> TableState:
        """The part of server `index`."""
        return self if shard_map.servers == 1 else self.select(shard_map.owns(index, self.ids))


def joined(states: Sequence[TableState]) -> TableState:
    """One table from all servers' parts, in the order of ids."""
    parts = [state for state in states if len(state.ids)] or states[:1]

    def all_of(arrays: Iterable[Array | None]) -> Any:
        found = list(arrays)
        known = [array for array in found if array is not None]
        return np.concatenate(known) if len(known) == len(found) else None

    whole = TableState(
        all_of(state.ids for state in parts),
        all_of(state.rows for state in parts),
        {
            name: all_of(state.slots[name] for state in parts)
            for name in parts[0].slots
            if all(name in state.slots for state in parts)
        },
        all_of(state.hits for state in parts),
        all_of(state.used for state in parts),
    )
    ids = whole.ids
    return whole if (ids[1:] > ids[:-1]).all() else whole.select(np.argsort(ids))


def gathered(total: int, pieces: Iterable[TableState]) -> TableState:
    """One table from pieces with the same arrays, `total` rows in all, in the order of ids. Pieces are released one by
    one."""
    arrays: dict[str, Array] = {}
    filled = 0
    for piece in pieces:
        given = _arrays_of(piece)
        if not arrays:
            arrays = {name: np.empty((total, *array.shape[1:]), array.dtype) for name, array in given.items()}
        for name, array in given.items():
            arrays[name][filled : filled + len(array)] = array
        filled += len(piece.ids)
    if filled != total:
        raise WireError(f"Received {filled} rows of an embedding table instead of {total}.")
    ids = arrays["ids"]
    if not (ids[1:] > ids[:-1]).all():
        order = np.argsort(ids)
        for array in arrays.values():
            array[:] = array[order]
    return _state_of(0, arrays)


def overlaid(states: Sequence[TableState]) -> TableState:
    """One table from several that were written one after another: for rows in several, the last one counts."""
    ids = np.concatenate([state.ids for state in states])
    # `unique` finds the first of equal ids: the last, in reverse.
    _, places = np.unique(ids[::-1], return_index=True)
    keep = np.zeros(len(ids), np.bool_)
    keep[len(ids) - 1 - places] = True
    pieces, start = [], 0
    for state in states:
        pieces.append(state.select(keep[start : start + len(state.ids)]))
        start += len(state.ids)
    return joined(pieces)


def to_tensors(tables: Mapping[int, TableState]) -> dict[str, Array]:
    """Arrays with wire names: "table/I/ids", "table/I/rows", "table/I/slots/NAME", "table/I/hits", "table/I/used"."""
    return named(TABLE, {(i, name): array for i, state in tables.items() for name, array in _arrays_of(state).items()})


def _arrays_of(state: TableState) -> dict[str, Array]:
    arrays = {"ids": state.ids, "rows": state.rows}
    counts = {"hits": state.hits, "used": state.used}
    arrays |= {name: count for name, count in counts.items() if count is not None}
    return arrays | named(SLOTS, state.slots)


def from_tensors(tensors: Mapping[str, Array]) -> dict[int, TableState]:
    """The inverse of `to_tensors`; other tensors are ignored. Raises `WireError` for an invalid table."""
    found: dict[int, dict[str, Array]] = {}
    for (index, name), array in by_index_and_name(TABLE, tensors).items():
        found.setdefault(index, {})[name] = array
    return {index: _state_of(index, arrays) for index, arrays in found.items()}


def _state_of(index: int, arrays: Mapping[str, Array]) -> TableState:
    missing = {"ids", "rows"} - arrays.keys()
    if missing:
        raise WireError(f"Table {index} lacks {' and '.join(sorted(missing))}.")
    state = TableState(
        arrays["ids"],
        arrays["rows"],
        of_kind(SLOTS, arrays),
        arrays.get("hits"),
        arrays.get("used"),
    )
    rows, wrong = state.rows.shape, []
    if state.ids.ndim != 1 or len(rows) != 2 or rows[0] != len(state.ids):
        wrong += ["ids", "rows"]
    wrong += [name for name in arrays if name in ("ids", "hits", "used") and arrays[name].dtype != np.int64]
    wrong += [name for name in arrays if name in ("hits", "used") and arrays[name].shape != rows[:1]]
    wrong += [name for name, slot in named(SLOTS, state.slots).items() if slot.shape[:1] != rows[:1]]
    if wrong:
        shown = ", ".join(
            f"{name} {arrays[name].dtype.name}{list(arrays[name].shape)}" for name in dict.fromkeys(wrong)
        )
        raise WireError(
            f"Table {index} has {shown}; expected ids, hits and used of int64[n], rows of [n, dim], slots of [n, ...]."
        )
    return state


@dataclass(frozen=True)
class TableSpec:
    """One table.

    Attributes:
        input_dim: upper bound (exclusive) of ids; None: any id from 0.
        initializer: of rows that nobody has set, as JSON of `keras.saving.serialize_keras_object`; "": all rows are
            given before training.
        options: how its rows are created, trained and evicted.
    """

    input_dim: int | None
    initializer: str = ""
    seed: int = 0
    options: TableOptions = field(default_factory=TableOptions)

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> TableSpec:
        """Raises `WireError` when `text` is invalid."""
        try:
            spec: TableSpec = build(cls, json.loads(text))
            return spec
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise WireError(f"{text!r} does not describe an embedding table: {error}.") from error


def tables_named(name: str, paths: Mapping[int, str]) -> list[int]:
    """The tables that a name matches: the one with this path, or else those whose paths end with it."""
    wanted = layer_of(name)
    layers = {table: layer_of(path) for table, path in paths.items()}
    return [table for table, path in layers.items() if path == wanted] or [
        table for table, path in layers.items() if path.endswith(f"/{wanted}")
    ]


def layer_of(path: str) -> str:
    """The path of a table's layer, given the path of its variable or of the layer."""
    return path.removesuffix("/embeddings")


class TableSource(Protocol):
    """Rows of one table, each id once. They can be read several times, always in the same order."""

    def __len__(self) -> int: ...

    def ages(self) -> Iterator[tuple[Array, Array | None]]:
        """(ids, version at which each was last trained) in pieces, int64 [n] each; None if unknown."""

    def pieces(self) -> Iterator[TableState]:
        """All of it, in at least one piece."""


class JoinedTable:
    """A `TableSource` combining several, with rows of different ids."""

    def __init__(self, sources: Sequence[TableSource]) -> None:
        self._sources = sources

    def __len__(self) -> int:
        return sum(len(source) for source in self._sources)

    def ages(self) -> Iterator[tuple[Array, Array | None]]:
        for source in self._sources:
            yield from source.ages()

    def pieces(self) -> Iterator[TableState]:
        for source in self._sources:
            yield from source.pieces()


def whole(source: TableSource) -> TableState:
    """All rows, in memory, in the order of the ids."""
    return joined(list(source.pieces()))
