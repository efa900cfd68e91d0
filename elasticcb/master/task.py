"""What a task is: its type, its shard, the states it goes through, and how shards are cut from sources."""

from __future__ import annotations

import random
from array import array
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from types import MappingProxyType

from elasticcb.errors import ElasticCBError, JobFailedError, UsageError


class TaskType(str, Enum):
    """What a task asks a worker to do."""

    TRAINING = "TRAINING"
    EVALUATION = "EVALUATION"
    PREDICTION = "PREDICTION"
    TRAIN_END = "TRAIN_END"


# A running evaluation round holds up a snapshot on the servers, so its tasks come first. TRAIN_END is
# handed out only when no other task is left or running.
HANDING_OUT_ORDER = (TaskType.EVALUATION, TaskType.TRAINING, TaskType.PREDICTION, TaskType.TRAIN_END)

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
    REPORTED_DONE = "reported done"
    ANSWER_LOST = "answer lost"
    WORKER_LOST = "worker lost"
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
        (TaskState.DOING, TaskEvent.REPORTED_DONE): TaskState.DONE,
        (TaskState.DOING, TaskEvent.ANSWER_LOST): TaskState.TODO,
        (TaskState.DOING, TaskEvent.WORKER_LOST): TaskState.TODO,
        (TaskState.DOING, TaskEvent.LEASE_OVER): TaskState.TODO,
        (TaskState.DOING, TaskEvent.REPORTED_FAILED): TaskState.TODO,
        (TaskState.DOING, TaskEvent.NOTHING_LEFT): TaskState.DONE,
        (TaskState.DOING, TaskEvent.RETRIES_USED_UP): TaskState.FAILED,
        (TaskState.DOING, TaskEvent.LOSSES_USED_UP): TaskState.FAILED,
        (TaskState.DOING, TaskEvent.REPORTED_FATAL): TaskState.FAILED,
    }
)


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


@dataclass(frozen=True, slots=True)
class Task:
    """A piece of work. `shard` is what is left of it; the id stays when it is handed out again."""

    id: int
    type: TaskType
    shard: Shard
    epoch: int = 0  # 0-based; TRAINING only
    evaluation_round: int = 0  # EVALUATION only

    def __str__(self) -> str:
        if self.type is TaskType.TRAIN_END:
            return f"task {self.id} (TRAIN_END)"
        of = {
            TaskType.TRAINING: f", epoch {self.epoch}",
            TaskType.EVALUATION: f", round {self.evaluation_round}",
        }
        return f"task {self.id} ({self.type.value} of {self.shard}{of.get(self.type, '')})"


@dataclass(frozen=True, slots=True)
class Lease:
    """The right of one worker to run one task, until `deadline` (seconds) unless it makes progress."""

    id: int
    task: Task
    worker: int
    deadline: float


@dataclass(frozen=True, slots=True)
class Attempt:
    """One try of a task that ended otherwise than well."""

    worker: int
    shard: Shard  # what this try was to do
    event: TaskEvent
    error: str = ""
    traceback: str = ""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why the job can't go on, with the whole story of the task that ended it."""

    task: Task
    event: TaskEvent
    worker: int
    error: str
    traceback: str
    attempts: tuple[Attempt, ...]

    @property
    def shard(self) -> Shard:
        return self.task.shard

    def __str__(self) -> str:
        if self.task.type is TaskType.TRAIN_END:
            what = "The TRAIN_END task"
        else:
            what = (
                f"{self.task.type.value} task {self.task.id}, records [{self.shard.start}, {self.shard.end}) "
                f"of {self.shard.name!r},"
            )
        lines = [f"{what} failed on worker {self.worker}: {self.error} ({_GIVEN_UP[self.event]})"]
        if len(self.attempts) > 1:
            lines.append(f"It was tried {len(self.attempts)} times:")
            for number, attempt in enumerate(self.attempts, 1):
                error = f": {attempt.error}" if attempt.error else ""
                lines.append(
                    f"  {number}. worker {attempt.worker}, records [{attempt.shard.start}, "
                    f"{attempt.shard.end}): {attempt.event.value}{error}"
                )
        return "\n".join(lines)

    def to_error(self) -> JobFailedError:
        """The error to end the job with."""
        return JobFailedError(str(self), self.traceback)


_GIVEN_UP = {
    TaskEvent.RETRIES_USED_UP: "its retries are used up; --max_task_retries allows more",
    TaskEvent.LOSSES_USED_UP: "it took too many workers down with it; look into their logs",
    TaskEvent.REPORTED_FATAL: "the worker says that trying again can't help",
}


class IllegalTransitionError(ElasticCBError):
    """The task queue was about to move a task in a way that is not in `TRANSITIONS`: a defect."""


class TaskRecord:
    """A task that is TODO again or DOING, with its story. Tasks that are closed are only counted."""

    __slots__ = (
        "attempts",
        "failures",
        "heard",
        "lease",
        "losses",
        "maybe_trained",
        "reported",
        "state",
        "task",
    )

    def __init__(self, task: Task) -> None:
        self.task = task
        self.state = TaskState.TODO
        self.lease: Lease | None = None
        self.reported = 0  # records of the leased shard
        self.heard = False  # the worker spoke of the lease, so it knows of it
        self.failures = 0
        self.losses = 0  # since there was progress
        self.maybe_trained = False  # a worker that is gone may have done records that it did not report
        self.attempts: list[Attempt] = []

    def move(self, event: TaskEvent) -> None:
        """Raises `IllegalTransitionError` when the table has no such transition."""
        following = TRANSITIONS.get((self.state, event))
        if following is None:
            raise IllegalTransitionError(
                f"{self.task} is {self.state.value} and can't be {event.value!r}. Its attempts: "
                f"{self.attempts}. This is a defect of elasticcb; please report it."
            )
        self.state = following

    def shorten(self) -> None:
        """Leaves in the task what was not reported."""
        if self.task.type in RESUMABLE and self.reported:
            shard = self.task.shard
            self.task = replace(self.task, shard=Shard(shard.name, shard.start + self.reported, shard.end))
        self.reported = 0


@dataclass
class Accounting:
    """Numbers for the job's summary; a record counts as trained when a worker reported it."""

    records_trained: dict[int, int] = field(default_factory=dict)  # by epoch; each record once
    records_dropped: dict[int, int] = field(default_factory=dict)  # by epoch; left out by stop_training
    records_handed_out_again: int = 0  # TRAINING; so many at most were trained more than once
    batches_handed_out: int = 0  # TRAINING; a range that is handed out again counts once
    tasks_retried: int = 0  # times that a task went back because its worker reported a failure
    tasks_taken_over: int = 0  # times that a task went back because its worker was lost or hung
    answers_lost: int = 0  # times that a task went back because its worker never learned of it
    reports_refused: int = 0


class ShardLayout:
    """The shards of some sources: each source is cut into ranges of `records_per_task` records.

    Args:
        sources: (name, number of records) of each; empty ones are passed over.
        records_per_task: size of a range; the last one of a source may be shorter.
        minibatch_size: records of a batch; a range ends with a short batch rather than borrow.

    Raises `UsageError` for negative numbers of records.
    """

    def __init__(self, sources: Sequence[tuple[str, int]], records_per_task: int, minibatch_size: int) -> None:
        if records_per_task < 1 or minibatch_size < 1:
            raise UsageError(
                f"Tasks of {records_per_task} records in batches of {minibatch_size} were asked for; both "
                "must be at least 1. Set --minibatch_size and --num_minibatches_per_task."
            )
        for name, count in sources:
            if count < 0:
                raise UsageError(f"Source {name!r} is said to have {count} records; expected 0 or more.")
        self.records_per_task = records_per_task
        self.sources = [(name, count) for name, count in sources if count]
        self.records = sum(count for _, count in self.sources)
        self.batches = 0
        self._first: list[int] = []  # index of the first range of each source
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

    A Fisher-Yates shuffle that goes one step per draw: beginning costs 4 bytes a shard, drawing O(1).
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
