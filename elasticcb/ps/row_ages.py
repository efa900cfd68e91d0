"""Which rows of an embedding table are too old: by versions of the model, or by time."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from elasticcb.rpc.tensors import Array
from elasticcb.settings.age import seconds_of

_LOOKS_PER_AGE = 8  # how often rows that are too old are looked for, while one becomes too old
_MARKS_PER_AGE = 64  # how exact a time is: by a 64th, rows stay too long


class RowAges:
    """Finds the version before which a row was trained too long ago.

    A row has the version at which it was last trained. For a time, marks tell when the model had which version, so that
    a row needs no time of its own.

    Args:
        max_age: versions, or a time ("7d"); 0: rows never become too old.
        now: the system's clock, in seconds: marks outlive this process.
    """

    def __init__(self, max_age: int | str, now: Callable[[], float]) -> None:
        self._seconds = seconds_of(max_age)
        self._versions = 0 if self._seconds else int(max_age)
        self._now = now
        # Last, at this version or time: by time at once, since a job may be shorter than the time between two looks.
        self._looked = -math.inf if self._seconds else 0.0
        # (version, seconds): rows of earlier versions were last trained before then.
        self._marks: list[tuple[int, float]] = []
        self._last = (0, now() if self._seconds else 0.0)  # version and time of the last call

    def begin(self, version: int) -> None:
        """The rows are others, as they were at `version`."""
        if not self._seconds:
            self._looked = version
            return
        self._marks = [mark for mark in self._marks if mark[0] <= version]
        self._last = (version, self._now())

    def due(self, version: int) -> int | None:
        """The version before which rows are too old; None: it is not the time to look, since that looks at all.

        Args:
            version: of the model. Call it at each of them.
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
        """A mark of what was trained up to the last call; None: at `version` that goes on, or it can't follow the other
        marks."""
        last, seconds = self._last
        if version <= last or (self._marks and (last < self._marks[-1][0] or seconds < self._marks[-1][1])):
            return None
        return last + 1, seconds

    def export(self, version: int) -> Array | None:
        """For `restore`, versions and seconds, int64 [n, 2]; None: there is nothing to keep.

        Args:
            version: of the model.
        """
        if not self._seconds:
            return None
        newest = self._before(version + 1)
        return np.ceil([*self._marks, *([newest] if newest else [])]).astype(np.int64).reshape(-1, 2)

    def restore(self, marks: Array, version: int, stood_still: bool) -> None:
        """Goes on with what `export` gave.

        Args:
            version: of the model now; the next rows to be trained get one more.
            stood_still: the time since then does not count, as the job could train nothing.
        """
        if not self._seconds or not len(marks):
            return
        now = self._now()
        pause = max(0.0, now - float(marks[-1, 1])) if stood_still else 0.0
        known = [(int(mark), float(seconds)) for mark, seconds in marks.tolist() if mark <= version + 1]
        self._marks = [(mark, min(seconds + pause, now)) for mark, seconds in known]
