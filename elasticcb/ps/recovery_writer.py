"""Writes a parameter server's recovery files at intervals."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from elasticcb.errors import ElasticCBError, describe
from elasticcb.ps.recovery import RecoveryLog, Saved
from elasticcb.ps.replica import Replica

logger = logging.getLogger(__name__)

# Maximum share of time spent writing, however large the model.
_BUSY_SHARE = 0.2


class RecoveryWriter:
    """Writes changes at intervals, in a thread of its own.

    Args:
        take: returns the server's content, in full or as changed after a version.
        warn: called each time the files can't be written.
        replica: starts its log before a file is written, if it has none, and gets what the file contains.
    """

    def __init__(
        self,
        log: RecoveryLog,
        take: Callable[[int | None], Saved],
        interval_seconds: float,
        warn: Callable[[str], None] = logger.warning,
        replica: Replica | None = None,
    ) -> None:
        self._log, self._take, self._interval, self._warn = log, take, interval_seconds, warn
        self._replica = replica
        self._version = -1  # version in the files
        self._noted = 0  # last replicated change in the files
        self._replaced = True  # rows may have changed in other ways than training since `_version`
        self._writing = threading.Lock()
        self._stopped = False
        self._awake = threading.Event()  # write now
        self._wanted = threading.Event()  # write once `_BUSY_SHARE` allows
        self._thread = threading.Thread(target=self._run, name="recovery", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def continue_from(self, version: int, noted: int = 0) -> None:
        """The files contain the server's state at `version`, up to change `noted`."""
        self._version, self._noted, self._replaced = version, noted, False

    def write(self, replaced: bool = False) -> None:
        """Writes changes now. Raises `CheckpointError` on failure.

        Args:
            replaced: everything may have changed, in other ways than training.
        """
        with self._writing:
            self._replaced = self._replaced or replaced
            if self._replica is not None:
                self._replica.begin()
            whole = self._replaced or self._log.needs_whole
            saved = self._take(None if whole else self._version)
            try:
                if self._replaced or (saved.part.version, saved.noted) != (self._version, self._noted):
                    self._log.write(saved, whole)
                    self._version, self._noted, self._replaced = saved.part.version, saved.noted, False
            finally:
                saved.part.release()
            if self._replica is not None:
                self._replica.written(saved.noted)

    def wake(self) -> None:
        """Makes the thread write now."""
        self._awake.set()
        self._wanted.set()

    def write_soon(self) -> None:
        """Makes the thread write before the interval ends, as soon as its share of time allows."""
        self._wanted.set()

    def _run(self) -> None:
        while not self._stopped:
            begun = time.monotonic()
            try:
                self.write()
            except Exception as error:  # of any kind; the next write may succeed
                words = str(error)
                if not isinstance(error, ElasticCBError):
                    logger.exception("Recovery files could not be written")
                    words = f"{describe(error)}."
                if not self._stopped:
                    self._warn(
                        f"{words} Training continues, but if this server is lost now, the updates since its last "
                        "recovery file are lost, unless a replica has them."
                    )
            least = (time.monotonic() - begun) / _BUSY_SHARE
            if not self._awake.wait(least):
                self._wanted.wait(max(self._interval - least, 0.0))
            self._awake.clear()
            self._wanted.clear()

    def stop(self) -> None:
        """Stops writing, soon."""
        self._stopped = True
        self.wake()

    def close(self) -> None:
        """Stops writing; finishes the current file first."""
        self.stop()
        if self._thread.is_alive():
            self._thread.join()
