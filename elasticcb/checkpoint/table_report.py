"""What the embedding tables of a running job or of a checkpoint hold, put together from the parts of each table."""

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
    """What only a running job knows of a table.

    Attributes:
        bytes: that it takes in memory, with slots, counts and index.
        max_rows: that it may have; 0: no limit.
        min_count: lookups by which an id gets a row.
        waiting: ids that have had fewer.
        removed: rows, since the servers that hold it now have taken it over.
        seconds: that the next two tell of.
        made_per_minute, removed_per_minute: rows for new ids, and rows that went.
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
        path: of the variable.
        dtype, dim: of a row, as it is held; `dim` elements.
        input_dim: how many ids there may be; None: no limit.
        rows: how many ids have one.
        row_bytes, slot_bytes: of all rows, and of what the optimizer keeps for them.
        slots: the names of the latter.
        lookups: of all these rows in training.
        hits: how often rows were looked up in training, by `QUANTILES`; empty when nobody counted.
        top: the ids that were looked up most, with how often.
        ages: how many versions ago rows were last trained, by `QUANTILES`; empty when nobody counted.
        rows_of_servers: by the place of the server.
        live: of a running job; None: it is of a checkpoint.
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
        folder: of the job, or of the checkpoint's version.
        version: of the model.
        held_bytes: what the tables take in memory, by server; empty: it is of a checkpoint.
        memory_bytes: that they may take on each; 0: no limit.
    """

    folder: str
    version: int
    tables: tuple[TableReport, ...]
    held_bytes: tuple[int, ...] = ()
    memory_bytes: int = 0


def table_report(spec: VariableSpec, parts: Sequence[TableCounts], top: int, live: bool) -> TableReport:
    """One table, of its parts by server.

    Args:
        top: of so many ids `TableReport.top` tells.
        live: whether servers hold the parts now.
    """
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
        path: of the table's variable.
        input_dim: ids are below it; None: no limit.
        server: the place of the one that has its row, or would; None: not known.
        row: its values; None: it has no row.
        hits: how often it was looked up in training; before it has a row, towards `min_count`. None: nobody counted.
        used: the version at which it was last trained; None: nobody knows, or it has no row.
        norm: of the row.
        slot_norms: of what the optimizer keeps for it, by name.
        min_count: lookups by which it gets a row.
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
    """What is told of an id by its row, if `state` has one.

    Args:
        lookups: of an id without a row, as far as somebody counts them.
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
