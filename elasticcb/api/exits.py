"""Closes what is still open when the interpreter ends."""

from __future__ import annotations

import os
import threading
from typing import Protocol


class _Closable(Protocol):
    def _close(self) -> None: ...


_open: list[_Closable] = []
_process = 0  # that has registered; a fork of it leaves its processes alone


def close_at_exit(cluster: _Closable) -> None:
    """Has `cluster` closed at the end, unless it is forgotten before."""
    global _process
    if _process != os.getpid():
        _process = os.getpid()
        _open.clear()
        # Not `atexit`: its functions run when the threads that answer the processes' calls have been ended already.
        threading._register_atexit(_close_all)  # type: ignore[attr-defined]
    if cluster not in _open:
        _open.append(cluster)


def forget(cluster: _Closable) -> None:
    """`cluster` is closed."""
    if cluster in _open:
        _open.remove(cluster)


def _close_all() -> None:
    if _process == os.getpid():
        for cluster in list(_open):
            cluster._close()
