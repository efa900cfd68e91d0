"""What every process knows of an embedding table, a variable whose rows are distributed over servers by id; and its
rows from any storage, read in pieces.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from elasticcb.errors import WireError
from elasticcb.rpc.tensors import Array
from elasticcb.settings.definition import build
from elasticcb.settings.table import TableOptions
from elasticcb.sharding.table_state import TableState, joined


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
