"""The learning rate of a worker: the servers' base rate, and changes by callbacks here."""

from __future__ import annotations

from typing import Any

from elasticcb.clients.ps import PSClient
from elasticcb.optimizers.step_logs import is_overridden
from elasticcb.optimizers.traits import learning_rate_variable, not_cached


class WorkerRate:
    """Follows the base rate, and detects when the model's own rate differs."""

    def __init__(self, model: Any, ps: PSClient) -> None:
        self._model, self._ps = model, ps
        self._base: float | None = None
        self._version = -1  # of the base rate
        self._changed: float | None = None
        self._is_known = False  # reading it takes half a millisecond

    def adopt_base(self) -> None:
        """Adopts a new base rate (from a checkpoint, or set on the master)."""
        version = self._ps.learning_rate_version
        if version != self._version and self._rate() is not None:
            self._base = self._ps.learning_rate
            self._model.optimizer.learning_rate = not_cached(self._base)
            self._version = version
            self._is_known = False

    def may_have_changed(self) -> None:
        """A callback runs, and may change the rate."""
        self._is_known = False

    def changed(self) -> float | None:
        """The optimizer's learning rate if a callback, or a step of the model's own, changed it."""
        if not self._is_known:
            rate = self._rate()
            self._changed = None if rate == self._base else rate
            self._is_known = not is_overridden(self._model, "train_step")
        return self._changed

    def _rate(self) -> float | None:
        """None with a schedule."""
        rate = learning_rate_variable(getattr(self._model, "optimizer", None))
        return None if rate is None else float(rate.numpy())
