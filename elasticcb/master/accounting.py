"""Task counters of the job's summary; and the history of one task: its state, its attempts and their results, and why
it ended the job.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

from elasticcb.errors import ElasticCBError, JobFailedError
from elasticcb.master.shards import Shard
from elasticcb.master.task import RESUMABLE, TRANSITIONS, Lease, Task, TaskEvent, TaskState, TaskType

_BY_EPOCH = ("records_trained", "records_dropped")
_MOST_EPOCHS = 1000  # that are counted by themselves


@dataclass
class Accounting:
    """Counters for the job's summary. A record counts as trained once a worker has reported it."""

    records_trained: dict[int, int] = field(default_factory=dict)  # by epoch; each record counted once
    records_dropped: dict[int, int] = field(default_factory=dict)  # by epoch; skipped because of stop_training
    records_evaluated: int = 0  # over all rounds
    records_predicted: int = 0
    records_repeated: int = 0  # upper bound of records trained or predicted more than once
    records_given_up: int = 0  # trained since the servers could last save; not trained again if one is lost
    batches_handed_out: int = 0  # TRAINING only; a range that is handed out again counts once
    tasks_retried: int = 0  # times a task was requeued because its worker reported a failure
    tasks_taken_over: int = 0  # times a task was requeued because its worker was lost, hung, or asked to stop
    tasks_split: int = 0  # times a worker handed the rest of its task to an idle worker
    answers_lost: int = 0  # times a task was requeued because the answer that assigned it was lost
    reports_refused: int = 0

    def count_records(self, task: Task, records: int) -> None:
        """`records` more records of the task were reported."""
        if task.type is TaskType.TRAINING and records:
            self.records_trained[task.epoch] = self.records_trained.get(task.epoch, 0) + records
            if len(self.records_trained) > _MOST_EPOCHS:
                self._fold()
        elif task.type is TaskType.EVALUATION:
            self.records_evaluated += records
        elif task.type is TaskType.PREDICTION:
            self.records_predicted += records

    def _fold(self) -> None:
        """Adds the older half of the epochs up, as the first of them: a stream has epochs without end."""
        epochs = sorted(self.records_trained)
        older = epochs[: len(epochs) // 2]
        self.records_trained[older[0]] = sum(map(self.records_trained.pop, older))

    def count_again(self, task: Task) -> None:
        """The task is handed out again; some of its records may already have been processed."""
        self.records_repeated += task.shard.records

    def count_dropped(self, epoch: int, records: int) -> None:
        if records:
            self.records_dropped[epoch] = self.records_dropped.get(epoch, 0) + records

    def copy(self, **changes: Any) -> Accounting:
        """A deep copy; `changes` replaces counters by name."""
        by_epoch = {name: dict(getattr(self, name)) for name in _BY_EPOCH}
        return replace(self, **{**by_epoch, **changes})

    def to_dict(self) -> dict[str, Any]:
        """JSON values with string keys."""
        saved = {item.name: getattr(self, item.name) for item in fields(self)}
        for name in _BY_EPOCH:
            saved[name] = {str(epoch): count for epoch, count in saved[name].items()}
        return saved

    @classmethod
    def from_dict(cls, saved: dict[str, Any]) -> Accounting:
        by_epoch = {name: {int(epoch): count for epoch, count in saved[name].items()} for name in _BY_EPOCH}
        return cls(**{**saved, **by_epoch})


@dataclass(frozen=True, slots=True)
class Attempt:
    """A failed or interrupted attempt at a task."""

    worker: int
    shard: Shard  # what this attempt was to process
    event: TaskEvent
    error: str = ""
    traceback: str = ""

    def to_list(self) -> list[Any]:
        """JSON values."""
        return [
            self.worker,
            self.shard.name,
            self.shard.start,
            self.shard.end,
            self.event.value,
            self.error,
            self.traceback,
        ]

    @classmethod
    def from_list(cls, saved: list[Any]) -> Attempt:
        worker, name, start, end, event, error, traceback = saved
        return cls(worker, Shard(name, start, end), TaskEvent(event), error, traceback)


@dataclass(frozen=True, slots=True)
class Failure:
    """Why the job can't continue, with the history of the task that ended it."""

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
        if self.task.type in (TaskType.TRAIN_END, TaskType.FUNCTION):
            what = f"The {self.task.type.value} task"
        else:
            what = (
                f"{self.task.type.value} task {self.task.id}, [{self.shard.start}, {self.shard.end}) "
                f"of {self.shard.name!r},"
            )
        never_retried = self.event is TaskEvent.RETRIES_USED_UP and len(self.attempts) == 1  # as requested
        why = "" if never_retried else f" ({_GIVEN_UP[self.event]})"
        lines = [f"{what} failed on worker {self.worker}: {self.error}{why}"]
        if len(self.attempts) > 1:
            lines.append(f"It was tried {len(self.attempts)} times{self._by_whom}")
        return "\n".join(lines)

    @property
    def _by_whom(self) -> str:
        """Which workers tried it, and the result of each attempt unless all were the same."""
        workers = ", ".join(map(str, sorted({attempt.worker for attempt in self.attempts})))
        if {attempt.error for attempt in self.attempts} == {self.error}:
            return f", by workers {workers}, and failed the same way each time."
        lines = [":"]
        for number, attempt in enumerate(self.attempts, 1):
            error = "" if not attempt.error else f": {attempt.error}" if attempt.error != self.error else ": as above"
            lines.append(
                f"  {number}. worker {attempt.worker}, [{attempt.shard.start}, {attempt.shard.end}): "
                f"{attempt.event.value}{error}"
            )
        return "\n".join(lines)

    def to_error(self, where: str) -> JobFailedError:
        """The error that ends the job; `where` says where the worker ran."""
        return JobFailedError(f"{self}\n{where}", self.traceback)


_GIVEN_UP = {
    TaskEvent.RETRIES_USED_UP: "its retries are used up; raise max_task_retries to allow more",
    TaskEvent.LOSSES_USED_UP: "too many workers died while running it; see their logs",
    TaskEvent.REPORTED_FATAL: "the worker reported that retrying can't help",
}


class IllegalTransitionError(ElasticCBError):
    """A transition of a task that is not in `TRANSITIONS`: a bug."""


@dataclass(eq=False, slots=True)
class TaskRecord:
    """A task that is TODO again or DOING, with its history. Closed tasks are only counted.

    Attributes:
        reported: records reported of the leased shard.
        stale_from: from this record of the shard on, what is reported may be lost: a server was, after the lease was
            granted.
        heard: the worker has reported on the lease, so it knows of it.
        losses: since the last progress.
        maybe_done: a lost worker may have processed records without reporting them.
        for_idle: only worth giving to an idle worker.
    """

    task: Task
    state: TaskState = TaskState.TODO
    lease: Lease | None = None
    reported: int = 0
    stale_from: int | None = None
    heard: bool = False
    failures: int = 0
    losses: int = 0
    maybe_done: bool = False
    for_idle: bool = False
    attempts: list[Attempt] = field(default_factory=list)

    def move(self, event: TaskEvent) -> None:
        """Raises `IllegalTransitionError` when the table has no such transition."""
        following = TRANSITIONS.get((self.state, event))
        if following is None:
            raise IllegalTransitionError(
                f"{self.task} is {self.state.value} and does not allow {event.value!r}. Its attempts: "
                f"{self.attempts}. This is a bug in elasticcb; please report it."
            )
        self.state = following

    def shorten(self) -> None:
        """Keeps only the unreported part."""
        if self.task.type in RESUMABLE and self.reported:
            self.task = self.part(self.reported, self.task.shard.records)
        self.reported = 0

    def part(self, start: int, end: int) -> Task:
        """The task with only these records of its shard."""
        shard = self.task.shard
        return replace(self.task, shard=Shard(shard.name, shard.start + start, shard.start + end))

    def stale_part(self, done: int) -> Task | None:
        """Of the first `done` records of the shard, those that a lost server may lack; None: none."""
        return None if self.stale_from is None or done <= self.stale_from else self.part(self.stale_from, done)

    def cut(self, end: int, task_id: int) -> Task:
        """Keeps only the first `end` records; returns a task for the rest."""
        rest = replace(self.part(end, self.task.shard.records), id=task_id)
        self.task = self.part(0, end)
        if self.lease is not None:
            self.lease = replace(self.lease, task=self.task)
        return rest

    @property
    def failed_on(self) -> int | None:
        """The worker that has reported the failure of the last attempt; None: that did not end so."""
        last = self.attempts[-1] if self.attempts else None
        return last.worker if last is not None and last.event is TaskEvent.REPORTED_FAILED else None

    @property
    def nothing_left(self) -> bool:
        """Whether all records were reported, so that nothing is left for another worker."""
        return self.task.type in RESUMABLE and self.reported == self.task.shard.records

    def to_dict(self) -> dict[str, Any]:
        """Remaining work and history as JSON values, as if no lease were active."""
        shard = self.task.shard
        done = self.reported if self.task.type in RESUMABLE else 0
        # The weights are saved slightly before or after the queue, so they may include what a worker is processing now.
        in_hand = self.task.type is TaskType.TRAINING and self.state is TaskState.DOING
        return {
            "id": self.task.id,
            "type": self.task.type.value,
            "shard": [shard.name, shard.start + done, shard.end],
            "epoch": self.task.epoch,
            "failures": self.failures,
            "losses": self.losses,
            "maybe_trained": self.maybe_done or in_hand,
            "attempts": [attempt.to_list() for attempt in self.attempts],
        }

    def progress_to_list(self) -> list[Any]:
        """What `resume` needs besides `to_dict` to continue a lease, as JSON values; the task's id first."""
        shard = self.task.shard
        return [self.task.id, shard.start, self.reported, self.heard, self.maybe_done, self.stale_from]

    def resume(self, start: int, reported: int, heard: bool, maybe_done: bool, stale_from: int | None) -> None:
        """Turns this record, made by `from_dict`, into that of a task whose worker continues it."""
        self.task = replace(self.task, shard=replace(self.task.shard, start=start))
        self.reported, self.heard, self.maybe_done, self.stale_from = reported, heard, maybe_done, stale_from
        self.move(TaskEvent.HANDED_OUT)

    @classmethod
    def from_dict(cls, saved: dict[str, Any]) -> TaskRecord:
        """The record saved by `to_dict`, TODO."""
        return cls(
            Task(saved["id"], TaskType(saved["type"]), Shard(*saved["shard"]), epoch=saved["epoch"]),
            failures=saved["failures"],
            losses=saved["losses"],
            maybe_done=saved["maybe_trained"],
            attempts=[Attempt.from_list(values) for values in saved["attempts"]],
        )
