"""Closes open clusters when the interpreter exits, also on SIGTERM."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any, Protocol

from elasticcb.process.signals import end_as_by_sigterm


class _Closable(Protocol):
    def _close(self) -> None: ...


_open: list[_Closable] = []
_process = 0  # the registering process; forks of it don't touch its processes


def close_at_exit(cluster: _Closable) -> None:
    """Closes `cluster` at exit, unless it is forgotten before.

    In the main thread, SIGTERM raises `SystemExit` until then, unless the program has its own handler. By default, it
    would end the program at once and leave files of the cluster behind.
    """
    global _process
    if _process != os.getpid():
        _process = os.getpid()
        _open.clear()
        # Not `atexit`: its functions run after the threads that answer the processes' calls have ended.
        threading._register_atexit(_close_all)  # type: ignore[attr-defined]
    if cluster not in _open:
        _open.append(cluster)
    _replace_handler(signal.SIG_DFL, _end)


def forget(cluster: _Closable) -> None:
    """Unregisters `cluster`, which was closed."""
    if cluster in _open:
        _open.remove(cluster)
    if not _open:
        _replace_handler(_end, signal.SIG_DFL)


def _replace_handler(present: Any, new: Any) -> None:
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == present:
        signal.signal(signal.SIGTERM, new)


def _end(number: int, frame: object) -> None:
    if _process != os.getpid():
        end_as_by_sigterm()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a second one ends it at once
    raise SystemExit(128 + number)


def _close_all() -> None:
    if _process == os.getpid():
        for cluster in list(_open):
            cluster._close()
