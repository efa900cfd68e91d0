"""Reports on embedding tables as lines of plain text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from elasticcb.process.wording import how_many

if TYPE_CHECKING:
    from elasticcb.checkpoint.table_report import IdInTable, IdReport, LiveTable, TableReport, TablesReport

_LABEL_WIDTH = 16  # width of the first column, in characters
_QUANTILES = ("least", "25 %", "median", "75 %", "99 %", "most")
_VALUES_SHOWN = 8  # of a row


def lines_of(found: TablesReport | IdReport) -> Iterator[str]:
    """All tables, or one id in all tables."""
    from elasticcb.checkpoint.table_report import TablesReport

    return _report_lines(found) if isinstance(found, TablesReport) else _id_lines(found)


def _report_lines(found: TablesReport) -> Iterator[str]:
    yield f"{found.folder}, version {found.version:,}"
    yield from _by_table(found.tables, _table)
    if len(found.tables) > 1:
        rows = sum(each.rows for each in found.tables)
        size = sum(each.row_bytes + each.slot_bytes for each in found.tables)
        yield ""
        yield f"{len(found.tables)} tables: {how_many(rows, 'row')}, {format_bytes(size)}"
    if found.tables and found.held_bytes:
        limit = f", of {format_bytes(found.memory_bytes)} on each" if found.memory_bytes else ""
        yield ""
        yield f"memory of the servers: {', '.join(map(format_bytes, found.held_bytes))}{limit}"


def _id_lines(found: IdReport) -> Iterator[str]:
    yield f"id {found.id} in {found.folder}, version {found.version:,}"
    yield from _by_table(found.tables, lambda each: _id(each, found.id, found.version))


def _by_table(tables: Sequence[Any], labelled: Callable[[Any], Iterator[tuple[str, str]]]) -> Iterator[str]:
    if not tables:
        yield "There are no embedding tables: all variables are dense."
    for each in tables:
        yield ""
        yield each.path
        for label, value in labelled(each):
            yield f"  {label:<{_LABEL_WIDTH}}{value}"


def _table(table: TableReport) -> Iterator[tuple[str, str]]:
    of = "" if table.input_dim is None else f" of {how_many(table.input_dim, 'id')}"
    if table.input_dim:
        of += f" ({100 * table.rows / table.input_dim:.3g} %)"
    yield "rows", f"{table.rows:,}{of}, of {table.dim:,} x {table.dtype}"
    if len(table.rows_of_servers) > 1:
        yield "on servers", ", ".join(f"{rows:,}" for rows in table.rows_of_servers)
    slots = f" and the optimizer's {', '.join(table.slots)} {format_bytes(table.slot_bytes)}" if table.slots else ""
    yield "size", f"{format_bytes(table.row_bytes + table.slot_bytes)}: rows {format_bytes(table.row_bytes)}{slots}"
    if table.live is not None:
        yield from _live(table.live, table.rows)
    if table.hits:
        yield "lookups", _quantiles(table.hits)
        yield "last trained", _quantiles(table.ages) + " versions ago"
    if table.top:
        yield (
            "most looked up",
            ", ".join(f"id {each}: {hits:,} ({100 * hits / max(table.lookups, 1):.3g} %)" for each, hits in table.top),
        )


def _live(live: LiveTable, rows: int) -> Iterator[tuple[str, str]]:
    yield "in memory", f"{format_bytes(live.bytes)} with counts and index"
    if live.max_rows:
        taken = f"of which {100 * rows / live.max_rows:.3g} % are used"
        yield "max_rows", f"{live.max_rows:,}, {taken if rows <= live.max_rows else 'the other rows are on disk'}"
    if live.min_count > 1:
        yield "waiting", f"{how_many(live.waiting, 'id')} without a row: fewer than {live.min_count:,} lookups so far"
    if live.seconds:
        made, removed = live.made_per_minute, live.removed_per_minute
        flow = f"{made:,.0f} created, {removed:,.0f} removed, in the last {live.seconds:.0f} s"
        yield "growth", f"{made - removed:+,.0f} rows a minute: {flow}"
    if live.removed:
        yield "removed", f"{how_many(live.removed, 'row')} so far"


def _id(table: IdInTable, id: int, version: int) -> Iterator[tuple[str, str]]:
    on = "" if table.server is None else f" on server {table.server}"
    if table.row is None:
        yield "row", f"none{on}: {_why_no_row(table, id)}"
        return
    shown = ", ".join(f"{value:.4g}" for value in table.row[:_VALUES_SHOWN])
    yield "row", f"{shown}{', …' if len(table.row) > _VALUES_SHOWN else ''}"
    yield "norm", f"{table.norm:.4g}, of {how_many(len(table.row), 'value')}{on}"
    for name, norm in table.slot_norms.items():
        yield name, f"norm {norm:.4g}"
    if table.hits is not None:
        yield "lookups", f"{table.hits:,}"
    if table.used is not None:
        yield "last trained", f"{how_many(max(version - table.used, 0), 'version')} ago, at version {table.used:,}"


def _why_no_row(table: IdInTable, id: int) -> str:
    if table.input_dim is not None and id >= table.input_dim:
        return f"its ids are below {table.input_dim:,}"
    if table.hits:
        return f"looked up {how_many(table.hits, 'time')} so far; a row needs {table.min_count:,}"
    return "it has its initial value"


def _quantiles(counts: tuple[int, ...]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in zip(_QUANTILES, counts, strict=True))


def format_bytes(size: int) -> str:
    """1536 -> "1.5 KiB"."""
    amount, unit = float(size), "bytes"
    for unit in ("bytes", "KiB", "MiB", "GiB", "TiB"):
        if amount < 1024 or unit == "TiB":
            break
        amount /= 1024
    return how_many(size, "byte") if unit == "bytes" else f"{amount:.1f} {unit}"
