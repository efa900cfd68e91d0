"""The files of a process's log: `NAME.log`, and `NAME.log.1`, `.2`, … with what was written before."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from logging.handlers import RotatingFileHandler
from pathlib import Path
from types import TracebackType
from typing import TextIO

_LOOK_SECONDS = 5.0  # between looks at what is printed, which no handler sees
_RETRY_SECONDS = 60.0  # after a file could not be renamed
_SWITCH_SECONDS = 0.05  # in which a process changes from one file to the next


class LogFile(RotatingFileHandler):
    """Log lines of a process, in a file that is replaced by a new one when it is full.

    Args:
        file: lines are appended.
        descriptors: of this process, that go to the same file: what is printed, and what native code writes.
    """

    def __init__(self, file: str, descriptors: tuple[int, ...] = ()) -> None:
        super().__init__(file, encoding="utf-8", errors="backslashreplace")
        self._descriptors = set(descriptors)
        self._closed_for_good = threading.Event()
        self._stays_until = 0.0  # of `time.monotonic`
        self._pid = os.getpid()

    def limit(self, max_bytes: int, kept: int) -> None:
        """A file of `max_bytes` is full (0: never); the last `kept` ones before it stay."""
        watched = self.maxBytes > 0
        self.maxBytes, self.backupCount = max_bytes, kept
        if not watched and max_bytes:
            threading.Thread(target=self._watch, name="log", daemon=True).start()

    @contextlib.contextmanager
    def taking(self, descriptor: int) -> Iterator[None]:
        """Within it, what this process writes to `descriptor` goes to the file."""
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

    def shouldRollover(self, record: logging.LogRecord | None = None) -> bool:
        if os.getpid() != self._pid or time.monotonic() < self._stays_until:
            return False  # a child of this process goes on in the file that it was given
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
        except OSError:  # it can't be renamed: the old one goes on
            self._stays_until = time.monotonic() + _RETRY_SECONDS
            self.stream = self.stream or self._open()
        for descriptor in self._descriptors:
            self._lead_here(descriptor)

    def _is_present(self) -> bool:
        """Whether the file still has its name: another process of this place may have begun a new one."""
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
    """Reads a log from one of its files to the next. A context manager.

    Raises `OSError` when there is no such log.
    """

    def __init__(self, log: Path) -> None:
        self._log = log
        self._file = _open(log)

    def last(self, count: int) -> list[str]:
        """The last lines that were written."""
        lines = deque(self._file, maxlen=count)
        files, at = self._files()
        for before in reversed(files[: max(at, 0)]):
            if len(lines) == count:
                break
            with contextlib.suppress(OSError), _open(before) as file:
                lines.extendleft(reversed(deque(file, maxlen=count - len(lines))))
        return list(lines)

    def more(self) -> Iterator[str]:
        """What was written since the last call."""
        while True:
            yield from self._file
            files, at = self._files()
            if at + 1 >= len(files):
                return
            time.sleep(_SWITCH_SECONDS)
            yield from self._file
            with contextlib.suppress(FileNotFoundError):  # it was renamed, too
                following = _open(files[at + 1])
                self._file.close()
                self._file = following

    def _files(self) -> tuple[list[Path], int]:
        """The files, the oldest first, and which of them is open; -1: it is removed."""
        older = [path for path in self._log.parent.glob(f"{self._log.name}.*") if path.suffix[1:].isdigit()]
        files = sorted(older, key=lambda path: -int(path.suffix[1:]))
        if self._log.exists():
            files.append(self._log)
        own = os.fstat(self._file.fileno())
        for at, path in enumerate(files):
            with contextlib.suppress(OSError):
                if os.path.samestat(path.stat(), own):
                    return files, at
        return files, -1

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


def _open(path: Path) -> TextIO:
    return path.open(encoding="utf-8", errors="replace")
