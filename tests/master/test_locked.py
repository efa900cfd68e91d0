"""A value under its lock, while Ctrl-C comes at any moment."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from interrupted import interrupted_at

from elasticcb.master.events import Wake
from elasticcb.master.locked import Locked
from elasticcb.process import signals
from elasticcb.process.signals import interrupt, repeat_ignored_interrupts


@pytest.fixture(autouse=True)
def handlers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(signals, "_told_at", -signals._SAME_SECONDS)
    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def locked() -> Locked[list[int]]:
    return Locked([], lambda value: Wake.NOBODY)


def is_free(locked: Locked[list[int]]) -> bool:
    def enter() -> None:
        with locked():
            pass

    thread = threading.Thread(target=enter, daemon=True)
    thread.start()
    thread.join(5.0)
    return not thread.is_alive()


def test_ctrl_c_at_any_moment_leaves_the_lock_to_others(locked: Locked[list[int]]) -> None:
    def block() -> None:
        with locked() as value:
            value.append(1)
            locked.wait_as_driver(0.0001)
            value.append(2)

    operation = 1
    while interrupted_at(operation, block):
        assert is_free(locked), f"not after Ctrl-C before operation {operation}"
        operation += 1
    assert operation > 100


def test_ctrl_c_ends_a_wait(locked: Locked[list[int]]) -> None:
    timer = threading.Timer(0.2, lambda: signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT))
    timer.start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt), locked():
        locked.wait_for(lambda value: False, 60.0)
    assert time.monotonic() - began < 30
    assert is_free(locked)


def test_sigterm_that_comes_on_two_ways_is_one() -> None:
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_a_later_sigterm_is_a_second_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "_SAME_SECONDS", 0.0)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)


def test_ctrl_c_is_not_lost_where_python_ignores_exceptions(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    repeat_ignored_interrupts()
    Interrupted()
    with pytest.raises(KeyboardInterrupt):
        threading.Event().wait(30.0)
