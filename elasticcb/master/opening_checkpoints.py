"""Checkpoint folders when a job starts: its own, and those from which its model starts."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

from elasticcb.checkpoint import remote as remote_checkpoint
from elasticcb.checkpoint.versions import find_undamaged, find_versions, put_back, version_of
from elasticcb.checkpoint.warm_start import WarmStart, warm_start
from elasticcb.errors import CheckpointError
from elasticcb.master.keras_host import ModelHost
from elasticcb.master.order import Order
from elasticcb.process.wording import how_many
from elasticcb.settings import INITIAL_FOLDER, Command
from elasticcb.settings.arguments import as_user_writes
from elasticcb.storage.folder_lock import ENDING_SECONDS, FolderLock
from elasticcb.storage.remote_files import is_url

logger = logging.getLogger(__name__)


def own_checkpoints(order: Order) -> None:
    """Locks the job's checkpoint folder against other jobs. Raises `FolderInUseError` when another job uses it."""
    folder = order.settings.checkpoint.directory
    if order.settings.command is not Command.TRAIN or not folder or is_url(folder):
        return
    lock = FolderLock(Path(folder), f"--checkpoint_dir={folder}", ENDING_SECONDS, ".checkpoints.lock")
    order.until_end.callback(lock.release)
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        lock.take()
        put_back(folder)
    except OSError as error:  # writing checkpoints will report it; training continues
        logger.warning("Could not lock %s against other jobs: %s", folder, error)


def warn_of_later_versions(order: Order, version: int) -> None:
    """Warns of checkpoints that other commands would choose instead of those of this job."""
    folder = order.settings.checkpoint.directory
    if order.settings.command is not Command.TRAIN or not folder or is_url(folder):
        return
    found: list[Path] = []
    with contextlib.suppress(OSError):  # writing checkpoints will report it
        found = find_versions(folder)
    if found and version_of(found[-1].name) > version:
        order.display.message(
            f"{folder} already contains the checkpoint {found[-1].name}. `evaluate` and `predict` would use it instead "
            "of earlier versions of this job. Choose another --checkpoint_dir, or pass them one version."
        )


def on_disk(order: Order, folder: str) -> str:
    """The folder of the version to start from, on disk; "": none was given."""
    say = order.display.message
    if not is_url(folder):
        return str(find_undamaged(folder, say)) if folder else ""
    copies = Path(order.settings.directory, INITIAL_FOLDER)
    if order.memory is not None:  # the previous master has downloaded it
        with contextlib.suppress(CheckpointError):
            return str(find_undamaged(copies, say))
    return str(remote_checkpoint.fetch(folder, copies, say))


def warm_start_of(order: Order, host: ModelHost) -> WarmStart | None:
    """Initial weights from another model's checkpoint. Raises `CheckpointError` when it does not fit."""
    settings = order.settings.checkpoint
    if not settings.init_from:
        return None
    if host.version:  # a second `fit` keeps the weights of the first
        order.display.message(
            f"{settings.init_from} is not used: the model has already been trained for "
            f"{how_many(host.version, 'step')}."
        )
        return None
    try:
        found = warm_start(Path(on_disk(order, settings.init_from)), host.variables, settings.init_map)
    except CheckpointError as error:
        raise CheckpointError(as_user_writes(str(error), order.settings)) from error
    order.display.message(found.summary())
    return found
