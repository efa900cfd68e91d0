"""How fast an embedding table grows."""

from __future__ import annotations

from collections import deque

from elasticcb.sharding.table_counts import Growth

WINDOW_SECONDS = 60.0
_MARK_SECONDS = 5.0


class RowFlow:
    """Counts rows that come and go, and remembers how many had at times of the last minute.

    Attributes:
        made: rows for new ids, so far.
        removed: rows, so far.
    """

    def __init__(self) -> None:
        self.made = self.removed = 0
        self._marks: deque[tuple[float, int, int]] = deque()  # when, and what there was

    def tick(self, now: float) -> None:
        """It is `now`, in seconds; before the first call nobody knows since when rows come."""
        if not self._marks or now - self._marks[-1][0] >= _MARK_SECONDS:
            self._marks.append((now, self.made, self.removed))
            while len(self._marks) > 1 and self._marks[1][0] <= now - WINDOW_SECONDS:
                self._marks.popleft()

    def lately(self, now: float) -> Growth:
        """What came and went in the last minute, or since time passed last where that is longer ago."""
        begun, made, removed = self._marks[0] if self._marks else (now, 0, 0)
        return Growth(now - begun, self.made - made, self.removed - removed)
