"""Requests to end soon: Ctrl-C, SIGTERM (its machine is going away) or SIGHUP (its terminal was closed)."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator

_SAME_SECONDS = 1.0  # seconds in which a second SIGTERM or SIGHUP counts as a duplicate

_holds = 0  # uninterruptible blocks that the main thread is in
_held_back = False  # an interrupt arrived inside one
_told_at = -_SAME_SECONDS  # time of the last SIGTERM or SIGHUP (`time.monotonic`)


def interrupt(number: int, frame: object) -> None:
    """Handler of SIGINT, SIGTERM and SIGHUP: raises `KeyboardInterrupt`; in a block of `uninterrupted`, at its end.

    When a service or a process group is stopped, all processes get SIGTERM, and a master's supervisor passes it on as
    well: that must count as one signal, because a second one would end the job at once. Likewise, a shell and the
    kernel both send SIGHUP.
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
    """In the main thread, `interrupt` raises nothing inside it: `KeyboardInterrupt` could occur between any two
    operations, so that a lock is never released, or related state is changed only in part."""
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


@contextlib.contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """Context in which SIGTERM interrupts the main thread as Ctrl-C does, before a master has its own handlers."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def is_interruptible() -> bool:
    """Whether `interrupt` may raise in this thread."""
    return threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is interrupt


def raise_if_interrupted() -> None:
    """Raises a deferred `KeyboardInterrupt`, if there is one and this is the main thread."""
    global _held_back
    if _held_back and threading.current_thread() is threading.main_thread():
        _held_back = False
        raise KeyboardInterrupt


def heed_sigterm() -> None:
    """Makes SIGTERM end this process even if it is PID 1 of a container, for which the kernel drops signals without a
    handler."""
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
    """Context in which SIGTERM runs `call` in a separate thread; a second one ends the process.

    Does nothing outside the main thread, where a role may run for debugging: signals belong to the whole process.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # Its `put` may interrupt any other code, like a signal handler.
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
