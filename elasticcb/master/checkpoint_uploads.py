"""Copies checkpoints to a remote folder, beside training."""

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
    """Copies the newest checkpoint of a folder to a remote one, in a thread of its own.

    While one is under way, others may become due: the newest of them follows it. One that can't be copied stays on the
    disk until the next one is there.

    Args:
        folder: where checkpoints are written on a disk.
        url: of the remote folder.
        keep_max: versions that are kept there; 0: all.
        failures: is told of those that can't be copied.
        resumed: those that are in `folder` are of this job; the newest is copied first.

    Attributes:
        newest: URL of the newest one that was copied; "": none was.
    """

    def __init__(self, folder: Path, url: str, keep_max: int, failures: CheckpointFailures, resumed: bool) -> None:
        self._folder, self._url, self._keep_max, self._failures = folder, url, keep_max, failures
        self.newest = ""
        self._error: CheckpointError | None = None  # of the last one
        self._own = find_versions(folder) if resumed else []  # on the disk, oldest first
        self._next: Path | None = self._own[-1] if self._own else None
        self._copying: Path | None = None
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="checkpoints", daemon=True)
        self._thread.start()

    def add(self, version: Path) -> None:
        """A version is whole; it is copied soon, in the place of one that waits."""
        with self._changed:
            self._own = [*(own for own in self._own if own != version), version]
            self._next = version
            self._changed.notify_all()

    def let_go(self, version: Path) -> None:
        """Waits while `version` is copied."""
        with self._changed:
            self._changed.wait_for(lambda: self._copying != version)

    @property
    def has_some(self) -> bool:
        """Whether there are checkpoints on the disk that wait, or could not be copied."""
        with self._changed:
            return bool(self._own)

    def finish(self) -> None:
        """Waits until the newest checkpoint is copied, and removes those on the disk.

        Raises `CheckpointError` when it can't be copied; it stays on the disk then.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._next is None and self._copying is None)
            if self._error is not None:
                raise CheckpointError(
                    f"{self._error} The last checkpoint is kept in {self._own[-1]}: copy this folder to {self._url}."
                )
            self._remove(len(self._own))
        with contextlib.suppress(OSError):  # it holds something else
            self._folder.rmdir()

    def close(self) -> None:
        """Copies no more."""
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
        """Deletes the oldest so many on the disk."""
        for version in self._own[:count]:
            shutil.rmtree(version, ignore_errors=True)
        del self._own[:count]

    def _copy(self, version: Path) -> None:
        try:
            self.newest, self._error = remote_checkpoint.put(self._url, version, self._keep_max), None
            logger.info("Checkpoint %s is written", self.newest)
            self._failures.end()
        except CheckpointError as error:
            self._error = error
            self._failures.add(error)
