"""Requests to end soon: Ctrl-C, SIGTERM (its machine is going away) or SIGHUP (its terminal was closed)."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

_SAME_SECONDS = 1.0  # seconds in which a second SIGTERM or SIGHUP counts as a duplicate
_AGAIN_SECONDS = 0.05  # from an interrupt that Python ignored to the next
_LOOK_SECONDS = 0.1  # between looks for Ctrl-C while waiting

Answer = TypeVar("Answer")

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


def repeat_ignored_interrupts() -> None:
    """An interrupt that is raised where Python ignores exceptions is raised again, soon after.

    Python ignores exceptions in callbacks of the garbage collector (JAX has one) and in `__del__`.
    """
    report, main = sys.unraisablehook, threading.main_thread().ident

    def ignored(problem: Any) -> None:
        if issubclass(problem.exc_type, KeyboardInterrupt):
            again = threading.Timer(_AGAIN_SECONDS, signal.pthread_kill, [main, signal.SIGINT])
            again.daemon = True
            again.start()
        else:
            report(problem)

    sys.unraisablehook = ignored


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


def in_other_thread(function: Callable[..., Answer], *arguments: Any) -> Answer:
    """Calls a function, in another thread if Ctrl-C would raise in this one. Ctrl-C ends the wait, not the call.

    `KeyboardInterrupt` inside `threading.Condition.__enter__` leaves its lock taken. If it is the lock of a gRPC
    channel, the next call in any thread hangs.
    """
    if not is_interruptible():
        return function(*arguments)
    called: Future[Answer] = Future()

    def run() -> None:
        try:
            called.set_result(function(*arguments))
        except BaseException as error:
            called.set_exception(error)

    with uninterrupted():
        threading.Thread(target=run, name="call", daemon=True).start()
    return _answer_of(called)


def each(pool: ThreadPoolExecutor, function: Callable[..., Answer], *arguments: Iterable[Any]) -> list[Answer]:
    """Like `map`, with a thread of the pool per call. Ctrl-C ends the wait, and cancels calls that have not begun."""
    with uninterrupted():
        calls = [pool.submit(function, *given) for given in zip(*arguments, strict=False)]
    try:
        return [_answer_of(call) for call in calls]
    finally:
        with uninterrupted():
            for call in calls:
                call.cancel()


def _answer_of(call: Future[Answer]) -> Answer:
    while True:
        with uninterrupted():
            if wait([call], _LOOK_SECONDS).done:
                return call.result()
