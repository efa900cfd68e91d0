"""How a process learns that it is to end soon: by Ctrl-C, SIGTERM (its machine goes away) or SIGHUP (its terminal)."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator

_SAME_SECONDS = 1.0  # within which a second SIGTERM or SIGHUP is the first one, on another way

_holds = 0  # blocks that the main thread is in and that may not be broken off
_held_back = False  # an interrupt came within one
_told_at = -_SAME_SECONDS  # by SIGTERM or SIGHUP; of `time.monotonic`


def interrupt(number: int, frame: object) -> None:
    """A handler of SIGINT, SIGTERM and SIGHUP: raises `KeyboardInterrupt`, in a block of `uninterrupted` at its end.

    Whoever ends a service, or a group of processes, sends SIGTERM to all of them, and the process that keeps a master
    passes it on: that is one signal, not a second one that would end the job at once. A shell and the kernel both send
    SIGHUP.
    """
    global _held_back, _told_at
    if number != signal.SIGINT:
        before, _told_at = _told_at, time.monotonic()
        if _told_at - before < _SAME_SECONDS:
            return
    if not _holds:
        raise KeyboardInterrupt
    _held_back = True


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """In the main thread, `interrupt` raises nothing within it: `KeyboardInterrupt` would come between any two
    operations, so that a lock is never given back, or what belongs together is changed in part."""
    global _holds
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _holds += 1
    try:
        yield
    finally:
        _holds -= 1
        if not _holds:
            raise_if_interrupted()


def raise_if_interrupted() -> None:
    """Raises the `KeyboardInterrupt` that was held back, if there is one and this is the main thread."""
    global _held_back
    if _held_back and threading.current_thread() is threading.main_thread():
        _held_back = False
        raise KeyboardInterrupt


def heed_sigterm() -> None:
    """Makes SIGTERM end this process even if it is the first one of a container, whose signals the kernel drops unless
    they have a handler."""
    if os.getpid() == 1:
        signal.signal(signal.SIGTERM, _end)


def end_as_by_sigterm() -> None:
    """Ends this process at once, as SIGTERM would."""
    if os.getpid() != 1:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
    os._exit(128 + signal.SIGTERM)


def _end(number: int, frame: object) -> None:
    end_as_by_sigterm()


@contextlib.contextmanager
def on_sigterm(call: Callable[[], None]) -> Iterator[None]:
    """Within it, SIGTERM makes `call` run, in a thread of its own; a second one ends the process.

    Does nothing outside the main thread, where a role may run for debugging: the signal is the whole process's.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # Its `put` may interrupt any other code, as a signal's handler does.
    signals: queue.SimpleQueue[bool] = queue.SimpleQueue()

    def received(number: int, frame: object) -> None:
        signal.signal(signal.SIGTERM, _end if os.getpid() == 1 else signal.SIG_DFL)
        signals.put(True)

    def wait() -> None:
        if signals.get():
            call()

    threading.Thread(target=wait, name="sigterm", daemon=True).start()
    before = signal.signal(signal.SIGTERM, received)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        signals.put(False)
