"""`elasticcb table`: shows the embedding tables of a running job or of a checkpoint."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rich_click as click

from elasticcb.cli.command import CONTEXT, in_namespace
from elasticcb.cli.job import end_with
from elasticcb.cli.job_folders import find_job
from elasticcb.cli.kubernetes.job import KubernetesJob
from elasticcb.clients.local_job import how_it_ended, master_of, wait_for_start
from elasticcb.clients.running_master import holds_job
from elasticcb.cluster.kubernetes.api import KubernetesAPI
from elasticcb.errors import ElasticCBError, UsageError
from elasticcb.process.log_files import quiet_environment, say, without_native_messages
from elasticcb.process.wording import how_many
from elasticcb.settings import JOB_FILE, JobSettings
from elasticcb.storage import durable

if TYPE_CHECKING:
    from elasticcb.checkpoint.table_report import IdInTable, IdReport, LiveTable, TableReport, TablesReport

_LARGEST_ID = 2**63 - 1
_LABEL_WIDTH = 16  # width of the first column, in characters
_QUANTILES = ("least", "25 %", "median", "75 %", "99 %", "most")
_VALUES_SHOWN = 8  # of a row


@click.command(context_settings=CONTEXT)
@click.argument("source", metavar="JOB|CHECKPOINT")
@click.option(
    "--top",
    type=click.IntRange(0, 10_000),
    metavar="IDS",
    default=5,
    show_default=True,
    help="Number of most frequently looked-up ids to show.",
)
@click.option("--table", "name", metavar="NAME", help="Show only the table of this layer.")
@click.option("--id", metavar="ID", help="Show the rows of this id: a number, or a string in layers that take strings.")
@click.option("--text", metavar="TEXT", help="Show the rows of this string, even if it looks like a number.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON document, with bytes and counts as numbers.")
@in_namespace
def table(
    source: str, top: int, name: str | None, id: str | None, text: str | None, as_json: bool, namespace: str | None
) -> None:
    """Show the embedding tables of a running job or of a checkpoint: rows, bytes, hit counts, age.

    JOB is the job's folder or its name below `jobs`; a --job_name or `latest` (the newest training job); or, with
    --namespace, the name of a job on Kubernetes. Parameter servers count while they train. For a job that has ended,
    the newest checkpoint is shown. CHECKPOINT is the folder or URL of one version, or of all versions, of which the
    newest is shown.

    \b
    Examples:
      elasticcb table train-ctr-20260101-120000
      elasticcb table train-ctr-20260101-120000 --table users --id 42
      elasticcb table train-ctr-20260101-120000 --id user_1
      elasticcb table ctr --namespace=training --top 20
      elasticcb table jobs/ctr/checkpoints/version-00001000
    """
    if id is not None and text is not None:
        raise UsageError("--id and --text exclude each other. Give one of them.")
    if namespace:
        flags = {"top": top, "table": name, "id": id, "text": text}
        given = [f"--{flag}={value}" for flag, value in flags.items() if value is not None]
        job = KubernetesJob(KubernetesAPI(namespace), source)
        if job.state != "running":
            raise UsageError(
                f"The job {job.name} is {job.state}. Pass the folder or the URL of its checkpoints (--checkpoint_dir)."
            )
        end_with(job.pass_on("table", given + ["--json"] * as_json))
        return
    number = _id_of(id, text)
    found: Any = _read(source, top, number)
    found = dataclasses.replace(found, tables=_named(found.tables, name))
    if as_json:
        print(json.dumps(dataclasses.asdict(found), indent=1, default=str))
    else:
        print("\n".join(_report_lines(found) if number is None else _id_lines(found)))


def _read(source: str, top: int, id: int | None) -> TablesReport | IdReport:
    """Reports on all tables; or, with `id`, on its rows."""
    from elasticcb.checkpoint.manifest import MANIFEST

    if is_checkpoint(source):
        return _of_checkpoint(source, top, id)
    try:
        folder = find_job(source, only_training=True)
    except UsageError as error:
        raise UsageError(
            f"{error} For a checkpoint, pass its URL, the folder of a version (which contains {MANIFEST}), or the "
            "folder of all versions."
        ) from None
    wait_for_start(folder)
    ended = how_it_ended(folder)
    if ended is None:
        return _of_running_job(folder, top, id)
    checkpoints = ended.get("checkpoint_path") or _checkpoints_of(folder)  # of which others may have written some
    if not checkpoints:
        raise UsageError(
            f"The job in {folder} has ended, and it wrote no checkpoints (no --checkpoint_dir). Pass a checkpoint or "
            "a running job."
        )
    say(f"The job in {folder} has ended. This is its newest checkpoint.")
    return _of_checkpoint(checkpoints, top, id)


def is_checkpoint(source: str) -> bool:
    """Whether it is the folder or URL of a version or of versions, not a job's."""
    from elasticcb.checkpoint.manifest import MANIFEST
    from elasticcb.checkpoint.versions import find_versions
    from elasticcb.storage.job_store import JobStore
    from elasticcb.storage.remote_files import is_url
    from elasticcb.storage.store_lock import newest_owner

    folder = Path(source).expanduser()
    if is_url(source):
        with JobStore(source) as store:
            return not newest_owner(store)[0]
    return (folder / MANIFEST).is_file() or (not holds_job(folder) and bool(find_versions(folder)))


def _of_checkpoint(checkpoint: str, top: int, id: int | None) -> TablesReport | IdReport:
    from elasticcb.checkpoint.remote import local_copy
    from elasticcb.checkpoint.table_report import SavedTables
    from elasticcb.storage.remote_files import is_url

    with local_copy(checkpoint) as folder:
        tables = SavedTables.of(folder)
        found = tables.report(top) if id is None else tables.find(id)
    return dataclasses.replace(found, folder=checkpoint) if is_url(checkpoint) else found


def _of_running_job(folder: Path, top: int, id: int | None) -> TablesReport | IdReport:
    from elasticcb.checkpoint.table_report import id_of, tables_of

    try:
        with master_of(folder) as master:
            answer = master.tables(top, id)
    except UsageError as error:
        checkpoints = _checkpoints_of(folder)
        there = checkpoints and is_checkpoint(checkpoints)
        instead = f" To see its newest checkpoint: elasticcb table {shlex.quote(checkpoints)}" if there else ""
        raise UsageError(f"{error}{instead}") from None
    return tables_of(str(folder), answer, top) if id is None else id_of(str(folder), answer, id)


def _checkpoints_of(folder: Path) -> str:
    """The folder or URL of a job's checkpoints; "": it writes none, or its settings can't be read."""
    with contextlib.suppress(OSError, ValueError, ElasticCBError):
        return JobSettings.from_json(durable.read_document(folder / JOB_FILE)).checkpoint.directory
    return ""


def _named(tables: tuple[Any, ...], name: str | None) -> tuple[Any, ...]:
    """Tables of this name; None: all."""
    from elasticcb.sharding.table_state import layer_of, tables_named

    if name is None:
        return tables
    found = tables_named(name, {index: table.path for index, table in enumerate(tables)})
    if not found:
        known = ", ".join(repr(layer_of(table.path)) for table in tables) or "none"
        raise UsageError(f"There is no embedding table {name!r}. The tables are: {known}.")
    return tuple(tables[index] for index in found)


def _id_of(id: str | None, text: str | None) -> int | None:
    """The id to show, as a number; None: all tables."""
    if id is None:
        return None if text is None else _id_of_text(text)
    if not re.fullmatch(r"[+-]?\d+", id):
        return _id_of_text(id)
    number = int(id)
    if not 0 <= number <= _LARGEST_ID:
        raise UsageError(
            f"--id={id} is not an id. Expected a number from 0 to {_LARGEST_ID}. For a string that looks like a "
            f"number: --text={id}"
        )
    return number


def _id_of_text(text: str) -> int:
    """The id that embedding layers compute for a string."""
    os.environ.update(quiet_environment("INFO"))
    with without_native_messages():
        from elasticcb.layers.ids import id_of_text

        return id_of_text(text)


def _report_lines(found: TablesReport) -> Iterator[str]:
    yield f"{found.folder}, version {found.version:,}"
    yield from _by_table([(each.path, _table(each)) for each in found.tables])
    if len(found.tables) > 1:
        rows = sum(each.rows for each in found.tables)
        size = sum(each.row_bytes + each.slot_bytes for each in found.tables)
        yield ""
        yield f"{len(found.tables)} tables: {how_many(rows, 'row')}, {_format_bytes(size)}"
    if found.tables and found.held_bytes:
        limit = f", of {_format_bytes(found.memory_bytes)} on each" if found.memory_bytes else ""
        yield ""
        yield f"memory of the servers: {', '.join(map(_format_bytes, found.held_bytes))}{limit}"


def _id_lines(found: IdReport) -> Iterator[str]:
    yield f"id {found.id} in {found.folder}, version {found.version:,}"
    yield from _by_table([(each.path, _id(each, found.id, found.version)) for each in found.tables])


def _by_table(tables: Sequence[tuple[str, Iterator[tuple[str, str]]]]) -> Iterator[str]:
    if not tables:
        yield "There are no embedding tables: all variables are dense."
    for path, labelled in tables:
        yield ""
        yield path
        for label, value in labelled:
            yield f"  {label:<{_LABEL_WIDTH}}{value}"


def _table(table: TableReport) -> Iterator[tuple[str, str]]:
    of = "" if table.input_dim is None else f" of {how_many(table.input_dim, 'id')}"
    if table.input_dim:
        of += f" ({100 * table.rows / table.input_dim:.3g} %)"
    yield "rows", f"{table.rows:,}{of}, of {table.dim:,} x {table.dtype}"
    if len(table.rows_of_servers) > 1:
        yield "on servers", ", ".join(f"{rows:,}" for rows in table.rows_of_servers)
    slots = f" and the optimizer's {', '.join(table.slots)} {_format_bytes(table.slot_bytes)}" if table.slots else ""
    yield "size", f"{_format_bytes(table.row_bytes + table.slot_bytes)}: rows {_format_bytes(table.row_bytes)}{slots}"
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
    yield "in memory", f"{_format_bytes(live.bytes)} with counts and index"
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
        when = f"at version {table.used:,}" if table.used >= 0 else "before its warm start"
        yield "last trained", f"{how_many(max(version - table.used, 0), 'version')} ago, {when}"


def _why_no_row(table: IdInTable, id: int) -> str:
    if table.input_dim is not None and id >= table.input_dim:
        return f"its ids are below {table.input_dim:,}"
    if table.hits:
        return f"looked up {how_many(table.hits, 'time')} so far; a row needs {table.min_count:,}"
    return "it has its initial value"


def _quantiles(counts: tuple[int, ...]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in zip(_QUANTILES, counts, strict=True))


def _format_bytes(size: int) -> str:
    """1536 -> "1.5 KiB"."""
    amount, unit = float(size), "bytes"
    for unit in ("bytes", "KiB", "MiB", "GiB", "TiB"):
        if amount < 1024 or unit == "TiB":
            break
        amount /= 1024
    return how_many(size, "byte") if unit == "bytes" else f"{amount:.1f} {unit}"
