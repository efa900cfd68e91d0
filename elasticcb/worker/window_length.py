"""How many batches a worker trains on before a merge, based on the duration of a merge."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from statistics import median

_MOST_OF_TIME = 0.05  # maximum share of training time spent merging
_LEAST, _MOST = 4, 64  # batches; within these, windows give equally good models (docs/updates.md)
_BATCHES_KEPT, _MERGES_KEPT = 33, 9


class WindowLength:
    """The length of windows: fixed, or such that merging takes a twentieth of the training time.

    Durations are medians of the last batches and merges. A merge includes waiting for other workers: random differences
    between workers grow slower than the window, and a worker faster than the others waits less if its own windows are
    longer.
    """

    def __init__(self, given: int | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._given, self._clock = given, clock
        self.batches = given or _LEAST
        self._batch_seconds: deque[float] = deque(maxlen=_BATCHES_KEPT)
        self._merge_seconds: deque[float] = deque(maxlen=_MERGES_KEPT)
        self._slot_seconds: deque[float] = deque(maxlen=_MERGES_KEPT)  # of merges with slots
        self._slots_merged = 0.0  # time of the last one

    def note_batch(self, seconds: float) -> None:
        """A batch took `seconds` to train."""
        self._batch_seconds.append(seconds)

    @property
    def slots_are_due(self) -> bool:
        """Whether also merging the optimizers' slots would take at most a twentieth of the time."""
        if not self._slot_seconds:
            return True
        return self._clock() - self._slots_merged >= min(self._slot_seconds) / _MOST_OF_TIME

    def note_merge(self, seconds: float, with_slots: bool = False) -> None:
        """A merge took `seconds`; the next window begins."""
        if with_slots:
            self._slot_seconds.append(seconds)
            self._slots_merged = self._clock()
        else:
            self._merge_seconds.append(seconds)
        if self._given is None and self._batch_seconds and self._merge_seconds:
            wanted = median(self._merge_seconds) / (_MOST_OF_TIME * max(median(self._batch_seconds), 1e-6))
            self.batches = min(max(math.ceil(wanted), _LEAST), _MOST)
