"""Role-tagged log lines, in the same format in every process; times are UTC."""

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
FILE_VARIABLE = "ELASTICCB_LOG_FILE"  # file of a process's standard output and standard error, if any
_OUTPUT = "elasticcb.output"  # printed lines, if the format is JSON
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
    """Adds the role to each record; with several roles in one process, the thread determines it."""

    def __init__(self, role: str) -> None:
        super().__init__()
        self._role = role

    def filter(self, record: logging.LogRecord) -> bool:
        name = threading.current_thread().name
        record.role = name if name.startswith(("worker-", "ps-")) and name[-1].isdigit() else self._role
        return True


def say(text: str) -> None:
    """Shows the user a line on standard error."""
    print(text, file=sys.stderr, flush=True)


def quiet_environment(level: str) -> dict[str, str]:
    """Environment variables that silence TensorFlow's and gRPC's own messages, unless the level is DEBUG."""
    return {} if level == "DEBUG" else {"TF_CPP_MIN_LOG_LEVEL": "3", "GRPC_VERBOSITY": "ERROR"}


def setup_logging(role: str, level: str, *handlers: logging.Handler) -> None:
    """Sends this package's log lines to `handlers`, in the format of `FORMAT_VARIABLE`. Previous files are closed."""
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
    """Prints a command's messages about its job; as JSON log lines if that is the format and there is no terminal."""
    stream = sys.stdout if stream is None else stream
    if _as_json() and not stream.isatty():
        record = logging.LogRecord(_OUTPUT, logging.INFO, "", 0, text.strip("\n"), None, None)
        record.role = "master"
        text = _JSONFormatter().format(record)
    with may_reach_nobody(stream):
        print(text, file=stream, flush=True)


@contextlib.contextmanager
def may_reach_nobody(stream: IO[str]) -> Iterator[None]:
    """Context in which printing may fail, for example because a terminal was closed or a disk is full: further output
    is dropped, and the job continues."""
    try:
        yield
    except OSError as error:
        logger.warning("Output can't be written (%s) and is dropped from now on", error.strerror)
        with contextlib.suppress(OSError), open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), stream.fileno())  # otherwise, the rest would fail again at exit


def own_log() -> logging.Handler:
    """The log handler of a worker or a server: to the file of its standard error."""
    file = os.environ.pop(FILE_VARIABLE, "")  # not inherited by programs that it runs
    return LogFile(file, (1, 2)) if file else logging.StreamHandler(sys.stderr)


def limit_log_files(max_bytes: int, kept: int) -> None:
    """Rotates log files of `max_bytes` (0: never), and keeps the last `kept` rotated files."""
    for file in _files():
        file.limit(max_bytes, kept)


def _as_json() -> bool:
    return os.environ.get(FORMAT_VARIABLE) == "json"


def _files() -> list[LogFile]:
    return [handler for handler in logging.getLogger(_LOGGERS[0]).handlers if isinstance(handler, LogFile)]


@contextlib.contextmanager
def native_messages_to(log: LogFile) -> Iterator[None]:
    """Redirects standard error of native code to `log`; Python's own output is not affected.

    TensorFlow prints lines during its import that no setting turns off.
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
