"""Role-tagged log lines, the same in every process."""

from __future__ import annotations

import logging
import sys
import threading

_FORMAT = "%(asctime)s %(role)s %(levelname).1s %(name)s: %(message)s"


class _RoleFilter(logging.Filter):
    """Puts the role into each record; in one process the thread tells which of several roles it is."""

    def __init__(self, role: str) -> None:
        super().__init__()
        self._role = role

    def filter(self, record: logging.LogRecord) -> bool:
        name = threading.current_thread().name
        record.role = name if name.startswith(("worker-", "ps-")) and name[-1].isdigit() else self._role
        return True


def setup_logging(role: str, level: str, file: str | None = None) -> None:
    """Sends this package's log lines to standard error, or to `file` (appended)."""
    handler = logging.FileHandler(file) if file else logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(_FORMAT))
    handler.addFilter(_RoleFilter(role))
    package = logging.getLogger("elasticcb")
    package.handlers[:] = [handler]
    package.setLevel(level)
    package.propagate = False
