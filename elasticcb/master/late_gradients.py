"""Late gradients of several workers: when they endanger training, and how that shows in the loss. Pure.

A worker's gradient is computed on pulled weights that others change in the meantime: with W workers it is applied about
W - 1 updates late. With momentum such updates can overshoot, and the loss jumps (docs/benchmarks.md).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection
from statistics import median

_MANY_WORKERS = 3
_WINDOW_BATCHES = 50  # per mean of losses
_WINDOWS = 30  # maximum number of means in the median
_LEAST_WINDOWS = 8
_JUMP = 3.0  # factor over the median
_JUMPS = 2  # number of jumps among the means that triggers the warning

_ADVICE = "--updates=local trains each worker locally and merges the results"


def risk(workers: int, kinds: Collection[str]) -> str:
    """A warning for a job that applies each gradient on arrival; "": none."""
    if workers < _MANY_WORKERS or not kinds:
        return ""
    return (
        f"Each gradient of {workers} workers is applied on arrival, about {workers - 1} updates late. With the "
        f"momentum of {' and '.join(kinds)} the model can become worse than with one process: compare them. "
        f"{_ADVICE}."
    )


class LossJumps:
    """Detects loss jumps: of 30 means over 50 batches each, two are 3 times the median of those before them."""

    def __init__(self) -> None:
        self._sum, self._batches = 0.0, 0  # of the current window
        self._means: deque[float] = deque(maxlen=_WINDOWS)
        self._jumps: deque[bool] = deque(maxlen=_WINDOWS)  # which of the last windows are jumps
        self._is_told = False

    def note(self, loss: float, batches: int, workers: int) -> str:
        """Adds the mean loss of `batches` batches; returns a warning, once; "": none."""
        self._sum, self._batches = self._sum + loss * batches, self._batches + batches
        if self._is_told or self._batches < _WINDOW_BATCHES:
            return ""
        mean, usual = self._sum / self._batches, median(self._means) if self._means else math.inf
        self._sum, self._batches = 0.0, 0
        self._jumps.append(len(self._means) >= _LEAST_WINDOWS and mean > _JUMP * usual > 0)
        self._means.append(mean)
        self._is_told = self._jumps[-1] and sum(self._jumps) >= _JUMPS
        if not self._is_told:
            return ""
        return (
            f"The training loss jumped to {mean:.3g} from {usual:.3g}, which suggests that the gradients of {workers} "
            f"workers are applied too late. {_ADVICE}; or use a smaller learning rate or fewer workers."
        )
