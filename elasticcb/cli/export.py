"""`elasticcb export`: makes a SavedModel or a `.keras` file from a checkpoint, or from what a job has saved so far."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import rich_click as click

from elasticcb.cli.command import CONTEXT
from elasticcb.cli.job_folders import find_job
from elasticcb.cli.table import is_checkpoint
from elasticcb.clients.local_job import StoredJob
from elasticcb.compute.registry import keep_backend
from elasticcb.errors import CheckpointError, UsageError
from elasticcb.process.devices import hide_gpus
from elasticcb.process.log_files import quiet_environment, without_native_messages
from elasticcb.settings import JOB_FILE, JOURNAL_FILE, RECOVERY_FOLDER, JobSettings
from elasticcb.settings.job import HIDDEN
from elasticcb.storage import durable
from elasticcb.storage.remote_files import is_url

logger = logging.getLogger(__name__)


@click.command(context_settings=CONTEXT)
@click.argument("source", metavar="JOB|CHECKPOINT")
@click.option("--output", metavar="PATH", required=True, help="Folder of the SavedModel, or a file NAME.keras.")
@click.option(
    "--numbered",
    is_flag=True,
    help="Export to the next number below --output, such as 3, as TensorFlow Serving expects.",
)
def export(source: str, output: str, numbered: bool) -> None:
    """Export the model of a job as a SavedModel or a .keras file.

    JOB is the folder, the URL or the name of a training job, as for `resume`. Of a job that runs, or was stopped, the
    weights are those that its servers saved last, at most some seconds ago. CHECKPOINT is the folder or URL of one
    version, or of all versions, of which the newest is exported. The model file and the training data must be where
    they were when the job started.

    \b
    Examples:
      elasticcb export latest --output=exported/clicks
      elasticcb export latest --output=exported/clicks --numbered
      elasticcb export checkpoints/version-00001000 --output=clicks.keras
    """
    target = Path(output).expanduser().absolute()
    if is_url(output):
        raise UsageError(f"--output={output} is a URL. Export to a local folder, and copy it.")
    if numbered and target.suffix == ".keras":
        raise UsageError(
            f"--numbered makes folders for TensorFlow Serving, but --output={output} is a file. Remove one."
        )
    with _snapshot(source) as (settings, folder):
        if not settings.model.definition:
            raise UsageError(
                f"{source} was written by a Python program with a Cluster, and its model is in that program: save it "
                "there with model.save or model.export."
            )
        os.environ.update(quiet_environment("INFO"))
        hide_gpus(os.environ)  # they may be busy with the job
        keep_backend(settings.keras_backend)
        with without_native_messages():
            from elasticcb.sidecar.export import export_model

        version, target = export_model(settings, folder, target, numbered)
    kind = "model" if target.suffix == ".keras" else "SavedModel"
    print(f"The {kind} of version {version:,} of the job {settings.name} is in {target}")


@contextlib.contextmanager
def _snapshot(source: str) -> Iterator[tuple[JobSettings, Path]]:
    """The settings of the job, and the folder of a snapshot, or of versions, on this disk."""
    from elasticcb.checkpoint.manifest import read_manifest
    from elasticcb.checkpoint.remote import local_copy, recovery_files
    from elasticcb.checkpoint.versions import find_latest

    if is_checkpoint(source):
        with local_copy(source if is_url(source) else str(Path(source).expanduser().absolute())) as folder:
            settings = JobSettings.from_json(read_manifest(find_latest(folder))["extra"].get("settings", {}))
            yield _complete(settings, source), Path(folder)
        return
    if is_url(source):
        job, settings = source, StoredJob(source).settings()
    else:
        here = find_job(source, only_training=True)
        settings = _settings_in(here)
        job = settings.store or str(here)
    with contextlib.ExitStack() as until_end:
        saved = until_end.enter_context(recovery_files(job)) if is_url(job) else _saved_by(Path(job))
        if saved is None:
            if is_url(job):
                place = StoredJob(job).status().get("checkpoint_path")
            else:
                place = _checkpoint_of(settings.checkpoint.directory, _run_of(Path(job)))
            if not place:
                raise UsageError(
                    f"The job in {job} has nothing of its model that can be read: its servers save it a second after "
                    "training begins. If it runs, try again then."
                )
            saved = find_latest(until_end.enter_context(local_copy(place)))
        yield settings, saved


def _complete(settings: JobSettings, source: str) -> JobSettings:
    """Raises `UsageError` if a checkpoint has not all of the job's settings: it has no secrets."""
    for what, params in (("model_params", settings.model.params), ("data_reader_params", settings.data.reader_params)):
        for name, value in params.items():
            if value == HIDDEN:
                raise UsageError(
                    f"{source} does not contain the value of {name} in {what}, which looks like a secret. Export from "
                    "the folder of the job, which has all settings."
                )
    return settings


def _settings_in(job: Path) -> JobSettings:
    try:
        return JobSettings.from_json(durable.read_document(job / JOB_FILE))
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{job} contains no training job whose model can be exported: {JOB_FILE}: {error}. Pass the folder of an "
            "`elasticcb train` job, or a checkpoint."
        ) from None


def _saved_by(job: Path) -> Path | None:
    """The recovery files of a job that has not finished; None: there are none, or their manifest is damaged."""
    from elasticcb.checkpoint.manifest import MANIFEST, read_manifest

    recovery = job / RECOVERY_FOLDER
    if (recovery / MANIFEST).is_file():
        try:
            return recovery if read_manifest(recovery)["extra"].get("run") == _run_of(job) else None
        except CheckpointError as error:
            logger.warning("Skipped the recovery files: %s", error)
    return None


def _checkpoint_of(directory: str, run: str) -> str:
    """The folder or URL of the newest checkpoint that a training wrote; if its name is unknown, that of all; "": there
    is none. Raises `StoreError` if a URL can't be read now."""
    from elasticcb.checkpoint.remote import newest_of_run
    from elasticcb.checkpoint.versions import find_latest

    if run:
        return newest_of_run(directory, run)
    if is_url(directory):
        return directory
    with contextlib.suppress(CheckpointError):
        return str(find_latest(directory))
    return ""


def _run_of(job: Path) -> str:
    """The name of its training in snapshots; "": unknown."""
    from elasticcb.master.journal import memory_in

    return memory_in(job / JOURNAL_FILE).run
