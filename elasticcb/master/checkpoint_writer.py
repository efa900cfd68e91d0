"""The checkpoints that a job writes: when, and of what."""

from __future__ import annotations

import logging
from typing import Any

from elasticcb import checkpoint as checkpoints
from elasticcb.ps_control import PSControl
from elasticcb.settings import JobSettings

logger = logging.getLogger(__name__)


class CheckpointWriter:
    """Has the servers write their parts, and makes a valid checkpoint of them.

    Args:
        settings: of the job.
        client: of the servers, which hold the model.

    Attributes:
        wanted: whether the job writes checkpoints at all.
        newest: path of the newest one; "" before the first.
    """

    def __init__(self, settings: JobSettings, client: PSControl) -> None:
        self._job = settings.name
        self._settings = settings.checkpoint
        self._client = client
        self._due = self._next(client.version)
        self.wanted = bool(self._settings.directory)
        self.newest = ""

    def is_due(self, version: int) -> bool:
        """Whether the model has reached the version of the next checkpoint."""
        return bool(self._settings.steps) and version >= self._due

    def write(self, version: int, tasks: dict[str, Any]) -> None:
        """Writes a checkpoint of the present weights, slots and `tasks`, and prunes old ones.

        Args:
            version: of the model, as far as the master knows; the servers may be ahead.
            tasks: the task queue, as JSON values.

        Raises `CheckpointError` when it can't be written.
        """
        folder = checkpoints.begin_version(self._settings.directory, version)
        answers = self._client.save(str(folder))
        version = int(answers[0].version)
        path = checkpoints.write_manifest(
            folder,
            version=version,
            specs=self._client.specs,
            parts=self._client.partition,
            files=[checkpoints.SavedFile(a.file, a.bytes, a.sha256) for a in answers],
            extra={"job": self._job, "tasks": tasks},
        )
        checkpoints.prune(self._settings.directory, self._settings.keep_max)
        self.newest = str(path)
        self._due = self._next(version)
        logger.info("Checkpoint %s is written", path)

    def _next(self, version: int) -> int:
        steps = self._settings.steps
        return (version // steps + 1) * steps if steps else 0
