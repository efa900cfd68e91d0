"""What a task is: its type, its shard, its lease, and its states; the settings of a task queue, and its answers:
decisions with their reasons, and the milestones of a job.

These are immutable values; the history of a task is its `TaskRecord` in accounting.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from elasticcb.errors import UsageError
from elasticcb.master.shards import Shard, ShardLayout

if TYPE_CHECKING:
    from elasticcb.model.metric_messages import Outputs, States


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
        (TaskState.TODO, TaskEvent.NOTHING_LEFT): TaskState.DONE,
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
    failures: int = 0  # reported ones of the task, before


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


@dataclass(frozen=True)
class QueueSettings:
    """Settings of a task queue.

    Attributes:
        records_per_task: records per task; fewer at the end of a source.
        minibatch_size: records per batch, for `max_batches`.
        max_batches: exact number of training batches to hand out, if the sources have that many; 0: no limit. A range
            that is handed out again does not count again.
        shuffle_seed: epoch e is shuffled by `random.Random(f"{shuffle_seed}/{e}")`; None: no shuffling.
        max_retries: how often a task may fail; one more failure fails the job.
        lease_seconds: a worker without progress for this long times out; while it reports computing a batch,
            after twelve times as long.
        hold_epochs: epoch e + 1 begins only after `release_epoch(e)`. Without it, epochs overlap: epoch e + 1 begins
            when all tasks of epoch e are handed out.
        max_losses: how many workers may be lost (or hang) on a task without progress on it; one more fails the job,
            because the task seems to kill them. The oldest lease of a lost worker is charged, because it was running
            that one.
        initial_epoch: earlier epochs count as done.
        open_ended: the number of records of an epoch is unknown: the sources' number is only an upper bound, and an
            epoch ends where a worker reports that the source ended.
        hold_predictions: a worker's predictions are safe only after `results_kept`, or when it leaves in order; if it
            is lost before, its prediction tasks are repeated.
        repeats_lost: training tasks are repeated whose updates a lost server had not saved.
        grows: the records come while the job trains, in epochs of `records_per_epoch` records; 0: these are ended by
            `end_epoch`, or the stream's end.
        event_time: seconds of event time in an epoch of a stream; 0: these don't end it.
        in_order, most: as in `UnboundedSource`.
        skips_lost: records that were removed before they were trained are counted; else they are an error.

    Raises `UsageError` for values out of range.
    """

    records_per_task: int
    minibatch_size: int
    num_epochs: int = 1
    max_batches: int = 0
    shuffle_seed: int | None = 0
    max_retries: int = 3
    lease_seconds: float = 300.0
    hold_epochs: bool = False
    max_losses: int = 10
    initial_epoch: int = 0
    open_ended: bool = False
    hold_predictions: bool = False
    repeats_lost: bool = False
    grows: bool = False
    records_per_epoch: int = 0
    event_time: float = 0.0
    in_order: bool = False
    most: int | None = None
    skips_lost: bool = False

    def __post_init__(self) -> None:
        for name, least in (
            ("num_epochs", 1),
            ("max_batches", 0),
            ("max_retries", 0),
            ("max_losses", 0),
            ("initial_epoch", 0),
        ):
            if getattr(self, name) < least:
                raise UsageError(f"{name}={getattr(self, name)} is invalid: must be at least {least}.")
        if self.lease_seconds <= 0:
            raise UsageError(f"lease_seconds={self.lease_seconds} is invalid: must be more than 0.")

    def layout(self, sources: Sequence[tuple[str, int]]) -> ShardLayout:
        return ShardLayout(sources, self.records_per_task, self.minibatch_size)


class DecisionKind(str, Enum):
    """Kinds of answers to `get_task`."""

    TASK = "TASK"  # a task
    WAIT = "WAIT"  # none now; maybe later
    FINISHED = "FINISHED"  # none, ever again


@dataclass(frozen=True, slots=True)
class TaskDecision:
    """The answer to `get_task`; `lease` is set when `kind` is TASK."""

    kind: DecisionKind
    lease: Lease | None
    reason: str


@dataclass(frozen=True, slots=True)
class Answer:
    """Whether a worker may continue its lease, and why (not).

    With `long_batch`, the reason is to be shown to the user as a warning about the worker.
    """

    accepted: bool
    reason: str
    long_batch: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a report. `task` is the reported task; None when the report was refused.

    A `duplicate` repeats an accepted report and has no effect: don't count its metrics.
    """

    accepted: bool
    reason: str
    task: Task | None = None
    duplicate: bool = False
    ends_pass: bool = False  # a milestone was reached

    @property
    def counts(self) -> bool:
        """Whether the reported results count."""
        return self.accepted and not self.duplicate and self.task is not None


@dataclass(frozen=True)
class TaskResult:
    """A worker's report of a finished task.

    Attributes:
        outputs: by batch: predictions, or inputs of metrics without mergeable state.
        ended_after: number of records after which the source ended; None: it did not.
        servers: `JobMachine.newest_server` when the first batch began that was not reported before.
        bad_records, bad_record: number of records that were skipped, and what is wrong with the first one.
        restarts: `states` and `outputs` replace those of earlier tasks of the epoch or pass.
    """

    version: int
    states: States = field(default_factory=dict)
    outputs: list[Outputs] = field(default_factory=list)
    batches_skipped: int = 0
    bad_records: int = 0
    bad_record: str = ""
    ended_after: int | None = None
    function_result: bytes = b""
    servers: int = 0
    restarts: bool = False


class MilestoneKind(str, Enum):
    """Kinds of milestones."""

    EPOCH_DONE = "EPOCH_DONE"  # `number` is the epoch; in rising order
    TRAINING_DONE = "TRAINING_DONE"  # after the last EPOCH_DONE
    ROUND_DONE = "ROUND_DONE"  # `number` is the evaluation pass
    PREDICTION_DONE = "PREDICTION_DONE"
    TRAIN_END_DONE = "TRAIN_END_DONE"


@dataclass(frozen=True, slots=True)
class Milestone:
    """A one-time event that the master acts on."""

    kind: MilestoneKind
    number: int = 0
