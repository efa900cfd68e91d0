"""How threads of the master wait for its state to change."""

from __future__ import annotations

import threading


class Changes(threading.Condition):
    """A lock, with a condition for all that wait, and one for the thread that drives the job alone.

    Most reports matter to that thread alone. Workers that wait for a task, of which there may be hundreds, stay asleep.
    """

    def __init__(self) -> None:
        lock = threading.RLock()
        super().__init__(lock)
        self._driver = threading.Condition(lock)

    def notify_all(self) -> None:
        super().notify_all()
        self._driver.notify_all()

    def notify_driver(self) -> None:
        """Something changed that no worker waits for."""
        self._driver.notify_all()

    def wait_as_driver(self, seconds: float) -> None:
        self._driver.wait(seconds)
