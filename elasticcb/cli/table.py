"""`elasticcb table`: what the embedding tables of a checkpoint hold."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

import rich_click as click

from elasticcb.cli.command import CONTEXT

if TYPE_CHECKING:
    from elasticcb.checkpoint.table_report import CheckpointReport, TableReport

_LABEL_WIDTH = 16  # of the first column, in characters
_QUANTILES = ("least", "25 %", "median", "75 %", "99 %", "most")


@click.command(context_settings=CONTEXT)
@click.argument("checkpoint", metavar="CHECKPOINT")
@click.option(
    "--top",
    type=click.IntRange(0),
    metavar="IDS",
    default=5,
    show_default=True,
    help="How many of the ids that were looked up most are shown.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, with bytes and counts as plain numbers.")
def table(checkpoint: str, top: int, as_json: bool) -> None:
    """Show what the embedding tables of a checkpoint hold: rows, bytes, hit counts, age.

    CHECKPOINT is the folder of a version, or the folder of all versions, of which the newest is shown, or the URL of
    one of them. The job may be running meanwhile.

    \b
    Examples:
      elasticcb table jobs/ctr/checkpoints
      elasticcb table jobs/ctr/checkpoints/version-00001000 --top 20
    """
    from elasticcb.checkpoint.remote import local_copy
    from elasticcb.checkpoint.table_report import report
    from elasticcb.storage.remote_files import is_url

    with local_copy(checkpoint) as folder:
        found = report(folder, top)
    if is_url(checkpoint):
        found = dataclasses.replace(found, folder=checkpoint)
    if as_json:
        print(json.dumps(dataclasses.asdict(found), indent=1, default=str))
    else:
        print("\n".join(report_lines(found)))


def report_lines(found: CheckpointReport) -> Iterator[str]:
    """The report as lines of plain text."""
    yield f"{found.folder}, version {found.version:,}"
    if not found.tables:
        yield "It holds no embedding tables: every variable is dense."
    for each in found.tables:
        yield ""
        yield each.path
        for label, value in _lines(each):
            yield f"  {label:<{_LABEL_WIDTH}}{value}"
    if len(found.tables) > 1:
        rows = sum(each.rows for each in found.tables)
        size = sum(each.row_bytes + each.slot_bytes for each in found.tables)
        yield ""
        yield f"{len(found.tables)} tables: {rows:,} rows, {format_bytes(size)}"


def _lines(table: TableReport) -> Iterator[tuple[str, str]]:
    of = "" if table.input_dim is None else f" of {table.input_dim:,} ids"
    if table.input_dim:
        of += f" ({100 * table.rows / table.input_dim:.3g} %)"
    yield "rows", f"{table.rows:,}{of}, of {table.dim:,} x {table.dtype}"
    if len(table.rows_of_servers) > 1:
        yield "on servers", ", ".join(f"{rows:,}" for rows in table.rows_of_servers)
    slots = f" and the optimizer's {', '.join(table.slots)} {format_bytes(table.slot_bytes)}" if table.slots else ""
    yield "size", f"{format_bytes(table.row_bytes + table.slot_bytes)}: rows {format_bytes(table.row_bytes)}{slots}"
    if table.hits:
        yield "lookups", _quantiles(table.hits)
        yield "last trained", _quantiles(table.ages) + " versions ago"
    if table.top:
        yield "most looked up", ", ".join(f"id {each}: {hits:,}" for each, hits in table.top)


def _quantiles(counts: tuple[int, ...]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in zip(_QUANTILES, counts, strict=True))


def format_bytes(size: int) -> str:
    """1536 -> "1.5 KiB"."""
    amount, unit = float(size), "bytes"
    for unit in ("bytes", "KiB", "MiB", "GiB", "TiB"):
        if amount < 1024 or unit == "TiB":
            break
        amount /= 1024
    return f"{size} bytes" if unit == "bytes" else f"{amount:.1f} {unit}"
