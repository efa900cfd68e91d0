"""Writes a parameter server's recovery files."""

from __future__ import annotations

import threading
from collections.abc import Callable

from elasticcb.ps.recovery import RecoveryLog, Saved


class RecoveryWriter:
    """Writes what has changed since the last file.

    Args:
        take: returns the server's content, in full or as changed after a version.
    """

    def __init__(self, log: RecoveryLog, take: Callable[[int | None], Saved]) -> None:
        self._log, self._take = log, take
        self._version = -1  # version in the files
        self._replaced = True  # rows may have changed in other ways than training since `_version`
        self._writing = threading.Lock()

    def continue_from(self, version: int) -> None:
        """The files contain the server's state at `version`."""
        self._version, self._replaced = version, False

    def write(self, replaced: bool = False, final: bool = False) -> None:
        """Writes changes now. Raises `CheckpointError` on failure.

        Args:
            replaced: everything may have changed, in other ways than training.
            final: the server has answered its last call.
        """
        with self._writing:
            self._replaced = self._replaced or replaced
            whole = self._replaced or self._log.needs_whole
            saved = self._take(None if whole else self._version)
            try:
                if self._replaced or final or saved.part.version != self._version:
                    self._log.write(saved._replace(final=final), whole)
                    self._version, self._replaced = saved.part.version, False
            finally:
                saved.part.release()

    def close(self) -> None:
        """Returns once no file is being written."""
        with self._writing:
            pass
