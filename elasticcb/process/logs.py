"""Role-tagged log lines, the same in every process; their times are UTC."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator

FORMAT_VARIABLE = "ELASTICCB_LOG_FORMAT"  # "json": one JSON object a line
_FORMAT = "%(asctime)s %(role)s %(levelname).1s %(name)s: %(message)s"


class _UTCFormatter(logging.Formatter):
    converter = staticmethod(time.gmtime)
    default_time_format, default_msec_format = "%Y-%m-%dT%H:%M:%S", "%s.%03dZ"  # ISO 8601


class _JSONFormatter(_UTCFormatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": self.formatTime(record),
            "role": getattr(record, "role", ""),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


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
    """Sends this package's log lines to standard error, or to `file` (appended), as `FORMAT_VARIABLE` says."""
    handler = logging.FileHandler(file) if file else logging.StreamHandler(sys.stderr)
    as_json = os.environ.get(FORMAT_VARIABLE) == "json"
    handler.setFormatter(_JSONFormatter() if as_json else _UTCFormatter(_FORMAT))
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
