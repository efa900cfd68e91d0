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
from typing import IO, TextIO

from elasticcb.process.log_files import LogFile

logger = logging.getLogger(__name__)

FORMAT_VARIABLE = "ELASTICCB_LOG_FORMAT"  # "json": one JSON object a line
FILE_VARIABLE = "ELASTICCB_LOG_FILE"  # where standard output and standard error of a process go, if to a file
_OUTPUT = "elasticcb.output"  # what is printed, where it is JSON
_LOGGERS = ("elasticcb", "py.warnings")
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


def say(text: str) -> None:
    """Shows the user a line, beside the output."""
    print(text, file=sys.stderr, flush=True)


def quiet_environment(level: str) -> dict[str, str]:
    """The variables that keep messages of TensorFlow's and gRPC's own quiet, unless the level is DEBUG."""
    return {} if level == "DEBUG" else {"TF_CPP_MIN_LOG_LEVEL": "3", "GRPC_VERBOSITY": "ERROR"}


def setup_logging(role: str, level: str, *handlers: logging.Handler) -> None:
    """Sends this package's log lines to `handlers`, as `FORMAT_VARIABLE` says. Files that they went to are closed."""
    for handler in handlers:
        handler.setFormatter(_JSONFormatter() if _as_json() else _UTCFormatter(_FORMAT))
        handler.addFilter(_RoleFilter(role))
    for file in _files():
        file.close()
    logging.captureWarnings(True)
    for name in _LOGGERS:
        tagged = logging.getLogger(name)
        tagged.handlers[:] = handlers
        tagged.setLevel(level)
        tagged.propagate = False


def print_line(text: str, stream: TextIO | None = None) -> None:
    """Prints what a command has to say of its job, in the format of log lines where that is JSON and nobody looks on.

    Args:
        stream: None takes standard output.
    """
    stream = sys.stdout if stream is None else stream
    if _as_json() and not stream.isatty():
        record = logging.LogRecord(_OUTPUT, logging.INFO, "", 0, text.strip("\n"), None, None)
        record.role = "master"
        text = _JSONFormatter().format(record)
    with may_reach_nobody(stream):
        print(text, file=stream, flush=True)


@contextlib.contextmanager
def may_reach_nobody(stream: IO[str]) -> Iterator[None]:
    """Within it, what is printed may find no reader or no room, as when a terminal is closed or a disk is full: what is
    printed from then on is left out, and the job goes on."""
    try:
        yield
    except OSError as error:
        logger.warning("What is printed can't be written (%s), and is left out from now on", error.strerror)
        with contextlib.suppress(OSError), open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), stream.fileno())  # else the rest of it would fail once more at the end


def own_log() -> logging.Handler:
    """Where a worker or a server logs: to where its standard error goes."""
    file = os.environ.pop(FILE_VARIABLE, "")  # not for programs that it runs
    return LogFile(file, (1, 2)) if file else logging.StreamHandler(sys.stderr)


def limit_log_files(max_bytes: int, kept: int) -> None:
    """A log file of `max_bytes` is replaced by a new one (0: never); the last `kept` ones before it stay."""
    for file in _files():
        file.limit(max_bytes, kept)


def _as_json() -> bool:
    return os.environ.get(FORMAT_VARIABLE) == "json"


def _files() -> list[LogFile]:
    return [handler for handler in logging.getLogger(_LOGGERS[0]).handlers if isinstance(handler, LogFile)]


@contextlib.contextmanager
def native_messages_to(log: LogFile) -> Iterator[None]:
    """Sends what native code writes to standard error to `log`; Python's own goes where it went.

    TensorFlow prints lines while it is imported that no setting turns off.
    """
    original = sys.stderr
    sys.stderr.flush()
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)
    try:
        with log.taking(2):
            yield
    finally:
        sys.stderr.close()
        sys.stderr = original
