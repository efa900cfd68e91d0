"""Where tasks come from: a supply for each type, which creates them on demand; and those that are TODO again.

The supply of training tasks is in epochs.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping

from elasticcb.errors import UsageError
from elasticcb.master.accounting import TaskRecord
from elasticcb.master.shards import Shard, ShardLayout, ShardOrder
from elasticcb.master.task import HANDING_OUT_ORDER, Milestone, MilestoneKind, Task, TaskType


class Supply(ABC):
    """Creates the tasks of one type, and knows which milestone is reached when they are done."""

    @property
    @abstractmethod
    def to_make(self) -> int:
        """Tasks not created yet."""

    @abstractmethod
    def make(self, task_id: int) -> Task | None:
        """The next task; None when there is none (now)."""

    def close(self, task: Task) -> list[Milestone]:
        """The task is done; returns the milestones reached."""
        return []

    def reopen(self, task: Task) -> None:
        """`task` was created but not done when the queue was saved."""
        raise AssertionError(f"{task} is of a type that is not saved")


class EvaluationTasks(Supply):
    """The tasks of evaluation passes, in order; a round is done when all its tasks are."""

    def __init__(self) -> None:
        self._orders: deque[tuple[int, ShardOrder]] = deque()  # rounds with tasks to create
        self._open: dict[int, int] = {}  # round -> open tasks

    def add(self, round: int, layout: ShardLayout) -> list[Milestone]:
        """Raises `UsageError` when the round was added before and is not done."""
        if round in self._open:
            raise UsageError(f"Evaluation pass {round} is already running; each pass needs a new number.")
        if not layout:
            return [Milestone(MilestoneKind.ROUND_DONE, round)]
        self._orders.append((round, ShardOrder(layout)))
        self._open[round] = len(layout)
        return []

    @property
    def to_make(self) -> int:
        return sum(order.left for _, order in self._orders)

    def make(self, task_id: int) -> Task | None:
        if not self._orders:
            return None
        round, order = self._orders[0]
        shard = order.draw()
        if not order.left:
            self._orders.popleft()
        return Task(task_id, TaskType.EVALUATION, shard, evaluation_round=round)

    def close(self, task: Task) -> list[Milestone]:
        self._open[task.evaluation_round] -= 1
        if self._open[task.evaluation_round]:
            return []
        del self._open[task.evaluation_round]
        return [Milestone(MilestoneKind.ROUND_DONE, task.evaluation_round)]


class PredictionTasks(Supply):
    """The prediction tasks, in the order of their records."""

    def __init__(self, layout: ShardLayout) -> None:
        self._order = ShardOrder(layout)
        self._open = len(layout)  # tasks that are not done, created or not

    @property
    def made(self) -> int:
        return self._order.drawn

    @property
    def to_make(self) -> int:
        return self._order.left

    def make(self, task_id: int) -> Task | None:
        if not self._order.left:
            return None
        return Task(task_id, TaskType.PREDICTION, self._order.draw())

    def close(self, task: Task) -> list[Milestone]:
        self._open -= 1
        return [] if self._open else [Milestone(MilestoneKind.PREDICTION_DONE)]

    def restore(self, made: int) -> None:
        """Continues after `made` created tasks; those that were open then must be reopened."""
        for _ in range(made):
            self._order.draw()
        self._open = self._order.left

    def reopen(self, task: Task) -> None:
        self._open += 1


class FunctionTasks(Supply):
    """Function calls, by id, in the order in which they were added."""

    def __init__(self) -> None:
        self._numbers: deque[int] = deque()  # to create

    def add(self, number: int) -> None:
        self._numbers.append(number)

    def cancel(self) -> list[int]:
        """Cancels added calls without a task; returns their ids."""
        numbers = list(self._numbers)
        self._numbers.clear()
        return numbers

    @property
    def to_make(self) -> int:
        return len(self._numbers)

    def make(self, task_id: int) -> Task | None:
        if not self._numbers:
            return None
        return Task(task_id, TaskType.FUNCTION, Shard("", 0, 0), function=self._numbers.popleft())


class TrainEndTask(Supply):
    """The only TRAIN_END task. It has no source: the master adds it."""

    to_make = 0

    def make(self, task_id: int) -> Task | None:
        return None

    def close(self, task: Task) -> list[Milestone]:
        return [Milestone(MilestoneKind.TRAIN_END_DONE)]

    def reopen(self, task: Task) -> None:
        """Not counted."""


class Todo:
    """The tasks that are TODO. Hands them out by type, in `HANDING_OUT_ORDER`; within a type, requeued ones first.

    Tasks are created when they are handed out, so pending ones cost no memory here.
    """

    def __init__(self, supplies: Mapping[TaskType, Supply]) -> None:
        self.next_id = 1
        self.train_end_added = False
        self._again: dict[TaskType, deque[TaskRecord]] = {kind: deque() for kind in HANDING_OUT_ORDER}
        self._supplies = supplies
        self._in_order = [(kind, self._again[kind], supplies[kind]) for kind in HANDING_OUT_ORDER]

    def take(self, train_end: bool, idle: bool = True, failed_on: int | None = None) -> TaskRecord | None:
        """The next task; None when there is none (now). Tasks that failed on the worker `failed_on` are for others."""
        for kind, again, supply in self._in_order:
            if kind is TaskType.TRAIN_END and not train_end:
                continue
            for record in again:
                if (idle or not record.for_idle) and (failed_on is None or record.failed_on != failed_on):
                    self.remove(record)
                    return record
            task = supply.make(self.next_id)
            if task is not None:
                self.next_id += 1
                return TaskRecord(task)
        return None

    def remove(self, record: TaskRecord) -> None:
        self._again[record.task.type].remove(record)

    def put_back(self, record: TaskRecord) -> None:
        """Requeues a task ahead of all others of its type."""
        self._again[record.task.type].appendleft(record)

    def append(self, record: TaskRecord) -> None:
        """Appends a task after all requeued ones, before those still to be created."""
        self._again[record.task.type].append(record)

    def split(self, record: TaskRecord, end: int) -> None:
        """Splits `record` after its first `end` records, and appends the rest."""
        rest = TaskRecord(record.cut(end, self.next_id))
        self.next_id += 1
        rest.for_idle = True
        self._supplies[rest.task.type].reopen(rest.task)
        self.put_back(rest)

    def add_train_end(self) -> None:
        """Adds the only TRAIN_END task; repeating it has no effect."""
        if self.train_end_added:
            return
        self.train_end_added = True
        self.append(TaskRecord(Task(self.next_id, TaskType.TRAIN_END, Shard("", 0, 0))))
        self.next_id += 1

    def remove_all(self, kind: TaskType) -> list[TaskRecord]:
        """Removes the requeued tasks of a type; its supply is not touched."""
        records = list(self._again[kind])
        self._again[kind].clear()
        return records

    @property
    def has_returned(self) -> bool:
        """Whether there are requeued tasks."""
        return any(self._again.values())

    @property
    def train_end_waits(self) -> bool:
        return bool(self._again[TaskType.TRAIN_END])

    def count(self, kind: TaskType) -> int:
        """Number of requeued tasks, and of those still to be created."""
        return len(self._again[kind]) + self._supplies[kind].to_make

    def __iter__(self) -> Iterator[TaskRecord]:
        """The requeued tasks."""
        for again in self._again.values():
            yield from again
