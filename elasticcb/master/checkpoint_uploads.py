"""Uploads checkpoints to a remote folder in the background."""

from __future__ import annotations

import contextlib
import logging
import shutil
import threading
from pathlib import Path

from elasticcb.checkpoint import remote as remote_checkpoint
from elasticcb.checkpoint.versions import find_versions
from elasticcb.errors import CheckpointError
from elasticcb.master.checkpoint_failures import CheckpointFailures

logger = logging.getLogger(__name__)


class CheckpointUploads:
    """Uploads the newest checkpoint of a local folder, in a thread of its own.

    During an upload others may become due; only the newest of them is uploaded next. A checkpoint that can't be
    uploaded stays on disk until a later one is uploaded.

    Args:
        resumed: existing checkpoints in `folder` belong to this job; the newest is uploaded first.
    """

    def __init__(self, folder: Path, url: str, keep_max: int, failures: CheckpointFailures, resumed: bool) -> None:
        self._folder, self._url, self._keep_max, self._failures = folder, url, keep_max, failures
        self.newest = ""
        self._error: CheckpointError | None = None  # of the last upload
        self._own = find_versions(folder) if resumed else []  # on disk, oldest first
        self._next: Path | None = self._own[-1] if self._own else None
        self._copying: Path | None = None
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="checkpoints", daemon=True)
        self._thread.start()

    def add(self, version: Path) -> None:
        """A version is complete; uploads it soon, replacing one that waits."""
        with self._changed:
            self._own = [*(own for own in self._own if own != version), version]
            self._next = version
            self._changed.notify_all()

    def let_go(self, version: Path) -> None:
        """Waits while `version` is being uploaded."""
        with self._changed:
            self._changed.wait_for(lambda: self._copying != version)

    @property
    def has_some(self) -> bool:
        """Whether checkpoints on disk still wait, or could not be uploaded."""
        with self._changed:
            return bool(self._own)

    def finish(self) -> None:
        """Waits until the newest checkpoint is uploaded, then removes the local ones.

        Raises `CheckpointError` when the upload fails; the checkpoint then stays on disk.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._next is None and self._copying is None)
            if self._error is not None:
                raise CheckpointError(
                    f"{self._error} The last checkpoint is in {self._own[-1]}. Copy this folder to {self._url}."
                )
            self._remove(len(self._own))
        with contextlib.suppress(OSError):  # not empty
            self._folder.rmdir()

    def close(self) -> None:
        """Stops uploading."""
        with self._changed:
            self._closed, self._next = True, None
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._next is not None or self._closed)
                version, self._next = self._next, None
                if version is None:
                    return
                self._copying = version
            self._copy(version)
            with self._changed:
                self._remove(self._own.index(version))
                self._copying = None
                self._changed.notify_all()

    def _remove(self, count: int) -> None:
        """Deletes the oldest `count` versions on disk."""
        for version in self._own[:count]:
            shutil.rmtree(version, ignore_errors=True)
        del self._own[:count]

    def _copy(self, version: Path) -> None:
        try:
            self.newest, self._error = remote_checkpoint.put(self._url, version, self._keep_max), None
            logger.info("Checkpoint %s was written", self.newest)
            self._failures.end()
        except CheckpointError as error:
            self._error = error
            self._failures.add(error)
