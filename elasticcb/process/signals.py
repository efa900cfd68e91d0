"""How a process learns that it is to end soon: machines that are taken away say so by SIGTERM."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import threading
from collections.abc import Callable, Iterator


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
