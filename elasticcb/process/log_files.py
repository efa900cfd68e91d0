"""Role-tagged log lines, in the same format in every process, times in UTC; and a log's files: `NAME.log`, and the
rotated `NAME.log.1`, `.2`, ….
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from logging.handlers import RotatingFileHandler
from pathlib import Path
from types import TracebackType
from typing import IO, TextIO

logger = logging.getLogger(__name__)

FORMAT_VARIABLE = "ELASTICCB_LOG_FORMAT"  # "json": one JSON object a line
FILE_VARIABLE = "ELASTICCB_LOG_FILE"  # file of a process's standard output and standard error, if any
_OUTPUT = "elasticcb.output"  # printed lines, if the format is JSON
LOGGERS = ("elasticcb", "py.warnings")  # of this package: not of the program
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
    with may_reach_nobody(sys.stderr):
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
    for name in LOGGERS:
        tagged = logging.getLogger(name)
        tagged.handlers[:] = handlers
        tagged.setLevel(level)
        tagged.propagate = False


def log_to(path: Path, role: str) -> logging.Logger:
    """A logger for the lines of a job in a process that has loggers of its own: it is none of theirs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = LogFile(str(path))
    handler.setFormatter(_JSONFormatter() if _as_json() else _UTCFormatter(_FORMAT))
    handler.addFilter(_RoleFilter(role))
    own = logging.Logger(LOGGERS[0])
    own.addHandler(handler)
    return own


def close_log(log: logging.Logger) -> None:
    """Closes the file of `log_to`."""
    for handler in list(log.handlers):
        log.removeHandler(handler)
        handler.close()


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
    return [handler for handler in logging.getLogger(LOGGERS[0]).handlers if isinstance(handler, LogFile)]


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


@contextlib.contextmanager
def without_native_messages() -> Iterator[None]:
    """Drops what is written to standard error meanwhile: no setting silences TensorFlow's first lines."""
    sys.stderr.flush()
    kept = os.dup(2)
    try:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


_LOOK_SECONDS = 5.0  # seconds between checks of printed output, which no handler sees
_RETRY_SECONDS = 60.0  # seconds to wait after a file could not be renamed
_SWITCH_SECONDS = 0.05  # seconds in which a process switches files
_BLOCK_BYTES = 1 << 16  # read at once from the end of a file

_FileId = tuple[int, int]  # identity of a file, independent of its name


class LogFile(RotatingFileHandler):
    """A log handler with rotation.

    Args:
        descriptors: file descriptors of this process for the same file: printed output and output of native code.
    """

    def __init__(self, file: str, descriptors: tuple[int, ...] = ()) -> None:
        super().__init__(file, encoding="utf-8", errors="backslashreplace")
        self._descriptors = set(descriptors)
        self._closed_for_good = threading.Event()
        self._stays_until = 0.0  # of `time.monotonic`
        self._pid = os.getpid()

    def limit(self, max_bytes: int, kept: int) -> None:
        """Rotates a file of `max_bytes` (0: never), and keeps the last `kept` rotated files."""
        watched = self.maxBytes > 0
        self.maxBytes, self.backupCount = max_bytes, kept
        if not watched and max_bytes:
            threading.Thread(target=self._watch, name="log", daemon=True).start()

    @contextlib.contextmanager
    def taking(self, descriptor: int) -> Iterator[None]:
        """Redirects this process's output to `descriptor` to the file meanwhile."""
        original = os.dup(descriptor)
        with self._locked():
            self._descriptors.add(descriptor)
            self._lead_here(descriptor)
        try:
            yield
        finally:
            with self._locked():
                self._descriptors.discard(descriptor)
                os.dup2(original, descriptor)
            os.close(original)

    def close(self) -> None:
        self._closed_for_good.set()
        super().close()

    def handleError(self, record: logging.LogRecord) -> None:
        """Drops a line if the disk is full; the job notices the reason itself where it matters."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)

    def shouldRollover(self, record: logging.LogRecord | None = None) -> bool:
        if os.getpid() != self._pid or time.monotonic() < self._stays_until:
            return False  # a child of this process keeps writing to its file
        if self.stream is None or self.maxBytes <= 0:
            return False
        return not self._is_present() or os.fstat(self.stream.fileno()).st_size >= self.maxBytes

    def doRollover(self) -> None:
        try:
            if self._is_present():
                super().doRollover()
            else:
                before, self.stream = self.stream, self._open()
                if before is not None:
                    before.close()
        except OSError:  # it can't be renamed: keep using the old file
            self._stays_until = time.monotonic() + _RETRY_SECONDS
            self.stream = self.stream or self._open()
        for descriptor in self._descriptors:
            self._lead_here(descriptor)

    def _is_present(self) -> bool:
        """Whether the file still has its name: another process with this index may have started a new one."""
        with contextlib.suppress(FileNotFoundError):
            return self.stream is not None and os.path.samestat(
                os.fstat(self.stream.fileno()), os.stat(self.baseFilename)
            )
        return False

    def _lead_here(self, descriptor: int) -> None:
        if self.stream is not None:
            os.dup2(self.stream.fileno(), descriptor)

    def _watch(self) -> None:
        while not self._closed_for_good.wait(_LOOK_SECONDS):
            with self._locked():
                if not self._closed_for_good.is_set() and self.shouldRollover():
                    with contextlib.suppress(OSError):
                        self.doRollover()

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        self.acquire()
        try:
            yield
        finally:
            self.release()


class LogReader:
    """Reads a log across its rotated files. A context manager.

    Raises `OSError` if there is no such log.
    """

    def __init__(self, log: Path) -> None:
        self._log = log
        self._file = _open(log)

    def last(self, count: int) -> list[str]:
        """The last lines that were written; call it first. Reads only the end of the files."""
        _skip_to_last(self._file, count)
        lines = deque(self._file, maxlen=count)
        with contextlib.ExitStack() as until_end:
            file = self._file
            while len(lines) < count and (before := self._next_to(file, -1)) is not None:
                file = until_end.enter_context(before)
                _skip_to_last(file, count - len(lines))
                lines.extendleft(reversed(deque(file, maxlen=count - len(lines))))
        return list(lines)

    def more(self) -> Iterator[str]:
        """The text written since the last call."""
        while True:
            yield from self._file
            following = self._next_to(self._file, 1)
            if following is None:
                return
            time.sleep(_SWITCH_SECONDS)
            yield from self._file
            self._file.close()
            self._file = following

    def _next_to(self, file: TextIO, step: int) -> TextIO | None:
        """The file after `file` (`step` 1), or before it (-1); None: there is none. A removed file precedes all
        others."""
        while True:
            files = self._files()
            ids = [own_id for _, own_id in files]
            at = (ids.index(_id(file)) if _id(file) in ids else -1) + step
            if not 0 <= at < len(files):
                return None
            path, own_id = files[at]
            with contextlib.suppress(FileNotFoundError):
                found = _open(path)
                if _id(found) == own_id:
                    return found
                found.close()  # of another file that got its name meanwhile

    def _files(self) -> list[tuple[Path, _FileId]]:
        """A consistent list of the files, oldest first: it is read until two reads agree, so that none was renamed in
        between."""
        before, found = None, self._look()
        while found != before:
            before, found = found, self._look()
        return found

    def _look(self) -> list[tuple[Path, _FileId]]:
        older = [path for path in self._log.parent.glob(f"{self._log.name}.*") if path.suffix[1:].isdigit()]
        found = []
        for path in (*sorted(older, key=lambda path: -int(path.suffix[1:])), self._log):
            with contextlib.suppress(OSError):
                status = path.stat()
                found.append((path, (status.st_dev, status.st_ino)))
        return found

    def __enter__(self) -> LogReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def last_lines(log: Path, count: int) -> str:
    """The last lines of a log; "" if there is none."""
    try:
        with LogReader(log) as reader:
            return "".join(reader.last(count)).rstrip("\n")
    except OSError:
        return ""


def _skip_to_last(file: TextIO, count: int) -> None:
    """Moves a file that has not been read yet to somewhere before its last `count` lines, by a block at most."""
    descriptor = file.fileno()
    start, ends = os.fstat(descriptor).st_size, 0
    while start > 0 and ends <= count:  # one more than `count`, since the first line may have begun before `start`
        size = min(start, _BLOCK_BYTES)
        start -= size
        ends += os.pread(descriptor, size, start).count(b"\n")
    file.buffer.seek(start)


def _id(file: TextIO) -> _FileId:
    status = os.fstat(file.fileno())
    return status.st_dev, status.st_ino


def _open(path: Path) -> TextIO:
    return path.open(encoding="utf-8", errors="replace")
