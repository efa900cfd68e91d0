"""What hooks print on a worker, for the caller of the job."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, TextIO


class HookOutput:
    """Reads what is printed while a hook runs. It is printed in this process nevertheless, to its log."""

    def __init__(self, send: Callable[[str, bool], None]) -> None:
        self._send = send

    @contextlib.contextmanager
    def read(self) -> Iterator[None]:
        """Reads what this thread prints meanwhile."""
        before = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = (_Copied(stream, self._send, stream is before[1]) for stream in before)
        try:
            yield
        finally:
            sys.stdout, sys.stderr = before


class _Copied:
    """A stream whose text is also sent."""

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
