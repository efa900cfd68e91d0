"""Ends this process together with the process that started it, however that one ends."""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable

_watch: int | None = None  # a file that becomes readable when this process must end


def follow_file(watch: int) -> None:
    """Makes `follow_parent` watch a file instead, which becomes readable when this process must end."""
    global _watch
    _watch = watch


def follow_parent(parent_pid: int, last: Callable[[], None] = lambda: None) -> None:
    """Makes this process end when its parent ends, even by SIGKILL.

    Call it before anything slow. If the parent is gone already, the process ends here.
    """
    if _watch is None and os.getppid() != parent_pid:
        _end(last)
    # Not with prctl(PR_SET_PDEATHSIG), which triggers when the thread that started this process ends.
    if _watch is None:
        thread = threading.Thread(target=_watch_parent, args=(parent_pid, last), name="parent", daemon=True)
    else:
        thread = threading.Thread(target=_watch_file, args=(_watch, last), name="parent", daemon=True)
    thread.start()


def _watch_parent(parent_pid: int, last: Callable[[], None]) -> None:
    while os.getppid() == parent_pid:
        time.sleep(0.5)
    _end(last)


def _watch_file(watch: int, last: Callable[[], None]) -> None:
    poller = select.poll()
    poller.register(watch, select.POLLIN)
    poller.poll()
    _end(last)


def _end(last: Callable[[], None]) -> None:
    try:
        last()
    finally:
        os._exit(1)
