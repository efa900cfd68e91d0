"""Finds batch hooks that take longer than the batch itself; pure."""

from __future__ import annotations

from collections import deque
from statistics import median

_KEPT = 25  # of the newest times
_ENOUGH = 10  # to tell


class HookTimes:
    """Compares the median time of each batch hook with the median time of a batch, as Keras does."""

    def __init__(self) -> None:
        self._batches: deque[float] = deque(maxlen=_KEPT)
        self._hooks: dict[str, deque[float]] = {}
        self._told: set[str] = set()

    def note_batch(self, seconds: float) -> None:
        """A batch took so long, without its hooks."""
        self._batches.append(seconds)

    def note_hook(self, name: str, seconds: float, every: int = 1) -> str:
        """A hook took so long, which is called for each `every`-th batch; answers a warning, once a hook."""
        times = self._hooks.setdefault(name, deque(maxlen=_KEPT))
        times.append(seconds)
        if name in self._told or len(times) < _ENOUGH or len(self._batches) < _ENOUGH:
            return ""
        hook, batch = median(times), median(self._batches)
        if hook / every <= batch:
            return ""
        self._told.add(name)
        return (
            f"{name} is slow: it takes {hook:.4f} s{f' every {every} batches' if every > 1 else ''}, a batch "
            f"{batch:.4f} s (medians). Make it faster, limit it by elasticcb.callbacks.every(n), or let it follow "
            'the batches on the master: @runs_on("master").'
        )
