"""Checkpoint folders when a job starts: its own, and those from which its model starts."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from elasticcb.checkpoint import remote as remote_checkpoint
from elasticcb.checkpoint.versions import find_undamaged, find_versions, newest_of_run, put_back, version_of
from elasticcb.checkpoint.warm_start import WarmStart, warm_start
from elasticcb.errors import CheckpointError
from elasticcb.master.job_context import JobContext
from elasticcb.master.keras_host import ModelHost
from elasticcb.process.wording import how_many
from elasticcb.settings import INITIAL_FOLDER, Command
from elasticcb.settings.names import SETTINGS
from elasticcb.storage.folder_lock import ENDING_SECONDS, FolderLock
from elasticcb.storage.remote_files import is_url

logger = logging.getLogger(__name__)


def own_checkpoints(context: JobContext) -> None:
    """Locks the job's checkpoint folder against other jobs. Raises `FolderInUseError` when another job uses it."""
    folder = context.settings.checkpoint.directory
    if context.settings.command is not Command.TRAIN or not folder or is_url(folder):
        return
    given = SETTINGS["checkpoint_dir"].written(context.settings.in_program, folder)
    lock = FolderLock(Path(folder), given, ENDING_SECONDS, ".checkpoints.lock")
    context.until_end.callback(lock.release)
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        lock.take()
        put_back(folder)
    except OSError as error:  # writing checkpoints will report it; training continues
        logger.warning("Could not lock %s against other jobs: %s", folder, error)


def warn_of_later_versions(context: JobContext, version: int) -> None:
    """Warns of checkpoints that other commands would choose instead of those of this job."""
    settings, folder = context.settings, context.settings.checkpoint.directory
    if settings.command is not Command.TRAIN or not folder or settings.keeps_model_in_folder:
        return
    newest = ""
    with contextlib.suppress(OSError, CheckpointError):  # writing checkpoints will report it
        if is_url(folder):
            newest = remote_checkpoint.newest_version(folder)
        elif there := find_versions(folder):
            newest = there[-1].name
    if version_of(newest) > version:
        context.display.message(
            f"{folder} already contains the checkpoint {newest}. `evaluate` and `predict` would use it instead "
            "of earlier versions of this job. Choose another checkpoint_dir, or pass them one version."
        )


class Found(NamedTuple):
    """The version of a checkpoint to start from.

    Attributes:
        folder: on this disk; "": none was given.
        place: where servers read it: the folder, or its URL.
    """

    folder: str
    place: str


def found(context: JobContext, given: str) -> Found:
    """The newest undamaged version in a folder or below a URL; "": none."""
    if not given:
        return Found("", "")
    if not is_url(given):
        folder = str(_told_of_skipped(context, find_undamaged(given)))
        return Found(folder, folder)
    copies = Path(context.settings.directory, INITIAL_FOLDER)
    copy: Path | None = None
    if context.resumes:  # the previous master has downloaded it
        with contextlib.suppress(CheckpointError):
            copy = _told_of_skipped(context, find_undamaged(copies))
    given = given.rstrip("/")
    copy = copy or _told_of_skipped(context, remote_checkpoint.fetch(given, copies))
    return Found(str(copy), given if given.endswith(f"/{copy.name}") else f"{given}/{copy.name}")


def _told_of_skipped(context: JobContext, found: tuple[Path, Sequence[str]]) -> Path:
    folder, skipped = found
    for fault in skipped:
        context.display.message(fault)
    return folder


def newest_of_earlier_master(context: JobContext, run: str) -> str:
    """The newest checkpoint that a given training of this job has written; "": none."""
    folder = context.settings.checkpoint.directory
    return remote_checkpoint.newest_of_run(folder, run) if is_url(folder) else newest_of_run(folder, run)


def warm_start_of(context: JobContext, host: ModelHost) -> WarmStart | None:
    """Initial weights from another model's checkpoint. Raises `CheckpointError` when it does not fit."""
    settings = context.settings.checkpoint
    if not settings.init_from:
        return None
    if host.version:  # a second `fit` keeps the weights of the first
        context.display.message(
            f"{settings.init_from} is not used: the model has already been trained for "
            f"{how_many(host.version, 'step')}."
        )
        return None
    start = found(context, settings.init_from)
    try:
        loaded = warm_start(Path(start.folder), host.variables, settings.init_map)
    except CheckpointError as error:
        raise CheckpointError(str(error).replace(start.folder, start.place)) from error
    context.display.message(loaded.summary())
    return loaded
