"""Which rows of an embedding table are too old: by model versions, or by time."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from elasticcb.rpc.tensors import Array
from elasticcb.settings.age import seconds_of

_LOOKS_PER_AGE = 8  # how often per maximum age to look for old rows
_MARKS_PER_AGE = 64  # precision of times: rows may stay up to a 64th too long


class RowAges:
    """Finds the version before which rows were trained too long ago.

    A row stores the version at which it was last trained. For time-based ages, marks record when the model had which
    version, so that rows need no timestamps.

    Args:
        max_age: versions, or a time ("7d"); 0: rows never expire.
        now: system clock in seconds: marks outlive this process.
    """

    def __init__(self, max_age: int | str, now: Callable[[], float]) -> None:
        self._seconds = seconds_of(max_age)
        self._versions = 0 if self._seconds else int(max_age)
        self._now = now
        # Version or time of the last look: for times, look at once, since a job may be shorter than the interval.
        self._looked = -math.inf if self._seconds else 0.0
        # (version, seconds): rows of earlier versions were last trained before that time.
        self._marks: list[tuple[int, float]] = []
        self._last = (0, now() if self._seconds else 0.0)  # version and time of the last call

    def begin(self, version: int) -> None:
        """The rows were replaced by those of `version`."""
        if not self._seconds:
            self._looked = version
            return
        self._marks = [mark for mark in self._marks if mark[0] <= version]
        self._last = (version, self._now())

    def due(self, version: int) -> int | None:
        """The version before which rows are too old; None: no need to look now, because looking scans all rows.

        Args:
            version: current version of the model. Call this at every version.
        """
        if self._seconds:
            return self._due_by_time(version)
        if not self._versions or version - self._looked < max(1, self._versions // _LOOKS_PER_AGE):
            return None
        self._looked = version
        return version - self._versions

    def _due_by_time(self, version: int) -> int | None:
        now = self._now()
        before = self._before(version)
        if before is not None:
            self._marks.append(before)
            if len(self._marks) > 2 and before[1] - self._marks[-3][1] < self._seconds / _MARKS_PER_AGE:
                del self._marks[-2]
        self._last = (version, now)
        if 0 <= now - self._looked < self._seconds / _LOOKS_PER_AGE:  # the clock may have been set back
            return None
        self._looked = now
        while len(self._marks) > 1 and self._marks[1][1] <= now - self._seconds:
            del self._marks[0]
        return self._marks[0][0] if self._marks and self._marks[0][1] <= now - self._seconds else None

    def _before(self, version: int) -> tuple[int, float] | None:
        """A mark for everything trained up to the last call; None if `version` has not increased, or the mark would be
        out of order."""
        last, seconds = self._last
        if version <= last or (self._marks and (last < self._marks[-1][0] or seconds < self._marks[-1][1])):
            return None
        return last + 1, seconds

    def export(self, version: int) -> Array | None:
        """State for `restore`, versions and seconds, int64 [n, 2]; None: nothing to save."""
        if not self._seconds:
            return None
        newest = self._before(version + 1)
        return np.ceil([*self._marks, *([newest] if newest else [])]).astype(np.int64).reshape(-1, 2)

    def restore(self, marks: Array, version: int, stood_still: bool) -> None:
        """Restores the state of `export`.

        Args:
            version: current version of the model; the next rows trained get the following version.
            stood_still: the time since then does not count, because the job could not train.
        """
        if not self._seconds or not len(marks):
            return
        now = self._now()
        pause = max(0.0, now - float(marks[-1, 1])) if stood_still else 0.0
        known = [(int(mark), float(seconds)) for mark, seconds in marks.tolist() if mark <= version + 1]
        self._marks = [(mark, min(seconds + pause, now)) for mark, seconds in known]
