"""Callbacks whose state goes to workers and, from the only worker, back (callbacks/shared_state.py)."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import Any

from elasticcb.callbacks.attribute_use import use_of
from elasticcb.callbacks.hook_conflicts import Placed, placed, shares_state
from elasticcb.callbacks.placement import overridden_hooks
from elasticcb.callbacks.shared_state import SharedState, names_of
from elasticcb.callbacks.warning import CallbackWarning
from elasticcb.errors import UsageError
from elasticcb.master.desk import Desk
from elasticcb.settings import JobSettings

_PATIENCE_SECONDS = 10.0  # for the state of a worker that has no task


class SharedCallbacks:
    """The master's side.

    Args:
        callbacks: the callbacks of the caller.
        settings: settings of the job.
        model: the model of the callbacks.
    """

    def __init__(self, callbacks: Iterable[Any], settings: JobSettings, model: Any) -> None:
        self._returns = shares_state(settings)
        self._placed = placed(callbacks, settings) if not settings.model.definition else []
        if not self._returns and not any(each.follows for each in self._placed):
            self._placed = []
        names = [names_of(each.callback, None if self._returns else each.follows) for each in self._placed]
        self._state = SharedState([each.callback for each in self._placed], model, names)
        self._lock = threading.Lock()  # protects what follows
        self._number, self._data = 0, b""  # the newest state that was sent
        self._is_old = True  # whether hooks may have changed it since
        self._holder = 0  # the worker that continues from it
        self._returned = b""  # what it sent back
        self._rate: float | None = None  # the learning rate that it sent back

    @property
    def names(self) -> str:
        """The classes of callbacks that need to be on one worker; "": there are none."""
        return ", ".join(each.name for each in self._placed) if self._returns else ""

    def prepare(self) -> None:
        """Call before workers get tasks. Raises `UsageError` if something can't be sent that a worker needs."""
        if self._placed:
            self._data, left = self._state.dump()
            self._number, self._is_old = self._number + 1, False
            for each, names in zip(self._placed, left, strict=True):
                _check_left(each, names)

    def fetch(self, worker: int, known: int) -> tuple[int, bytes]:
        """The state for a worker that begins an epoch or a pass, and its number; b"" if that is `known`, or if there is
        nothing to send."""
        with self._lock:
            if self._placed and self._is_old:
                self._data, _ = self._state.dump()
                self._number, self._is_old = self._number + 1, False
            if self._returns and self._placed:
                self._holder, self._returned = worker, b""
            return self._number, self._data if known != self._number else b""

    def give_back(self, worker: int, data: bytes, rate: float | None) -> None:
        """The worker has ended its part, and no hook runs there until it fetches the state again."""
        with self._lock:
            if worker == self._holder:
                self._returned, self._rate = data, rate

    def take_back(self, desk: Desk) -> float | None:
        """Before hooks on the master: waits for the worker's state, and adopts it. Returns the learning rate that a
        hook has set there, if any."""
        self._is_old = True
        if not self._holder:
            return None
        give_up = time.monotonic() + _PATIENCE_SECONDS
        with desk.state() as state:
            while not self._returned and state.has(self._holder):
                desk.tend()
                busy = state.queue is not None and any(each.worker == self._holder for each in state.queue.leases())
                if not busy and time.monotonic() > give_up:
                    break
                desk.wait_a_tick()
        with self._lock:
            data, self._returned, self._holder = self._returned, b"", 0
        if data:
            self._state.adopt(self._state.read(data))
            return self._rate
        text = (
            f"The worker was lost: what hooks of batches kept in {self.names} since the last epoch or evaluation pass is "
            "lost, too. Training continues with the state before."
        )
        desk.warn(CallbackWarning(f"state of {self.names} is lost", text))
        return None


def _check_left(each: Placed, left: dict[str, str]) -> None:
    """Raises `UsageError` for attributes that can't be sent, and that the worker can't make itself."""
    worker = each.on_workers
    made_there = use_of(each.callback, {"on_train_begin"} & overridden_hooks(each.callback).keys()).changes
    needed = sorted(left.keys() & (worker.reads | worker.changes) - made_there)
    if needed:
        raise UsageError(
            f"{each.name}.{' and '.join(each.batches)} (on a worker) uses {', '.join(f'self.{name}' for name in needed)}, "
            f"but {left[needed[0]]!r} objects can't be sent to workers. Create it in on_train_begin, which then runs on "
            'the worker too; or put @elasticcb.callbacks.runs_on("master") above the class, so that all of its hooks run '
            "in your process."
        )
