"""Gradients of several workers come late: when that is a risk to a model, and what its loss looks like then. Pure.

What one worker computes on weights that it pulled is applied to weights that others have changed meanwhile: with W
workers some W - 1 updates late. With momentum such updates can overshoot, and the loss jumps (docs/benchmarks.md).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection
from statistics import median

_MANY_WORKERS = 3
_WINDOW_BATCHES = 50  # that a mean of losses is taken over
_WINDOWS = 30  # that a median is taken over, at most
_LEAST_WINDOWS = 8
_JUMP = 3.0  # times the median
_JUMPS = 2  # of so many windows, to be called a sign

_ADVICE = "--updates=local lets each worker train by itself, and merges their work"


def risk(workers: int, kinds: Collection[str]) -> str:
    """What is to be said of a job that applies each gradient as it comes; "": nothing.

    Args:
        kinds: of its optimizers with momentum, by the names of their classes.
    """
    if workers < _MANY_WORKERS or not kinds:
        return ""
    return (
        f"Each gradient of {workers} workers is applied as it comes, some {workers - 1} updates late. With the "
        f"momentum of {' and '.join(kinds)} the model can become worse than that of one process: compare them. "
        f"{_ADVICE}."
    )


class LossJumps:
    """Finds losses that jump: of the means over 50 batches, two of 30 are 3 times the median of those before them."""

    def __init__(self) -> None:
        self._sum, self._batches = 0.0, 0  # of the present window
        self._means: deque[float] = deque(maxlen=_WINDOWS)
        self._jumps: deque[bool] = deque(maxlen=_WINDOWS)  # which of them are
        self._is_told = False

    def note(self, loss: float, batches: int, workers: int) -> str:
        """Takes in the mean loss of so many batches; answers what is to be said, once; "": nothing."""
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
            f"The training loss jumps, to {mean:.3g} from {usual:.3g}: a sign of gradients that {workers} workers "
            f"apply late. {_ADVICE}; or take a smaller learning rate, or fewer workers."
        )
