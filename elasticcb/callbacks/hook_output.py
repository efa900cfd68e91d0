"""What hooks print on a worker, for the caller of the job."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, TextIO


@contextlib.contextmanager
def sent(send: Callable[[str, bool], None]) -> Iterator[None]:
    """Sends what this thread prints meanwhile, and whether to standard error; it also prints it."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (_Copied(stream, send, stream is before[1]) for stream in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


class _Copied:
    def __init__(self, stream: TextIO, send: Callable[[str, bool], None], is_error: bool) -> None:
        self._stream, self._send, self._is_error = stream, send, is_error
        self._thread = threading.get_ident()

    def write(self, text: str) -> int:
        if threading.get_ident() == self._thread:
            self._send(text, self._is_error)
        return self._stream.write(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
