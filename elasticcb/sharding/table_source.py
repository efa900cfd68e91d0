"""The rows of an embedding table, from any storage, read in pieces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from elasticcb.rpc.tensors import Array
from elasticcb.sharding.table_state import TableState, joined


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
