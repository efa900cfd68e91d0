"""Where tasks come from: a supply for each type, which creates them on demand.

The supply of training tasks is in epochs.py.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

from elasticcb.errors import UsageError
from elasticcb.master.shards import Shard, ShardLayout, ShardOrder
from elasticcb.master.task import Milestone, MilestoneKind, Task, TaskType


class Supply(Protocol):
    """Creates the tasks of one type, and knows which milestone is reached when they are done."""

    @property
    def to_make(self) -> int:
        """Tasks not created yet."""

    def make(self, task_id: int) -> Task | None:
        """The next task; None when there is none (now)."""

    def close(self, task: Task) -> list[Milestone]:
        """The task is done; returns the milestones reached."""

    def reopen(self, task: Task) -> None:
        """`task` was created but not done when the queue was saved."""


class EvaluationTasks:
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

    def reopen(self, task: Task) -> None:
        raise AssertionError("evaluation passes are not saved")


class PredictionTasks:
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


class FunctionTasks:
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

    def close(self, task: Task) -> list[Milestone]:
        return []

    def reopen(self, task: Task) -> None:
        raise AssertionError("functions are not saved")


class TrainEndTask:
    """The only TRAIN_END task. It has no source: the master adds it."""

    to_make = 0

    def make(self, task_id: int) -> Task | None:
        return None

    def close(self, task: Task) -> list[Milestone]:
        return [Milestone(MilestoneKind.TRAIN_END_DONE)]

    def reopen(self, task: Task) -> None:
        """Not counted."""
