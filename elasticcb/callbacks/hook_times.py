"""Finds batch hooks that take longer than the batch itself. Pure functions."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from statistics import median

_KEPT = 25  # of the newest times
_ENOUGH = 10  # to tell


class HookTimes:
    """Compares the median time of each batch hook with the median time of a batch, like Keras."""

    def __init__(self) -> None:
        self._batches: deque[float] = deque(maxlen=_KEPT)
        self._hooks: dict[str, deque[float]] = {}
        self._told: set[str] = set()

    def note_batch(self, seconds: float) -> None:
        """Records the time of a batch without its hooks."""
        self._batches.append(seconds)

    def note_hook(
        self, name: str, seconds: float, every: int = 1, is_movable: Callable[[], bool] = lambda: False
    ) -> str:
        """Records the time of a hook that is called every `every` batches; returns a warning once per hook.

        Args:
            is_movable: whether the hook does the same on the master, after the batch.
        """
        times = self._hooks.setdefault(name, deque(maxlen=_KEPT))
        times.append(seconds)
        if name in self._told or len(times) < _ENOUGH or len(self._batches) < _ENOUGH:
            return ""
        hook, batch = median(times), median(self._batches)
        if hook / every <= batch:
            return ""
        self._told.add(name)
        or_move = ', or run it on the master in the background with @runs_on("master")' if is_movable() else ""
        return (
            f"{name} is slow: it takes {hook:.4f} s{f' every {every} batches' if every > 1 else ''}, a batch takes "
            f"{batch:.4f} s (medians). Make it faster, or call it less often with elasticcb.callbacks.every(n)"
            f"{or_move}."
        )
