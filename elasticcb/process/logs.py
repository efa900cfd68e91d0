"""Role-tagged log lines, the same in every process."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Iterator

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
    logging.captureWarnings(True)
    for name in ("elasticcb", "py.warnings"):
        tagged = logging.getLogger(name)
        tagged.handlers[:] = [handler]
        tagged.setLevel(level)
        tagged.propagate = False


@contextlib.contextmanager
def native_messages_to(file: str) -> Iterator[None]:
    """Sends what native code writes to standard error to `file`; Python's own goes where it went.

    TensorFlow prints lines while it is imported that no setting turns off.
    """
    original, terminal = sys.stderr, os.dup(2)
    sys.stderr.flush()
    with open(file, "ab") as log:
        os.dup2(log.fileno(), 2)
    sys.stderr = os.fdopen(os.dup(terminal), "w", buffering=1)
    try:
        yield
    finally:
        sys.stderr.close()
        sys.stderr = original
        os.dup2(terminal, 2)
        os.close(terminal)
