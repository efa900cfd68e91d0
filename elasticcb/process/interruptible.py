"""Calls in other threads, for which the main thread waits although Ctrl-C may come at any moment.

`KeyboardInterrupt` inside `threading.Condition.__enter__` leaves its lock taken. If it is the lock of a gRPC channel,
the next call in any thread hangs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

from elasticcb.process.signals import is_interruptible, uninterrupted

Answer = TypeVar("Answer")

_LOOK_SECONDS = 0.1  # between looks for Ctrl-C while waiting


def in_other_thread(function: Callable[..., Answer], *arguments: Any) -> Answer:
    """Calls a function, in another thread if Ctrl-C would raise in this one. Ctrl-C ends the wait, not the call."""
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
