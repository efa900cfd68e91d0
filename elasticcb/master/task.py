"""What a task is: its type, its shard, its lease, and its states.

These are immutable values; the history of a task is its `TaskRecord` in accounting.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Any

from elasticcb.master.shards import Shard


class TaskType(str, Enum):
    """What a worker should do."""

    TRAINING = "TRAINING"
    EVALUATION = "EVALUATION"
    PREDICTION = "PREDICTION"
    TRAIN_END = "TRAIN_END"
    FUNCTION = "FUNCTION"


# A running evaluation pass keeps a snapshot on the servers, so its tasks come first. TRAIN_END is handed out only when
# no other task is open. A job of functions has no other tasks.
HANDING_OUT_ORDER = (
    TaskType.EVALUATION,
    TaskType.TRAINING,
    TaskType.PREDICTION,
    TaskType.FUNCTION,
    TaskType.TRAIN_END,
)

# Types whose finished records need not be repeated when another worker takes over the task. The metric states of a
# partial evaluation task die with its worker, so such a task starts over.
RESUMABLE = frozenset({TaskType.TRAINING, TaskType.PREDICTION})


class TaskState(str, Enum):
    """The state of a task."""

    TODO = "TODO"
    DOING = "DOING"
    DONE = "DONE"
    FAILED = "FAILED"
    DROPPED = "DROPPED"


class TaskEvent(str, Enum):
    """Events that move a task from one state to the next."""

    HANDED_OUT = "handed out"
    TRAINING_STOPPED = "training stopped"
    FUNCTIONS_CANCELLED = "functions cancelled"
    REPORTED_DONE = "reported done"
    ANSWER_LOST = "answer lost"
    WORKER_LOST = "worker lost"
    HANDED_BACK = "handed back"
    SPLIT_OFF = "split off"
    RESULTS_LOST = "results lost"
    LEASE_OVER = "lease over"
    REPORTED_FAILED = "reported failed"
    NOTHING_LEFT = "nothing left"
    RETRIES_USED_UP = "retries used up"
    LOSSES_USED_UP = "losses used up"
    REPORTED_FATAL = "reported fatal"


TRANSITIONS: Mapping[tuple[TaskState, TaskEvent], TaskState] = MappingProxyType(
    {
        (TaskState.TODO, TaskEvent.HANDED_OUT): TaskState.DOING,
        (TaskState.TODO, TaskEvent.TRAINING_STOPPED): TaskState.DROPPED,
        (TaskState.TODO, TaskEvent.FUNCTIONS_CANCELLED): TaskState.DROPPED,
        (TaskState.DOING, TaskEvent.REPORTED_DONE): TaskState.DONE,
        (TaskState.DOING, TaskEvent.ANSWER_LOST): TaskState.TODO,
        (TaskState.DOING, TaskEvent.WORKER_LOST): TaskState.TODO,
        (TaskState.DOING, TaskEvent.HANDED_BACK): TaskState.TODO,
        (TaskState.DOING, TaskEvent.SPLIT_OFF): TaskState.DOING,
        (TaskState.DOING, TaskEvent.LEASE_OVER): TaskState.TODO,
        (TaskState.DOING, TaskEvent.REPORTED_FAILED): TaskState.TODO,
        (TaskState.DOING, TaskEvent.NOTHING_LEFT): TaskState.DONE,
        (TaskState.DOING, TaskEvent.RETRIES_USED_UP): TaskState.FAILED,
        (TaskState.DOING, TaskEvent.LOSSES_USED_UP): TaskState.FAILED,
        (TaskState.DOING, TaskEvent.REPORTED_FATAL): TaskState.FAILED,
        (TaskState.DONE, TaskEvent.RESULTS_LOST): TaskState.TODO,
    }
)


@dataclass(frozen=True, slots=True)
class Task:
    """A unit of work. `shard` is the remaining part; the id stays the same when it is handed out again."""

    id: int
    type: TaskType
    shard: Shard
    epoch: int = 0  # 0-based; TRAINING only
    evaluation_round: int = 0  # EVALUATION only
    function: int = 0  # FUNCTION only; id of the call

    def to_list(self) -> list[Any]:
        """A part of a training task as JSON values, for `training_part`."""
        return [self.id, self.epoch, self.shard.name, self.shard.start, self.shard.end]

    def __str__(self) -> str:
        if self.type is TaskType.TRAIN_END:
            return f"task {self.id} (TRAIN_END)"
        if self.type is TaskType.FUNCTION:
            return f"task {self.id} (FUNCTION {self.function})"
        of = {
            TaskType.TRAINING: f", epoch {self.epoch}",
            TaskType.EVALUATION: f", pass {self.evaluation_round}",
        }
        return f"task {self.id} ({self.type.value} of {self.shard}{of.get(self.type, '')})"


def training_part(task_id: int, epoch: int, name: str, start: int, end: int) -> Task:
    """What `Task.to_list` has saved."""
    return Task(task_id, TaskType.TRAINING, Shard(name, start, end), epoch)


@dataclass(frozen=True, slots=True)
class Lease:
    """The right of one worker to run one task."""

    id: int
    task: Task
    worker: int


@dataclass(frozen=True, slots=True)
class BatchesLeft:
    """What remains to be reported of a leased task."""

    lease: int
    type: TaskType
    records: int  # of the task
    reported: int  # of these
    batch: int  # records per batch

    @property
    def batches(self) -> int:
        """Batches not reported yet."""
        return -(-(self.records - self.reported) // self.batch)
