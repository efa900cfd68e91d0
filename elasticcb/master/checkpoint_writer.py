"""Owns the checkpoint folder of a job, and writes its checkpoints when they are due. One that can't be written does not
stop training."""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from elasticcb.checkpoint import remote
from elasticcb.checkpoint.shard_file import Part, SavedFile, write_part
from elasticcb.checkpoint.versions import begin_version, finish_version, prune, put_back, server_file, version_of
from elasticcb.errors import CheckpointError, StoreError
from elasticcb.master.job_context import JobContext
from elasticcb.master.master_server import MasterServer
from elasticcb.master.ps_admin import PSControl
from elasticcb.settings import Command, JobSettings
from elasticcb.settings.names import SETTINGS
from elasticcb.sharding.partition import Slice, partition
from elasticcb.storage.folder_lock import FolderLock
from elasticcb.storage.remote_files import as_path, is_url
from elasticcb.storage.store_lock import StoreLock, locked

logger = logging.getLogger(__name__)

_CHECKPOINTS_LOCK = ".checkpoints.lock"  # in their folder, or below their URL


class CheckpointWriter:
    """Makes the servers write their parts, to a folder or below a URL, and combines them into a valid checkpoint.

    Attributes:
        newest: path or URL of the newest checkpoint; "" before the first.
    """

    def __init__(
        self,
        settings: JobSettings,
        control: PSControl,
        master: MasterServer,
        say: Callable[[str], None],
        resumed: bool,
        lock: FolderLock | StoreLock | None,
    ) -> None:
        self._job = settings.name
        self._settings = settings.checkpoint
        self._control, self._master, self._say, self._resumed = control, master, say, resumed
        self._lock = lock
        # The user has asked for no place that all processes see; the master can write what it holds anyway.
        self._is_of_job = settings.keeps_model_in_folder
        self._may_write_here = (
            self._is_of_job and not settings.store and settings.cluster.kind not in ("local", "inprocess")
        )
        self._shown = json.loads(settings.to_show())
        self._missing: CheckpointError | None = None  # why the last one is not on disk
        self._due = self._next(control.client.version)
        self.wanted = bool(self._settings.directory)
        self.newest = ""

    def is_due(self, version: int) -> bool:
        """Whether the model has reached the version of the next checkpoint."""
        return self.wanted and bool(self._settings.steps) and version >= self._due

    def write(self, version: int, again: bool = False) -> None:
        """Writes a checkpoint of the current weights and slots, and prunes old ones.

        Args:
            version: of the model, as known to the master; the servers may be ahead.

        A failed checkpoint leaves nothing behind; training continues, and the next one is due as usual.
        """
        self._due = self._next(version)
        try:
            path, version = self._written(version)
        except (CheckpointError, OSError) as error:
            if not isinstance(error, CheckpointError):
                error = CheckpointError(f"The checkpoint could not be written: {error}.")
            self._fail(error, again)
            return
        self._master.checkpoint_written()
        if self._missing is not None:
            self._say("Checkpoints can be written again.")
        self._missing = None
        self.newest = path
        self._due = self._next(version)
        logger.info("Checkpoint %s was written", path)

    def _fail(self, error: CheckpointError, again: bool) -> None:
        logger.warning("%s", error)
        logger.debug("This was raised", exc_info=error)
        is_first, self._missing = self._missing is None, error
        if not again:
            self._master.checkpoint_failed()
        if is_first:
            later = " and tries again when the next one is due" if self.wanted else ""
            self._say(f"{error} The job continues without this checkpoint{later}.")

    def _written(self, version: int) -> tuple[str, int]:
        """Writes a complete checkpoint, and removes old ones; returns its place and version."""
        folder, keep_max = self._settings.directory, self._settings.keep_max
        if self._lock is not None and (problem := self._lock.problem()):
            raise CheckpointError(problem)
        place = remote.place_of(folder, version) if is_url(folder) else str(begin_version(folder, version))
        try:
            files, parts = self._files_in(place)
            version = files[0].version
            self._master.check_is_ours()
            content: dict[str, Any] = {
                "version": version,
                "specs": self._control.servers.specs,
                "parts": parts,
                "files": files,
                "extra": {"job": self._job, "run": self._control.run, "settings": self._shown},
            }
            if is_url(folder):
                remote.finish(place, keep_max, self._control.run if self._is_of_job else "", **content)
                return place, version
            path = finish_version(place, **content)
        finally:
            if not is_url(folder):
                shutil.rmtree(place, ignore_errors=True)
        with contextlib.suppress(OSError):  # the next checkpoint retries it
            prune(folder, keep_max, self._control.run if self._is_of_job else "")
        return str(path), version

    def _files_in(self, place: str) -> tuple[list[SavedFile], Sequence[Sequence[Slice]]]:
        """Lets the servers write their files; returns them, and the slices in each."""
        servers = self._control.servers
        try:
            files = self._control.save(place, f"-{secrets.token_hex(4)}" if is_url(place) else "")
            if not self._may_write_here or all(Path(place, each.name).is_file() for each in files):
                return files, servers.partition
        except CheckpointError:
            if not self._may_write_here:
                raise
        if any(spec.table for spec in servers.specs):
            self.wanted = False
            raise CheckpointError(
                "The parameter servers do not share the job's folder with the master, so the model can't be kept "
                "there. Start the job with a checkpoint folder or a URL that all of its processes can write to."
            )
        state, (everything,) = self._control.export(), partition(servers.specs, 1, split=False)
        part = Part(state.version, dict(enumerate(state.weights)), state.optimizer)
        return [write_part(Path(place, server_file(0, 1)), part)], [everything]

    def finish(self, version: int, retry: bool = True) -> None:
        """Raises `CheckpointError` when the last checkpoint could not be written, nor can be now.

        Args:
            retry: whether to try once more.
        """
        if not self.wanted:
            return
        if retry and (self._missing is not None or (self._resumed and not self.newest)):
            self.write(version, again=self._missing is not None)
        if self._missing is not None:
            raise self._missing

    def _next(self, version: int) -> int:
        steps = self._settings.steps
        return (version // steps + 1) * steps if steps else 0


def own_checkpoints(context: JobContext) -> FolderLock | StoreLock | None:
    """Locks the job's checkpoint folder against other jobs; returns the lock.

    Raises `UsageError` when another job uses it.
    """
    settings, folder = context.settings, context.settings.checkpoint.directory
    if settings.command is not Command.TRAIN or not folder:
        return None
    given = SETTINGS["checkpoint_dir"].written(settings.in_program, folder)
    if is_url(folder) and settings.keeps_model_in_folder:  # which has an owner
        return None
    try:
        owner = (settings.store or settings.directory, context.run, context.server.print)
        lock = locked(folder, _CHECKPOINTS_LOCK, given, *owner)
    except StoreError as error:  # writing checkpoints will report it; training continues
        logger.warning("%s is not locked against other jobs; make sure that no two use it. %s", folder, error)
        return None
    context.until_end.callback(lock.release)
    if isinstance(lock, FolderLock):
        put_back(as_path(folder))
    return lock


def warn_of_later_versions(context: JobContext, version: int) -> None:
    """Warns of checkpoints that other commands would choose instead of those of this job."""
    settings, folder = context.settings, context.settings.checkpoint.directory
    if settings.command is not Command.TRAIN or not folder or settings.keeps_model_in_folder:
        return
    newest = ""
    with contextlib.suppress(OSError, CheckpointError):  # writing checkpoints will report it
        newest = remote.newest_version(folder)
    if version_of(newest) > version:
        context.report.message(
            f"{folder} already contains the checkpoint {newest}. `evaluate` and `predict` would use it instead "
            "of earlier versions of this job. Choose another checkpoint_dir, or pass them one version."
        )
