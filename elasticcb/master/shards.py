"""Shards: ranges of records, how sources are split into them, and the order in which they are drawn."""

from __future__ import annotations

import random
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from elasticcb.errors import UsageError


@dataclass(frozen=True, slots=True)
class Shard:
    """Records [start, end) of the source `name`."""

    name: str
    start: int
    end: int

    @property
    def records(self) -> int:
        return self.end - self.start

    def __str__(self) -> str:
        return f"{self.name} [{self.start}, {self.end})"


class ShardLayout:
    """The shards of some sources: each source is split into ranges of `records_per_task` records.

    Raises `UsageError` for negative numbers of records.
    """

    def __init__(self, sources: Sequence[tuple[str, int]], records_per_task: int, minibatch_size: int) -> None:
        if records_per_task < 1 or minibatch_size < 1:
            raise UsageError(
                f"records_per_task={records_per_task} and minibatch_size={minibatch_size} are invalid: both must be at "
                "least 1. Set minibatch_size and num_minibatches_per_task."
            )
        for name, count in sources:
            if count < 0:
                raise UsageError(f"Source {name!r} has {count} records; expected 0 or more.")
        self.records_per_task = records_per_task
        self.minibatch_size = minibatch_size
        self.sources = [(name, count) for name, count in sources if count]
        self.records = sum(count for _, count in self.sources)
        self.batches = 0
        self._first: list[int] = []  # index of each source's first range
        self._tasks = 0
        for _, count in self.sources:
            self._first.append(self._tasks)
            whole, rest = divmod(count, records_per_task)
            self._tasks += whole + (rest > 0)
            self.batches += whole * -(-records_per_task // minibatch_size) + -(-rest // minibatch_size)

    def __len__(self) -> int:
        return self._tasks

    def __getitem__(self, index: int) -> Shard:
        place = bisect_right(self._first, index) - 1
        name, count = self.sources[place]
        start = (index - self._first[place]) * self.records_per_task
        return Shard(name, start, min(start + self.records_per_task, count))


class ShardOrder:
    """Draws each shard of a layout once: in order, or shuffled by `seed`.

    A Fisher-Yates shuffle with one step per draw: starting costs 4 bytes per shard, drawing O(1).
    """

    def __init__(self, layout: ShardLayout, seed: str | None = None) -> None:
        self._layout = layout
        self.drawn = 0
        self.records_left = layout.records
        self._random = None if seed is None else random.Random(seed)
        self._order = array("I", range(len(layout)) if seed is not None else ())

    @property
    def left(self) -> int:
        return len(self._layout) - self.drawn

    is_ready = True  # when there are some left

    def draw(self) -> Shard:
        """The next shard. Raises `IndexError` when none is left."""
        index = self.drawn
        if index >= len(self._layout):
            raise IndexError("all shards are drawn")
        self.drawn += 1
        if self._random is not None:
            order = self._order
            other = self._random.randrange(index, len(order))
            order[index], order[other] = order[other], order[index]
            index = order[index]
        shard = self._layout[index]
        self.records_left -= shard.records
        return shard
