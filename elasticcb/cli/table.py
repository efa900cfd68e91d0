"""`elasticcb table`: shows the embedding tables of a running job or of a checkpoint."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rich_click as click

from elasticcb.cli.command import CONTEXT
from elasticcb.cli.job import end_with
from elasticcb.cli.job_folders import find_job
from elasticcb.cli.kubernetes.job import KubernetesJob
from elasticcb.cli.table_lines import lines_of
from elasticcb.clients.local_job import how_it_ended, master_of, wait_for_start
from elasticcb.clients.running_master import holds_job
from elasticcb.cluster.kubernetes.api import KubernetesAPI
from elasticcb.errors import ElasticCBError, UsageError
from elasticcb.process.logs import quiet_environment, say
from elasticcb.settings import JOB_FILE, JobSettings
from elasticcb.storage import durable

if TYPE_CHECKING:
    from elasticcb.checkpoint.table_report import IdReport, TablesReport

_LARGEST_ID = 2**63 - 1
_STDERR = 2  # its file descriptor


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
@click.option("--id", type=click.IntRange(0, _LARGEST_ID), metavar="ID", help="Show the rows of this id.")
@click.option("--text", metavar="TEXT", help="Show the rows of this string, in layers that take strings.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON document, with bytes and counts as numbers.")
@click.option("--namespace", metavar="NAME", help="Kubernetes namespace; JOB is then the name of a job in it.")
def table(
    source: str,
    top: int,
    name: str | None,
    id: int | None,
    text: str | None,
    as_json: bool,
    namespace: str | None,
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
      elasticcb table ctr --namespace=training --top 20
      elasticcb table jobs/ctr/checkpoints/version-00001000
    """
    if id is not None and text is not None:
        raise UsageError("--id and --text exclude each other. Give one of them.")
    if namespace:
        flags = {"top": top, "table": name, "id": id, "text": text}
        given = [f"--{flag}={value}" for flag, value in flags.items() if value is not None]
        end_with(_on_kubernetes(KubernetesJob(KubernetesAPI(namespace), source), given + ["--json"] * as_json))
        return
    found = _read(source, top, id if text is None else _id_of(text))
    tables: Any = _named(found.tables, name)
    found = dataclasses.replace(found, tables=tables)
    if as_json:
        print(json.dumps(dataclasses.asdict(found), indent=1, default=str))
    else:
        print("\n".join(lines_of(found)))


def _read(source: str, top: int, id: int | None) -> TablesReport | IdReport:
    """Reports on all tables; or, with `id`, on its rows."""
    from elasticcb.checkpoint.manifest import MANIFEST

    if _is_checkpoint(source):
        return _of_checkpoint(source, top, id)
    try:
        folder = find_job(source, only_training=True)
    except UsageError as error:
        raise UsageError(
            f"{error} For a checkpoint, pass its URL, the folder of a version (which contains {MANIFEST}), or the "
            "folder of all versions."
        ) from None
    wait_for_start(folder)
    if how_it_ended(folder) is None:
        return _of_running_job(folder, top, id)
    checkpoints = _checkpoints_of(folder)
    if not checkpoints:
        raise UsageError(
            f"The job in {folder} has ended, and it wrote no checkpoints (no --checkpoint_dir). Pass a checkpoint or "
            "a running job."
        )
    say(f"The job in {folder} has ended. This is its newest checkpoint.")
    return _of_checkpoint(checkpoints, top, id)


def _is_checkpoint(source: str) -> bool:
    from elasticcb.checkpoint.manifest import MANIFEST
    from elasticcb.checkpoint.versions import find_versions
    from elasticcb.storage.remote_files import is_url

    folder = Path(source).expanduser()
    return is_url(source) or (folder / MANIFEST).is_file() or (not holds_job(folder) and bool(find_versions(folder)))


def _of_checkpoint(checkpoint: str, top: int, id: int | None) -> TablesReport | IdReport:
    from elasticcb.checkpoint.remote import local_copy
    from elasticcb.checkpoint.table_files import SavedTables
    from elasticcb.storage.remote_files import is_url

    with local_copy(checkpoint) as folder:
        tables = SavedTables.of(folder)
        found = tables.report(top) if id is None else tables.find(id)
    return dataclasses.replace(found, folder=checkpoint) if is_url(checkpoint) else found


def _of_running_job(folder: Path, top: int, id: int | None) -> TablesReport | IdReport:
    from elasticcb.clients.live_tables import id_of, tables_of

    try:
        with master_of(folder) as master:
            answer = master.tables(top, id)
    except UsageError as error:
        checkpoints = _checkpoints_of(folder)
        there = checkpoints and _is_checkpoint(checkpoints)
        instead = f" To see its newest checkpoint: elasticcb table {shlex.quote(checkpoints)}" if there else ""
        raise UsageError(f"{error}{instead}") from None
    return tables_of(str(folder), answer, top) if id is None else id_of(str(folder), answer, id)


def _checkpoints_of(folder: Path) -> str:
    """The folder or URL of a job's checkpoints; "": it writes none, or its settings can't be read."""
    with contextlib.suppress(OSError, ValueError, ElasticCBError):
        return JobSettings.from_json(json.dumps(durable.read_document(folder / JOB_FILE))).checkpoint.directory
    return ""


def _named(tables: tuple[Any, ...], name: str | None) -> tuple[Any, ...]:
    """Tables of this name; None: all."""
    from elasticcb.sharding.table_spec import layer_of, tables_named

    if name is None:
        return tables
    found = tables_named(name, {index: table.path for index, table in enumerate(tables)})
    if not found:
        known = ", ".join(repr(layer_of(table.path)) for table in tables) or "none"
        raise UsageError(f"There is no embedding table {name!r}. The tables are: {known}.")
    return tuple(tables[index] for index in found)


def _id_of(text: str) -> int:
    """The id that embedding layers compute for a string."""
    os.environ.update(quiet_environment("INFO"))
    kept = os.dup(_STDERR)
    try:
        with open(os.devnull, "wb") as nowhere:  # no setting silences TensorFlow's first lines
            os.dup2(nowhere.fileno(), _STDERR)
        from elasticcb.layers.ids import id_of_text

        return id_of_text(text)
    finally:
        os.dup2(kept, _STDERR)
        os.close(kept)


def _on_kubernetes(job: KubernetesJob, flags: list[str]) -> int:
    """Runs the same command in the master's pod: only from there the job can be reached."""
    if job.state != "running":
        raise UsageError(
            f"The job {job.name} is {job.state}. Pass the folder or the URL of its checkpoints (--checkpoint_dir)."
        )
    directory = job.directory
    code, said = job.run_beside_master(["table", directory, *flags])
    if "--json" in flags and not code:
        said = said[said.index("{") :]  # other output of the pod comes before it
    print(said.replace(directory, job.name), end="", file=sys.stderr if code else sys.stdout)
    return code
