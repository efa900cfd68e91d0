"""How fast an embedding table grows."""

from __future__ import annotations

from collections import deque

from elasticcb.sharding.table_counts import Growth

WINDOW_SECONDS = 60.0
_MARK_SECONDS = 5.0


class RowFlow:
    """Counts created and removed rows, and remembers the counts over the last minute."""

    def __init__(self) -> None:
        self.made = self.removed = 0
        self._marks: deque[tuple[float, int, int]] = deque()  # time, and counts at that time

    def tick(self, now: float) -> None:
        """The time is `now`, in seconds; rates are unknown before the first call."""
        if not self._marks or now - self._marks[-1][0] >= _MARK_SECONDS:
            self._marks.append((now, self.made, self.removed))
            while len(self._marks) > 1 and self._marks[1][0] <= now - WINDOW_SECONDS:
                self._marks.popleft()

    def lately(self, now: float) -> Growth:
        """Rows created and removed in the last minute, or since the last tick if that is longer ago."""
        begun, made, removed = self._marks[0] if self._marks else (now, 0, 0)
        return Growth(now - begun, self.made - made, self.removed - removed)
