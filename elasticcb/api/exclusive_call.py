"""One call of a cluster at a time."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from elasticcb.errors import UsageError


class Turn:
    """Whose turn it is to use the cluster's processes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._name = ""
        self._thread = 0

    @contextlib.contextmanager
    def of(self, name: str) -> Iterator[None]:
        """While the method `name` uses the processes. Raises `UsageError` when another one does."""
        if not self._lock.acquire(blocking=False):
            raise UsageError(f"The cluster is busy with `{self._name}`; `{name}` has to wait until that is done.")
        try:
            self._name, self._thread = name, threading.get_ident()
            yield
        finally:
            self._name, self._thread = "", 0
            self._lock.release()

    @property
    def name(self) -> str:
        """The method that uses the processes; "": none does."""
        return self._name

    @property
    def taken(self) -> bool:
        """Whether some method uses the processes."""
        return self._lock.locked()

    def refuse_within(self, name: str) -> None:
        """Raises `UsageError` where this thread is in the middle of a call: in one of its callbacks."""
        if self._thread == threading.get_ident():
            raise UsageError(
                f"`{name}` was called within `{self._name}`, which goes on after it. To end training from a callback, "
                "set self.model.stop_training = True."
            )
