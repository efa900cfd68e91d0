"""Reports on the embedding tables of a running job or of a checkpoint, assembled from the parts of each table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from elasticcb.rpc.tensors import Array
from elasticcb.settings.table import TableOptions
from elasticcb.sharding.partition import VariableSpec
from elasticcb.sharding.table_counts import Spread, TableCounts, Top
from elasticcb.sharding.table_spec import TableSpec
from elasticcb.sharding.table_state import TableState


@dataclass(frozen=True)
class LiveTable:
    """Properties of a table that only a running job knows.

    Attributes:
        bytes: memory usage, with slots, counts and index.
        max_rows: maximum number of rows; 0: no limit.
        min_count: number of lookups after which an id gets a row.
        waiting: number of ids with fewer lookups.
        removed: number of rows removed since its current servers took it over.
        seconds: period of the next two values.
        made_per_minute, removed_per_minute: created and removed rows.
    """

    bytes: int
    max_rows: int
    min_count: int
    waiting: int
    removed: int
    seconds: float
    made_per_minute: float
    removed_per_minute: float


@dataclass(frozen=True)
class TableReport:
    """One table.

    Attributes:
        input_dim: maximum number of ids; None: no limit.
        row_bytes, slot_bytes: bytes of all rows, and of their optimizer slots.
        lookups: number of lookups of all these rows in training.
        hits: quantiles (`QUANTILES`) of the number of lookups per row in training; empty if not counted.
        top: the most frequently looked-up ids, with counts.
        ages: quantiles (`QUANTILES`) of the age of rows, in versions since they were last trained; empty if unknown.
        rows_of_servers: number of rows by server index.
        live: properties of a running job; None: from a checkpoint.
    """

    path: str
    dtype: str
    dim: int
    input_dim: int | None
    rows: int
    row_bytes: int
    slot_bytes: int
    slots: tuple[str, ...]
    lookups: int
    hits: tuple[int, ...]
    top: tuple[tuple[int, int], ...]
    ages: tuple[int, ...]
    rows_of_servers: tuple[int, ...]
    live: LiveTable | None = None


@dataclass(frozen=True)
class TablesReport:
    """All tables of a running job, or of a checkpoint.

    Attributes:
        folder: folder of the job, or of the checkpoint's version.
        held_bytes: memory usage of the tables, by server; empty: from a checkpoint.
        memory_bytes: memory limit per server; 0: no limit.
    """

    folder: str
    version: int
    tables: tuple[TableReport, ...]
    held_bytes: tuple[int, ...] = ()
    memory_bytes: int = 0


def table_report(spec: VariableSpec, parts: Sequence[TableCounts], top: int, live: bool) -> TableReport:
    """Assembles a table from its parts by server."""
    table, hits, ages = TableSpec.from_json(spec.table), Spread(), Spread()
    for part in parts:
        hits.add(part.hits)
        ages.add(part.ages)
    return TableReport(
        path=spec.path,
        dtype=table.options.held_dtype(spec.dtype) if live else spec.dtype,
        dim=spec.row_elements,
        input_dim=table.input_dim,
        rows=sum(part.rows for part in parts),
        row_bytes=sum(part.row_bytes for part in parts),
        slot_bytes=sum(part.slot_bytes for part in parts),
        slots=tuple(sorted({name for part in parts for name in part.slots})),
        lookups=hits.sum,
        hits=hits.quantiles(),
        top=_top_of(parts, top),
        ages=ages.quantiles(),
        rows_of_servers=tuple(part.rows for part in parts),
        live=_live(table.options, parts) if live else None,
    )


def _top_of(parts: Sequence[TableCounts], size: int) -> tuple[tuple[int, int], ...]:
    top = Top(size)
    for part in parts:
        top.show(part.top.ids, part.top.hits)
    return tuple(zip(top.ids.tolist(), top.hits.tolist(), strict=True))


def _live(options: TableOptions, parts: Sequence[TableCounts]) -> LiveTable:
    flows = [part.growth for part in parts if part.growth.seconds > 0]
    return LiveTable(
        bytes=sum(part.bytes for part in parts),
        max_rows=options.max_rows or 0,
        min_count=options.min_count or 1,
        waiting=sum(part.waiting for part in parts),
        removed=sum(part.removed for part in parts),
        seconds=max((flow.seconds for flow in flows), default=0.0),
        made_per_minute=sum(60 * flow.made / flow.seconds for flow in flows),
        removed_per_minute=sum(60 * flow.removed / flow.seconds for flow in flows),
    )


@dataclass(frozen=True)
class IdInTable:
    """One id in one table.

    Attributes:
        input_dim: ids are below it; None: no limit.
        server: index of the server responsible for its row; None: unknown.
        row: its values; None: it has no row.
        hits: number of lookups in training; before it has a row, it counts towards `min_count`. None: not counted.
        used: the version at which it was last trained; None: unknown, or it has no row.
        min_count: number of lookups after which it gets a row.
    """

    path: str
    input_dim: int | None
    server: int | None
    row: tuple[float, ...] | None
    hits: int | None
    used: int | None
    norm: float
    slot_norms: dict[str, float]
    min_count: int


@dataclass(frozen=True)
class IdReport:
    """One id in all tables of a running job, or of a checkpoint: `folder` and `version` as in `TablesReport`."""

    folder: str
    version: int
    id: int
    tables: tuple[IdInTable, ...]


def id_in_table(spec: VariableSpec, server: int | None, state: TableState, lookups: int | None = None) -> IdInTable:
    """Reports on an id, with its row if `state` has one.

    Args:
        lookups: number of lookups of an id without a row, if counted.
    """
    table, has_row = TableSpec.from_json(spec.table), len(state.ids) > 0
    return IdInTable(
        path=spec.path,
        input_dim=table.input_dim,
        server=server,
        row=tuple(state.rows[0].astype(np.float64).tolist()) if has_row else None,
        hits=_first(state.hits) if has_row else lookups,
        used=_first(state.used),
        norm=_norm(state.rows),
        slot_norms={name: _norm(slot) for name, slot in sorted(state.slots.items())} if has_row else {},
        min_count=table.options.min_count or 1,
    )


def _first(counts: Array | None) -> int | None:
    return None if counts is None or not len(counts) else int(counts[0])


def _norm(rows: Array) -> float:
    return float(np.linalg.norm(rows.astype(np.float64)))
