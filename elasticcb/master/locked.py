"""A value that threads share under one lock, and wait for changes of; Ctrl-C may come at any moment."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from elasticcb.master.events import Wake
from elasticcb.process.signals import raise_if_interrupted, uninterrupted

_LOOK_SECONDS = 0.1  # between checks for Ctrl-C, which does not interrupt waits here

Value = TypeVar("Value")


class Locked(Generic[Value]):
    """`with locked() as value:` is the only access to the value. Blocks of one thread may be nested.

    Args:
        settle: carries out the effects of a block, still under the lock, and returns which threads to wake. It is
            called when a block ends, and before it waits.
    """

    def __init__(self, value: Value, settle: Callable[[Value], Wake]) -> None:
        lock = threading.RLock()
        self._value, self._settle = value, settle
        self._all, self._driver = threading.Condition(lock), threading.Condition(lock)

    @contextlib.contextmanager
    def __call__(self) -> Iterator[Value]:
        with uninterrupted(), self._all:
            try:
                yield self._value
            finally:
                self._end()

    def replace(self, value: Value) -> None:
        """Replaces the value; waiting threads see the new one when they wake up."""
        with uninterrupted(), self._all:
            self._end()
            self._value = value
            self._end()

    def wait(self, seconds: float) -> Value:
        """Inside a block: waits for a change, at most `seconds`; returns the value at that time."""
        self._end()
        _wait(self._all, seconds)
        return self._value

    def wait_for(self, condition: Callable[[Value], bool], seconds: float | None = None) -> Value:
        """Inside a block: waits until `condition` holds, at most `seconds`; returns the value at that time."""
        give_up = None if seconds is None else time.monotonic() + seconds
        while not condition(self._value) and (give_up is None or time.monotonic() < give_up):
            self._end()
            _wait(self._all, math.inf if give_up is None else give_up - time.monotonic())
        return self._value

    def wait_as_driver(self, seconds: float) -> None:
        """Inside a block of the driving thread: waits for a change, at most `seconds`."""
        self._end()
        _wait(self._driver, seconds)

    def _end(self) -> None:
        wake = self._settle(self._value)
        if wake >= Wake.DRIVER:
            self._driver.notify_all()
        if wake is Wake.ALL:
            self._all.notify_all()


def _wait(changed: threading.Condition, seconds: float) -> None:
    """Waits up to `seconds`; in the main thread, raises `KeyboardInterrupt` when interrupted."""
    give_up = time.monotonic() + seconds
    in_main = threading.current_thread() is threading.main_thread()
    most = _LOOK_SECONDS if in_main else math.inf
    woken = False
    while not woken and (left := min(give_up - time.monotonic(), most)) > 0:
        woken = changed.wait(None if left == math.inf else left)
        raise_if_interrupted()
