"""Allows one call of a cluster at a time."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from elasticcb.errors import UsageError


class Turn:
    """Tracks which method uses the cluster's processes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._name = ""
        self._thread = 0

    @contextlib.contextmanager
    def of(self, name: str) -> Iterator[None]:
        """Marks the method `name` as using the processes. Raises `UsageError` if another method does."""
        if not self._lock.acquire(blocking=False):
            raise UsageError(f"The cluster is busy with `{self._name}`. Call `{name}` when that is done.")
        try:
            self._name, self._thread = name, threading.get_ident()
            yield
        finally:
            self._name, self._thread = "", 0
            self._lock.release()

    @property
    def name(self) -> str:
        """The method that uses the processes; "": none."""
        return self._name

    @property
    def taken(self) -> bool:
        """Whether a method is using the processes."""
        return self._lock.locked()

    def refuse_within(self, name: str) -> None:
        """Raises `UsageError` if this thread is inside a call, in one of its callbacks."""
        if self._thread == threading.get_ident():
            raise UsageError(
                f"`{name}` was called inside `{self._name}`, which is still running. To stop training from a "
                "callback, set self.model.stop_training = True."
            )
