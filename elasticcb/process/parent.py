"""Ends this process with the one that has started it, however that ends."""

from __future__ import annotations

import os
import select
import threading
import time

_watch: int | None = None  # a file that becomes readable when this process is to end


def follow_file(watch: int) -> None:
    """Lets `follow_parent` follow a file instead, which becomes readable when this process is to end."""
    global _watch
    _watch = watch


def follow_parent(parent_pid: int) -> None:
    """Makes this process end when its parent does, even by SIGKILL.

    Call it before anything slow. A parent that is gone already ends the process here.
    """
    if _watch is None and os.getppid() != parent_pid:
        os._exit(1)
    # Not by prctl(PR_SET_PDEATHSIG): that is sent when the thread ends which started this process.
    if _watch is None:
        thread = threading.Thread(target=_watch_parent, args=(parent_pid,), name="parent", daemon=True)
    else:
        thread = threading.Thread(target=_watch_file, args=(_watch,), name="parent", daemon=True)
    thread.start()


def _watch_parent(parent_pid: int) -> None:
    while os.getppid() == parent_pid:
        time.sleep(0.5)
    os._exit(1)


def _watch_file(watch: int) -> None:
    poller = select.poll()
    poller.register(watch, select.POLLIN)
    poller.poll()
    os._exit(1)
