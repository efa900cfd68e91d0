"""Checkpoints that could not be written: training continues, for a local or a remote folder."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from elasticcb.errors import CheckpointError

logger = logging.getLogger(__name__)


class CheckpointFailures:
    """Counts failures; reports the first one to the user, and the recovery.

    Attributes:
        newest: why the last checkpoint failed; None: it succeeded, or there was none.
    """

    def __init__(self, count: Callable[[], None], written: Callable[[], None], say: Callable[[str], None]) -> None:
        self._count, self._written, self._say = count, written, say
        self._lock = threading.Lock()
        self.newest: CheckpointError | None = None

    def add(self, error: CheckpointError, again: bool = False) -> None:
        """A checkpoint could not be written; `again`: a retry of the same one."""
        logger.warning("%s", error)
        logger.debug("This was raised", exc_info=error)
        with self._lock:
            is_first, self.newest = self.newest is None, error
        if not again:
            self._count()
        if is_first:
            self._say(f"{error} The job continues without this checkpoint and tries again when the next one is due.")

    def end(self) -> None:
        """A checkpoint is complete at its destination."""
        with self._lock:
            was, self.newest = self.newest, None
        self._written()
        if was is not None:
            self._say("Checkpoints can be written again.")
