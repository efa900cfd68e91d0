"""What a task is: its type, its shard, its lease, and the states that it goes through.

These are values; the story of one task, which grows, is the `TaskRecord` in task_record.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

from elasticcb.master.shards import Shard


class TaskType(str, Enum):
    """What a task asks a worker to do."""

    TRAINING = "TRAINING"
    EVALUATION = "EVALUATION"
    PREDICTION = "PREDICTION"
    TRAIN_END = "TRAIN_END"
    FUNCTION = "FUNCTION"


# A running evaluation round holds up a snapshot on the servers, so its tasks come first. TRAIN_END is
# handed out only when no other task is left or running. A job of functions has no others.
HANDING_OUT_ORDER = (
    TaskType.EVALUATION,
    TaskType.TRAINING,
    TaskType.PREDICTION,
    TaskType.FUNCTION,
    TaskType.TRAIN_END,
)

# Types whose finished records need not be done again when another worker takes the task over. The
# metric states of half an evaluation task die with its worker, so such a task starts at its beginning.
RESUMABLE = frozenset({TaskType.TRAINING, TaskType.PREDICTION})


class TaskState(str, Enum):
    """Where a task stands."""

    TODO = "TODO"
    DOING = "DOING"
    DONE = "DONE"
    FAILED = "FAILED"
    DROPPED = "DROPPED"


class TaskEvent(str, Enum):
    """What moves a task from one state to the next."""

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
    """A piece of work. `shard` is what is left of it; the id stays when it is handed out again."""

    id: int
    type: TaskType
    shard: Shard
    epoch: int = 0  # 0-based; TRAINING only
    evaluation_round: int = 0  # EVALUATION only
    function: int = 0  # FUNCTION only; names what to call

    def __str__(self) -> str:
        if self.type is TaskType.TRAIN_END:
            return f"task {self.id} (TRAIN_END)"
        if self.type is TaskType.FUNCTION:
            return f"task {self.id} (FUNCTION {self.function})"
        of = {
            TaskType.TRAINING: f", epoch {self.epoch}",
            TaskType.EVALUATION: f", round {self.evaluation_round}",
        }
        return f"task {self.id} ({self.type.value} of {self.shard}{of.get(self.type, '')})"


@dataclass(frozen=True, slots=True)
class Lease:
    """The right of one worker to run one task."""

    id: int
    task: Task
    worker: int


@dataclass(frozen=True, slots=True)
class BatchesLeft:
    """What is left to report of a leased task."""

    lease: int
    type: TaskType
    records: int  # of the task
    reported: int  # of these
    batch: int  # records of one

    @property
    def batches(self) -> int:
        """That are not reported yet."""
        return -(-(self.records - self.reported) // self.batch)
