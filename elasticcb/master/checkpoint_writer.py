"""Writes the checkpoints of a job when they are due."""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from elasticcb.checkpoint.shard_file import SavedFile
from elasticcb.checkpoint.versions import begin_version, finish_version, prune, version_folder
from elasticcb.errors import CheckpointError
from elasticcb.master.checkpoint_failures import CheckpointFailures
from elasticcb.master.checkpoint_uploads import CheckpointUploads
from elasticcb.master.ps_admin import PSControl
from elasticcb.settings import CHECKPOINTS_FOLDER, JobSettings
from elasticcb.storage.remote_files import is_url

logger = logging.getLogger(__name__)


def checkpoints_on_disk(settings: JobSettings) -> Path:
    """The local folder where a job writes its checkpoints, whether or not they are uploaded from there."""
    directory = settings.checkpoint.directory
    return Path(settings.directory, CHECKPOINTS_FOLDER) if is_url(directory) else Path(directory)


class CheckpointWriter:
    """Makes the servers write their parts, and combines them into a valid checkpoint.

    Checkpoints for a remote folder are written to the job's folder and uploaded from there.

    Args:
        check_may_write: raises `ReplacedError` when another master has taken over the job.

    Attributes:
        newest: path of the newest local checkpoint; "" before the first.
    """

    def __init__(
        self,
        settings: JobSettings,
        control: PSControl,
        failures: CheckpointFailures,
        resumed: bool,
        check_may_write: Callable[[], None],
    ) -> None:
        given = settings.checkpoint
        self._folder, self._uploads = checkpoints_on_disk(settings), None
        if is_url(given.directory):
            self._uploads = CheckpointUploads(self._folder, given.directory, given.keep_max, failures, resumed)
        self._job = settings.name
        self._settings = settings.checkpoint
        self._control = control
        self._failures = failures
        self._resumed, self._check_may_write = resumed, check_may_write
        self._missing: CheckpointError | None = None  # why the last one is not on disk
        self._due = self._next(control.client.version)
        self.wanted = bool(self._settings.directory)
        self.newest = ""

    def is_due(self, version: int) -> bool:
        """Whether the model has reached the version of the next checkpoint."""
        return bool(self._settings.steps) and version >= self._due

    def write(self, version: int, tasks: dict[str, Any], again: bool = False) -> None:
        """Writes a checkpoint of the current weights, slots and `tasks`, and prunes old ones.

        Args:
            version: of the model, as known to the master; the servers may be ahead.

        A failed checkpoint leaves nothing behind; training continues, and the next one is due as usual.
        """
        self._due = self._next(version)
        try:
            path, version = self._written(version, tasks)
        except (CheckpointError, OSError) as error:
            if not isinstance(error, CheckpointError):
                error = CheckpointError(f"The checkpoint could not be written: {error}.")
            self._missing = error
            self._failures.add(error, again)
            return
        if self._uploads is None:
            with contextlib.suppress(OSError):  # the next checkpoint retries it
                prune(self._folder, self._settings.keep_max)
            self._failures.end()
        else:
            self._uploads.add(path)
        self._missing = None
        self.newest = str(path)
        self._due = self._next(version)
        logger.info("Checkpoint %s was written", path)

    def _written(self, version: int, tasks: dict[str, Any]) -> tuple[Path, int]:
        """Writes a complete checkpoint; returns its folder and version."""
        begun = begin_version(self._folder, version)
        try:
            answers = self._control.save(str(begun))
            version = int(answers[0].version)
            self._check_may_write()
            if self._uploads is not None:  # else the same version might change during its upload
                self._uploads.let_go(self._folder / version_folder(version))
            path = finish_version(
                begun,
                version=version,
                specs=self._control.servers.specs,
                parts=self._control.servers.partition,
                files=[SavedFile(a.file, a.bytes, a.sha256) for a in answers],
                extra={"job": self._job, "run": self._control.run, "tasks": tasks},
            )
        finally:
            shutil.rmtree(begun, ignore_errors=True)
        return path, version

    @property
    def place(self) -> str:
        """The newest checkpoint that a later job can start from; "" if none."""
        return self.newest if self._uploads is None else self._uploads.newest

    def finish(self, version: int, tasks: dict[str, Any], retry: bool = True) -> None:
        """Waits until the last checkpoint is at its destination.

        Raises `CheckpointError` when that fails.
        """
        if not self.wanted:
            return
        kept = self._uploads is not None and self._uploads.has_some  # of an earlier master
        if retry and (self._missing is not None or (self._resumed and not self.newest and not kept)):
            self.write(version, tasks, again=self._missing is not None)
        if self._uploads is not None:
            self._uploads.finish()
        if self._missing is not None:
            raise self._missing

    def close(self) -> None:
        """Stops uploading."""
        if self._uploads is not None:
            self._uploads.close()

    def _next(self, version: int) -> int:
        steps = self._settings.steps
        return (version // steps + 1) * steps if steps else 0
