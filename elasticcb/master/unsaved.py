"""What workers trained since the servers last wrote recovery files."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Any

from elasticcb.master.task import Task


class Unsaved:
    """Parts of training tasks, in the order of their reports. The replacement of a lost server may lack them."""

    def __init__(self) -> None:
        self._parts: deque[Task] = deque()
        self._first = 0  # number of the first part
        self._open: dict[int, int] = {}  # number of the last part of each task since the last mark

    def __len__(self) -> int:
        return len(self._parts)

    def add(self, part: Task) -> None:
        """Part of a task was reported."""
        number = self._open.get(part.id)
        if number is not None:
            before = self._parts[number - self._first]
            if before.shard.end == part.shard.start:
                self._parts[number - self._first] = replace(before, shard=replace(part.shard, start=before.shard.start))
                return
        self._open[part.id] = self._first + len(self._parts)
        self._parts.append(part)

    def mark(self) -> int:
        """The servers begin to write; `saved` takes the result when they have written."""
        self._open.clear()
        return self._first + len(self._parts)

    def saved(self, mark: int) -> None:
        """What was reported before the mark is in the recovery files."""
        while self._first < mark and self._parts:
            self._parts.popleft()
            self._first += 1

    def take(self) -> list[Task]:
        """Removes and returns all parts."""
        parts = list(self._parts)
        self._first += len(parts)
        self._parts.clear()
        self._open.clear()
        return parts

    def to_list(self) -> list[list[Any]]:
        """JSON values."""
        return [part.to_list() for part in self._parts]
