"""The training tasks of all epochs: created lazily, and counted until each epoch is done."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from elasticcb.master.shards import Shard, ShardLayout, ShardOrder
from elasticcb.master.stream_ranges import StreamRanges
from elasticcb.master.task import Milestone, MilestoneKind, QueueSettings, Task, TaskType
from elasticcb.master.task_sources import Supply


class Unsaved:
    """Parts of training tasks that were reported since the servers last saved, in order. A lost server lacks them."""

    def __init__(self) -> None:
        self._parts: deque[Task] = deque()
        self._first = 0  # number of the first part
        self._open: dict[int, int] = {}  # number of the last part of each task since the last mark

    def __len__(self) -> int:
        return len(self._parts)

    def __iter__(self) -> Iterator[Task]:
        return iter(self._parts)

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

    def saved(self, mark: int) -> int:
        """What was reported before the mark is in the recovery files; returns the number of its records."""
        records = 0
        while self._first < mark and self._parts:
            records += self._parts.popleft().shard.records
            self._first += 1
        return records

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


class Epochs(Supply):
    """Creates the training tasks, epoch after epoch, and reports when epochs and training are done.

    Epochs overlap: once all tasks of epoch e are created, those of epoch e + 1 follow while some of e are still open
    (TODO again, or DOING). Epochs still finish in order, and training after the last one, when all is saved.

    Attributes:
        unsaved: what was trained since the servers last wrote their recovery files.
        stream: the ranges of partitions that grow; None: the number of records is known.
    """

    def __init__(self, layout: ShardLayout, settings: QueueSettings) -> None:
        self._layout, self._settings = layout, settings
        self.stream = StreamRanges(settings) if settings.grows else None
        first = settings.initial_epoch
        self.current = first - 1  # epoch whose tasks are being created; one less before the first task
        # all tasks that will ever be are closed
        self.done = not (layout or self.stream) or first >= settings.num_epochs
        self.stop_reason: str | None = None
        self.batches_made = 0
        self.unsaved = Unsaved()
        self.ended_by_source: set[int] = set()  # epochs in which the source ended

        # tasks of `current` still to create
        self._order: ShardOrder | StreamRanges = ShardOrder(ShardLayout((), 1, 1))
        self._open: dict[int, int] = {}  # epoch -> tasks that are TODO or DOING
        self.epochs_done = first  # earlier epochs are done, or were skipped
        self._released = first - 1  # newest released epoch

    # ------------------------------------------------------------ creating tasks

    def make(self, task_id: int) -> Task | None:
        """The next task; None when there is none (now)."""
        if not self._goes_on():
            if not self._more_epochs() or (self._settings.hold_epochs and self._released < self.current):
                return None
            if self.stream is not None and not self.stream.is_ready:
                return None
            self.current += 1
            self._order = self._order_of(self.current)
        if not self._order.is_ready:
            return None
        shard = self._within_max_batches(self._order.draw())
        self._open[self.current] = self._open.get(self.current, 0) + 1
        return Task(task_id, TaskType.TRAINING, shard, epoch=self.current)

    def release(self, epoch: int) -> None:
        """Lets the epoch after `epoch` begin, if epochs are held."""
        self._released = max(self._released, epoch)

    @property
    def is_held(self) -> bool:
        """Whether epochs remain; if no task is open, the next one waits for its release."""
        return not self.done and self.stop_reason is None and self.current + 1 < self._settings.num_epochs

    @property
    def to_make(self) -> int:
        """Tasks still to create, over all epochs; an estimate if `max_batches` will end training early."""
        if self.stop_reason is not None or not self._batches_left():
            return 0
        if self.stream is not None:  # of what is there
            return -(-self.stream.waiting // self._layout.records_per_task)
        tasks = self._order.left + (self._settings.num_epochs - 1 - self.current) * len(self._layout)
        if 0 < self._settings.max_batches < self._settings.num_epochs * self._layout.batches:
            per_task = -(-self._layout.records_per_task // self._layout.minibatch_size)
            tasks = min(tasks, -(-(self._settings.max_batches - self.batches_made) // per_task))
        return tasks

    def _within_max_batches(self, shard: Shard) -> Shard:
        """`shard`, cut to fit `max_batches`; counts its batches."""
        size = self._layout.minibatch_size
        batches = -(-shard.records // size)
        if self._settings.max_batches:
            left = self._settings.max_batches - self.batches_made
            if batches > left:
                batches = left
                shard = Shard(shard.name, shard.start, shard.start + left * size)
        self.batches_made += batches
        return shard

    def _order_of(self, epoch: int) -> ShardOrder | StreamRanges:
        if self.stream is not None:
            self.stream.begin_epoch(epoch)
            return self.stream
        return ShardOrder(self._layout, self._seed_of(epoch))

    def _seed_of(self, epoch: int) -> str | None:
        seed = self._settings.shuffle_seed
        return None if seed is None else f"{seed}/{epoch}"

    def _batches_left(self) -> bool:
        used_up = 0 < self._settings.max_batches <= self.batches_made
        return not used_up and bool(self._layout if self.stream is None else not self.stream.has_ended)

    def _goes_on(self) -> bool:
        """Whether the current epoch has more tasks to create."""
        return self.stop_reason is None and self._order.left > 0 and self._batches_left()

    def _more_epochs(self) -> bool:
        return self.stop_reason is None and self.current + 1 < self._settings.num_epochs and self._batches_left()

    # ------------------------------------------------------------ ending

    def close(self, task: Task) -> list[Milestone]:
        """The task is done; returns the milestones reached."""
        self._open[task.epoch] -= 1
        return self.settle()

    def unmade(self) -> tuple[int, int]:
        """(tasks, records) of the current epoch that are still to be created."""
        if self._settings.open_ended or isinstance(self._order, StreamRanges):
            return 0, 0  # unknown
        return (self._order.left, self._order.records_left) if self._goes_on() else (0, 0)

    @property
    def all_trained(self) -> bool:
        """Whether all training tasks are done; what they trained may be unsaved."""
        return self.epochs_done > self.current and not any(self._open.values()) and not self._more_epochs()

    def source_ended(self, epoch: int) -> None:
        """The source has ended in `epoch`: no more tasks of it are created."""
        self.ended_by_source.add(epoch)
        if epoch == self.current:
            self._order = ShardOrder(ShardLayout((), 1, 1))

    def stop(self, reason: str, dropped: Iterable[Task]) -> list[Milestone]:
        """Creates no more tasks, and drops the open tasks `dropped`; returns the milestones reached."""
        self.stop_reason = reason
        for task in dropped:
            self._open[task.epoch] -= 1
        return self.settle()

    def settle(self) -> list[Milestone]:
        """Milestones of the epochs that are done by now, in order, and of training."""
        milestones: list[Milestone] = []
        while self.epochs_done <= self.current:
            epoch = self.epochs_done
            # Of earlier epochs, tasks may be open again that a lost server had not saved.
            is_open = any(tasks and each <= epoch for each, tasks in self._open.items())
            if is_open or (epoch == self.current and self._goes_on()):
                return milestones
            self._open.pop(epoch, None)
            self.epochs_done += 1
            milestones.append(Milestone(MilestoneKind.EPOCH_DONE, epoch))
        if not self.done and self.all_trained and not self.unsaved:
            self.done = True
            milestones.append(Milestone(MilestoneKind.TRAINING_DONE))
        return milestones

    # ------------------------------------------------------------ saving

    def to_dict(self) -> dict[str, Any]:
        """JSON values; open tasks are saved elsewhere."""
        return {
            "epoch": self.current,
            "drawn": 0 if isinstance(self._order, StreamRanges) else self._order.drawn,
            **({} if self.stream is None else self.stream.to_dict()),
            "epochs_done": self.epochs_done,
            "released": self._released,
            "training_done": self.done,
            "stop_reason": self.stop_reason,
        }

    def restore(self, saved: dict[str, Any], batches_made: int) -> None:
        """Restores the state saved by `to_dict`; each task that was open then must be reopened."""
        self.current = saved["epoch"]
        if self.stream is not None:
            self.stream.restore(saved)
            self._order = self.stream if self.current >= 0 else self._order
        elif saved["drawn"]:  # else all its tasks are created
            self._order = ShardOrder(self._layout, self._seed_of(self.current))
            for _ in range(saved["drawn"]):
                self._order.draw()
        self.epochs_done = saved["epochs_done"]
        self._released = saved["released"]
        self.done = saved["training_done"]
        self.stop_reason = saved["stop_reason"]
        self.batches_made = batches_made

    def reopen(self, task: Task) -> None:
        """`task` is open, again or as when the queue was saved."""
        self._open[task.epoch] = self._open.get(task.epoch, 0) + 1
