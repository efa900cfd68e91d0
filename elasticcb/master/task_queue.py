"""The tasks of a job, as a pure state machine: events in, decisions with their reasons out.

No threads, no clock (`now` is an argument, in seconds), no gRPC, no Keras. The states and what moves a
task between them are the table `TRANSITIONS` in task.py; docs/tasks.md explains them.

Tasks are cut from the sources when they are handed out, so a queue of a million tasks holds little more
than a shuffled index of four bytes a task. What a call brings about beyond its answer (an epoch is done,
a round is done) is a `Milestone`, which the caller fetches with `take_milestones`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields, replace
from enum import Enum
from typing import Any

from elasticcb.errors import CheckpointError, UsageError, WireError
from elasticcb.master.task import (
    HANDING_OUT_ORDER,
    RESUMABLE,
    Accounting,
    Attempt,
    Failure,
    Lease,
    Shard,
    ShardLayout,
    ShardOrder,
    Task,
    TaskEvent,
    TaskRecord,
    TaskState,
    TaskType,
)

# Closed leases that are remembered per worker, to recognize a report whose answer got lost. A worker
# holds two leases or so, and repeats a report before it goes on.
_REMEMBERED = 16

# Added to lease numbers when a queue is restored, so that no lease handed out between the save and the
# crash is ever mistaken for a new one.
_LEASES_PER_LIFE = 1 << 32

_FORMAT = 1


class DecisionKind(str, Enum):
    """The answers to `get_task`."""

    TASK = "TASK"  # here is one
    WAIT = "WAIT"  # none now; there may be one later
    FINISHED = "FINISHED"  # there will never be one again


@dataclass(frozen=True, slots=True)
class Decision:
    """The answer to `get_task`; `lease` is set when `kind` is TASK."""

    kind: DecisionKind
    lease: Lease | None
    reason: str


@dataclass(frozen=True, slots=True)
class Answer:
    """Whether a worker may go on with its lease, and why (not)."""

    accepted: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a report. `task` is the task reported on, None when the report was refused.

    A `duplicate` repeats a report that was accepted before, and has no effect: don't count its metrics.
    """

    accepted: bool
    reason: str
    task: Task | None = None
    duplicate: bool = False


class MilestoneKind(str, Enum):
    """What a queue can have reached."""

    EPOCH_DONE = "EPOCH_DONE"  # `number` is the epoch; in rising order
    TRAINING_DONE = "TRAINING_DONE"  # after the last EPOCH_DONE
    ROUND_DONE = "ROUND_DONE"  # `number` is the evaluation round
    PREDICTION_DONE = "PREDICTION_DONE"
    TRAIN_END_DONE = "TRAIN_END_DONE"


@dataclass(frozen=True, slots=True)
class Milestone:
    """Something that happens once and that the master acts on."""

    kind: MilestoneKind
    number: int = 0


class TaskQueue:
    """Hands out tasks, takes reports, and hands out again what was not finished.

    Args:
        training: (name, number of records) of each training source.
        prediction: likewise; prediction tasks are handed out in order.
        records_per_task: records of a task; fewer at the end of a source.
        minibatch_size: records of a batch, to count `max_batches` by.
        num_epochs: passes over the training sources.
        max_batches: training batches to hand out in all, exactly, if the sources have that many; 0 is
            no limit. A range that is handed out again does not count again.
        shuffle_seed: epoch e is in the order of `random.Random(f"{shuffle_seed}/{e}")`.
        max_retries: a task may be reported failed so many times; one more fails the job.
        lease_seconds: a worker without progress for so long loses its leases.
        hold_epochs: epoch e + 1 begins only after `release_epoch(e)`. Without it, epochs overlap: when
            nothing of epoch e is left to hand out, epoch e + 1 begins.
        max_losses: so many workers may be lost (or hang) on a task without any progress on it; one more
            fails the job, for the task seems to kill them. Of a worker's leases the oldest is charged,
            for that is the one it was running.

    Raises `UsageError` for numbers out of range.
    """

    def __init__(
        self,
        *,
        training: Sequence[tuple[str, int]] = (),
        prediction: Sequence[tuple[str, int]] = (),
        records_per_task: int,
        minibatch_size: int,
        num_epochs: int = 1,
        max_batches: int = 0,
        shuffle_seed: int = 0,
        max_retries: int = 3,
        lease_seconds: float = 300.0,
        hold_epochs: bool = False,
        max_losses: int = 10,
    ) -> None:
        self._settings: dict[str, Any] = {
            "records_per_task": records_per_task,
            "minibatch_size": minibatch_size,
            "num_epochs": num_epochs,
            "max_batches": max_batches,
            "shuffle_seed": shuffle_seed,
            "max_retries": max_retries,
            "lease_seconds": lease_seconds,
            "hold_epochs": hold_epochs,
            "max_losses": max_losses,
        }
        for name, least in (("num_epochs", 1), ("max_batches", 0), ("max_retries", 0), ("max_losses", 0)):
            if self._settings[name] < least:
                raise UsageError(f"{name} is {self._settings[name]}; expected at least {least}.")
        if lease_seconds <= 0:
            raise UsageError(f"lease_seconds is {lease_seconds}; expected more than 0 seconds.")
        self._minibatch_size = minibatch_size
        self._num_epochs = num_epochs
        self._max_batches = max_batches
        self._shuffle_seed = shuffle_seed
        self._max_retries = max_retries
        self._max_losses = max_losses
        self._lease_seconds = lease_seconds
        self._hold_epochs = hold_epochs

        self._layout = ShardLayout(training, records_per_task, minibatch_size)
        self._epoch = -1  # the one that tasks are being made of
        self._order = ShardOrder(ShardLayout((), 1, 1))  # what is left of it
        self._open: dict[int, int] = {}  # epoch -> tasks that are TODO or DOING
        self._epochs_done = 0
        self._released = -1  # newest epoch that was released
        self._training_done = not self._layout
        self._stop_reason: str | None = None

        self._prediction_layout = ShardLayout(prediction, records_per_task, minibatch_size)
        self._prediction = ShardOrder(self._prediction_layout)
        self._prediction_left = len(self._prediction_layout)

        self._evaluations: deque[tuple[int, ShardOrder]] = deque()  # rounds with tasks to make
        self._rounds: dict[int, int] = {}  # round -> tasks that are not done

        self._train_end_added = False
        self._finishing = False
        self._failure: Failure | None = None

        self._next_task = 1
        self._next_lease = 1
        self._now = float("-inf")  # of the newest event that told the time
        self._again: dict[TaskType, deque[TaskRecord]] = {kind: deque() for kind in TaskType}
        self._doing: dict[int, TaskRecord] = {}  # by lease
        self._held: dict[int, dict[int, TaskRecord]] = {}  # worker -> by lease, oldest first
        self._progress_at: dict[int, float] = {}  # by worker
        self._closed: dict[int, deque[tuple[int, bool, Task]]] = {}  # worker -> (lease, done?, task)
        self._lost: set[int] = set()
        self._counts = {kind: dict.fromkeys(TaskState, 0) for kind in TaskType}  # closed states only
        self._accounting = Accounting()
        self._milestones: list[Milestone] = []
        self._makers: dict[TaskType, Callable[[], Task | None]] = {
            TaskType.EVALUATION: self._make_evaluation,
            TaskType.TRAINING: self._make_training,
            TaskType.PREDICTION: self._make_prediction,
            TaskType.TRAIN_END: lambda: None,
        }
        if training and not self._layout:
            self._reach(MilestoneKind.TRAINING_DONE)
        if prediction and not self._prediction_layout:
            self._reach(MilestoneKind.PREDICTION_DONE)

    # ------------------------------------------------------------ what workers say

    def get_task(self, worker: int, now: float, held: Collection[int] | None = None) -> Decision:
        """The next task for `worker`, if there is one.

        Args:
            held: the leases that the worker knows to have. A lease of it that is not among them and that
                it never reported on is put back: the answer that carried it got lost. A worker must
                name a lease until its last report on it was answered. None: it did not say.
        """
        self._now = max(self._now, now)
        if self._failure is not None:
            return Decision(DecisionKind.FINISHED, None, "the job has failed")
        if worker in self._lost:
            return Decision(DecisionKind.FINISHED, None, f"worker {worker} was given up as lost")
        if held is not None and worker in self._held:
            self._put_back_unanswered(worker, held)
        record = self._next_record()
        if record is None:
            return self._nothing()
        return self._hand_out(record, worker)

    def report_progress(
        self, worker: int, lease_id: int, records_done: int, now: float, progressed: bool = False
    ) -> Answer:
        """`worker` has done the first `records_done` records of the leased shard.

        More records than before keep all leases of the worker alive; the same number does not, for a
        worker that hangs may still send it, unless it says that it has `progressed`: where records are
        shuffled it can't tell which ones are done. A task without records is kept alive by any report.

        Raises `WireError` when the shard has fewer records than that.
        """
        self._now = max(self._now, now)
        record = self._held.get(worker, {}).get(lease_id)
        if record is None:
            self._accounting.reports_refused += 1
            return Answer(False, self._why_refused(worker, lease_id))
        record.heard = True
        task = record.task
        if not 0 <= records_done <= task.shard.records:
            raise WireError(
                f"Worker {worker} reported {records_done} records of {task} as done, which has "
                f"{task.shard.records}. This is a defect of the worker; please report it."
            )
        gained = records_done - record.reported
        if gained <= 0 and task.shard.records and not progressed:
            return Answer(True, "no progress since the last report")
        self._progress_at[worker] = self._now
        record.reported = max(record.reported, records_done)
        if task.type in RESUMABLE and gained > 0:
            record.losses = 0
            self._count_trained(task, gained)
        return Answer(True, "progress")

    def report_done(self, worker: int, lease_id: int) -> Outcome:
        """`worker` has finished the task. Sending it again is accepted, as a duplicate."""
        record = self._held.get(worker, {}).get(lease_id)
        if record is None:
            return self._report_without_lease(worker, lease_id, done=True)
        task = record.task
        counted = record.reported if task.type in RESUMABLE else 0
        self._release(record, done=True)
        self._count_trained(task, task.shard.records - counted)
        self._close(record, TaskEvent.REPORTED_DONE)
        return Outcome(True, f"{task} is done", task)

    def report_failed(self, worker: int, lease_id: int, error: str, traceback: str, fatal: bool = False) -> Outcome:
        """`worker` could not finish the task. `fatal`: trying again can't help, the job fails at once."""
        record = self._held.get(worker, {}).get(lease_id)
        if record is None:
            return self._report_without_lease(worker, lease_id, done=False)
        task = record.task
        record.failures += 1
        if fatal:
            event = TaskEvent.REPORTED_FATAL
        elif record.failures > self._max_retries:
            event = TaskEvent.RETRIES_USED_UP
        else:
            event = TaskEvent.REPORTED_FAILED
        self._release(record, done=False)
        event = self._take_back(record, worker, event, error, traceback)
        if event is TaskEvent.NOTHING_LEFT:
            return Outcome(True, f"{task} failed after its last record ({error}); nothing is left to do", task)
        if self._failure is not None:
            return Outcome(True, f"{task} failed: {event.value}", task)
        self._accounting.tasks_retried += 1
        return Outcome(True, f"{task} failed {record.failures} of {self._max_retries + 1} times; tried again", task)

    # ------------------------------------------------------------ what the master says

    def worker_lost(self, worker: int) -> list[Task]:
        """Takes back the leases of a worker that is gone for good; answers what is left of its tasks."""
        self._lost.add(worker)
        self._progress_at.pop(worker, None)
        return [task for _, task in self._take_all(worker, TaskEvent.WORKER_LOST)]

    def expire(self, now: float) -> list[Lease]:
        """Takes back the leases of workers that made no progress for `lease_seconds`; answers those."""
        self._now = max(self._now, now)
        hung = [worker for worker in self._held if self._now >= self._progress_at[worker] + self._lease_seconds]
        return [lease for worker in hung for lease, _ in self._take_all(worker, TaskEvent.LEASE_OVER)]

    def add_evaluation(self, round: int, sources: Sequence[tuple[str, int]]) -> int:
        """Adds the tasks of an evaluation round, ahead of all others; answers how many they are.

        Raises `UsageError` when the round was added before and is not done.
        """
        if round in self._rounds:
            raise UsageError(f"Evaluation round {round} is running; a round must have a number of its own.")
        layout = ShardLayout(sources, self._layout.records_per_task, self._minibatch_size)
        if layout:
            self._evaluations.append((round, ShardOrder(layout)))
            self._rounds[round] = len(layout)
        else:
            self._reach(MilestoneKind.ROUND_DONE, round)
        return len(layout)

    def release_epoch(self, epoch: int) -> None:
        """Lets the epoch after `epoch` begin; matters only with `hold_epochs`."""
        self._released = max(self._released, epoch)

    def stop_training(self, reason: str) -> None:
        """No new training task: those that are TODO are dropped, those that are DOING are finished."""
        if self._training_done or self._stop_reason is not None:
            return
        self._stop_reason = reason
        again = self._again[TaskType.TRAINING]
        while again:
            record = again.popleft()
            record.move(TaskEvent.TRAINING_STOPPED)
            self._count_dropped(record.task.epoch, record.task.shard.records)
            self._counts[TaskType.TRAINING][TaskState.DROPPED] += 1
            self._open[record.task.epoch] -= 1
        if self._epoch_goes_on(even_stopped=True):
            self._count_dropped(self._epoch, self._order.records_left)
            self._counts[TaskType.TRAINING][TaskState.DROPPED] += self._order.left
        self._settle_epochs()

    def add_train_end(self) -> None:
        """Adds the job's one TRAIN_END task, which is handed out when nothing else is left or running."""
        if not self._train_end_added:
            self._train_end_added = True
            self._again[TaskType.TRAIN_END].append(TaskRecord(self._new_task(TaskType.TRAIN_END, Shard("", 0, 0))))

    def finish(self) -> None:
        """Nothing will be added any more: once all is done, `get_task` answers FINISHED, not WAIT."""
        self._finishing = True

    def take_milestones(self) -> list[Milestone]:
        """What was reached since the last call, in order. Ask after every other call."""
        milestones, self._milestones = self._milestones, []
        return milestones

    # ------------------------------------------------------------ what it knows

    @property
    def has_milestones(self) -> bool:
        """Whether `take_milestones` would answer any."""
        return bool(self._milestones)

    @property
    def failure(self) -> Failure | None:
        """The task that ended the job, if one did."""
        return self._failure

    @property
    def epoch(self) -> int:
        """The epoch that training tasks are being made of, 0-based."""
        return max(self._epoch, 0)

    @property
    def training_done(self) -> bool:
        """Whether all training tasks that there will ever be are done (or dropped)."""
        return self._training_done

    @property
    def stop_reason(self) -> str | None:
        """Why training was stopped early, None when it was not."""
        return self._stop_reason

    @property
    def records_per_epoch(self) -> int:
        return self._layout.records

    @property
    def accounting(self) -> Accounting:
        """A copy of the numbers up to now."""
        ours = self._accounting
        return replace(ours, records_trained=dict(ours.records_trained), records_dropped=dict(ours.records_dropped))

    @property
    def next_deadline(self) -> float | None:
        """When `expire` has something to do next if nothing happens, in seconds; None: nothing is out."""
        if not self._held:
            return None
        return min(self._progress_at[worker] for worker in self._held) + self._lease_seconds

    def leases(self, worker: int | None = None) -> list[Lease]:
        """The leases that are out, of one worker or of all, oldest first."""
        records = self._doing if worker is None else self._held.get(worker, {})
        return [record.lease for record in records.values() if record.lease is not None]

    def counts(self) -> dict[TaskType, dict[TaskState, int]]:
        """How many tasks are in which state.

        TODO holds the tasks that are still to be made, of all epochs. When `max_batches` will end the
        training early, that part of it is an estimate.
        """
        counts = {kind: dict(states) for kind, states in self._counts.items()}
        for record in self._doing.values():
            counts[record.task.type][TaskState.DOING] += 1
        for kind, again in self._again.items():
            counts[kind][TaskState.TODO] += len(again)
        counts[TaskType.TRAINING][TaskState.TODO] += self._training_to_make()
        counts[TaskType.EVALUATION][TaskState.TODO] += sum(order.left for _, order in self._evaluations)
        counts[TaskType.PREDICTION][TaskState.TODO] += self._prediction.left
        return counts

    # ------------------------------------------------------------ saving

    def to_dict(self) -> dict[str, Any]:
        """All of it as JSON values, for a checkpoint. DOING tasks are saved as TODO, with what is left.

        Evaluation rounds are left out: the metric states of their finished tasks live in the master's
        memory, so after a restart they begin anew.
        """
        again = [
            _record_to_dict(record)
            for records in (self._doing.values(), *self._again.values())
            for record in records
            if record.task.type is not TaskType.EVALUATION
        ]
        accounting = {item.name: getattr(self._accounting, item.name) for item in fields(Accounting)}
        for name in ("records_trained", "records_dropped"):
            accounting[name] = {str(epoch): count for epoch, count in accounting[name].items()}
        return {
            "format": _FORMAT,
            "settings": dict(self._settings),
            "training": [list(source) for source in self._layout.sources],
            "prediction": [list(source) for source in self._prediction_layout.sources],
            "epoch": self._epoch,
            "drawn": self._order.drawn,
            "epochs_done": self._epochs_done,
            "released": self._released,
            "training_done": self._training_done,
            "stop_reason": self._stop_reason,
            "predicted": self._prediction.drawn,
            "train_end_added": self._train_end_added,
            "finishing": self._finishing,
            "next_task": self._next_task,
            "next_lease": self._next_lease,
            "todo": sorted(again, key=lambda saved: int(saved["id"])),
            "closed": {
                kind.value: {state.value: number for state, number in states.items() if number}
                for kind, states in self._counts.items()
                if kind is not TaskType.EVALUATION
            },
            "accounting": accounting,
            "milestones": [
                [milestone.kind.value, milestone.number]
                for milestone in self._milestones
                if milestone.kind is not MilestoneKind.ROUND_DONE
            ],
        }

    @classmethod
    def from_dict(cls, saved: dict[str, Any]) -> TaskQueue:
        """The queue that `to_dict` saved, with no lease out; milestones that were not taken come again.

        Raises `CheckpointError` when `saved` is something else.
        """
        if saved.get("format") != _FORMAT:
            raise CheckpointError(
                f"The task queue in this checkpoint has the format {saved.get('format')!r}; this release "
                f"reads {_FORMAT}. Use the release of elasticcb that wrote it."
            )
        try:
            return cls._restore(saved)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise CheckpointError(
                f"The task queue in this checkpoint can't be read ({type(error).__name__}: {error}). Its "
                "manifest may have been edited; start from another checkpoint."
            ) from error

    @classmethod
    def _restore(cls, saved: dict[str, Any]) -> TaskQueue:
        queue = cls(
            training=[(name, count) for name, count in saved["training"]],
            prediction=[(name, count) for name, count in saved["prediction"]],
            **saved["settings"],
        )
        queue._epoch = saved["epoch"]
        if queue._epoch >= 0:
            queue._order = queue._order_of(queue._epoch)
            for _ in range(saved["drawn"]):
                queue._order.draw()
        for _ in range(saved["predicted"]):
            queue._prediction.draw()
        queue._prediction_left = queue._prediction.left
        queue._epochs_done = saved["epochs_done"]
        queue._released = saved["released"]
        queue._training_done = saved["training_done"]
        queue._stop_reason = saved["stop_reason"]
        queue._train_end_added = saved["train_end_added"]
        queue._finishing = saved["finishing"]
        queue._next_task = saved["next_task"]
        queue._next_lease = saved["next_lease"] + _LEASES_PER_LIFE
        for kind, states in saved["closed"].items():
            for state, number in states.items():
                queue._counts[TaskType(kind)][TaskState(state)] = number
        queue._milestones = [Milestone(MilestoneKind(kind), number) for kind, number in saved["milestones"]]
        finished_prediction = False
        for values in saved["todo"]:
            record = _record_from_dict(values)
            task = record.task
            if task.type in RESUMABLE and not task.shard.records:
                # Its worker had reported all records, but not yet the task.
                queue._counts[task.type][TaskState.DONE] += 1
                finished_prediction |= task.type is TaskType.PREDICTION
                continue
            queue._again[task.type].append(record)
            if task.type is TaskType.TRAINING:
                queue._open[task.epoch] = queue._open.get(task.epoch, 0) + 1
            elif task.type is TaskType.PREDICTION:
                queue._prediction_left += 1
        accounting = dict(saved["accounting"])
        for name in ("records_trained", "records_dropped"):
            accounting[name] = {int(epoch): count for epoch, count in accounting[name].items()}
        queue._accounting = Accounting(**accounting)
        queue._settle_epochs()
        if finished_prediction and not queue._prediction_left:
            queue._reach(MilestoneKind.PREDICTION_DONE)
        return queue

    # ------------------------------------------------------------ handing out

    def _next_record(self) -> TaskRecord | None:
        for kind in HANDING_OUT_ORDER:
            if kind is TaskType.TRAIN_END and (self._doing or not self._training_done):
                continue
            again = self._again[kind]
            if again:
                return again.popleft()
            task = self._makers[kind]()
            if task is not None:
                return TaskRecord(task)
        return None

    def _hand_out(self, record: TaskRecord, worker: int) -> Decision:
        held = self._held.get(worker)
        if held is None:
            held = self._held[worker] = {}
            self._progress_at[worker] = self._now
        task = record.task
        lease = Lease(self._next_lease, task, worker, self._progress_at[worker] + self._lease_seconds)
        self._next_lease += 1
        record.move(TaskEvent.HANDED_OUT)
        record.lease = lease
        record.heard = False
        self._doing[lease.id] = held[lease.id] = record
        if record.maybe_trained:
            record.maybe_trained = False
            self._accounting.records_handed_out_again += task.shard.records
        if record.attempts:
            return Decision(DecisionKind.TASK, lease, f"{task}, after: {record.attempts[-1].event.value}")
        return Decision(DecisionKind.TASK, lease, "the next task")

    def _nothing(self) -> Decision:
        doing = len(self._doing)
        if self._again[TaskType.TRAIN_END]:
            what = f"{doing} running tasks" if doing else "the training"
            return Decision(DecisionKind.WAIT, None, f"TRAIN_END waits for {what}")
        if doing:
            return Decision(DecisionKind.WAIT, None, f"all tasks are handed out, {doing} are running")
        if not self._training_done and self._epoch + 1 < self._num_epochs and self._stop_reason is None:
            return Decision(DecisionKind.WAIT, None, f"epoch {self._epoch} is not released")
        if self._finishing:
            return Decision(DecisionKind.FINISHED, None, "all tasks are done")
        return Decision(DecisionKind.WAIT, None, "all tasks are done, more may come")

    def _new_task(self, kind: TaskType, shard: Shard, epoch: int = 0, evaluation_round: int = 0) -> Task:
        task = Task(self._next_task, kind, shard, epoch, evaluation_round)
        self._next_task += 1
        return task

    def _make_evaluation(self) -> Task | None:
        if not self._evaluations:
            return None
        evaluation_round, order = self._evaluations[0]
        shard = order.draw()
        if not order.left:
            self._evaluations.popleft()
        return self._new_task(TaskType.EVALUATION, shard, evaluation_round=evaluation_round)

    def _make_training(self) -> Task | None:
        if not self._epoch_goes_on():
            if not self._more_epochs() or (self._hold_epochs and self._released < self._epoch):
                return None
            self._epoch += 1
            self._order = self._order_of(self._epoch)
        shard = self._order.draw()
        batches = -(-shard.records // self._minibatch_size)
        if self._max_batches:
            left = self._max_batches - self._accounting.batches_handed_out
            if batches > left:
                batches = left
                shard = Shard(shard.name, shard.start, shard.start + left * self._minibatch_size)
        self._accounting.batches_handed_out += batches
        self._open[self._epoch] = self._open.get(self._epoch, 0) + 1
        return self._new_task(TaskType.TRAINING, shard, epoch=self._epoch)

    def _make_prediction(self) -> Task | None:
        if not self._prediction.left:
            return None
        return self._new_task(TaskType.PREDICTION, self._prediction.draw())

    def _order_of(self, epoch: int) -> ShardOrder:
        return ShardOrder(self._layout, f"{self._shuffle_seed}/{epoch}")

    def _more_training(self) -> bool:
        used_up = 0 < self._max_batches <= self._accounting.batches_handed_out
        return not used_up and bool(self._layout)

    def _epoch_goes_on(self, even_stopped: bool = False) -> bool:
        """Whether more tasks of the present epoch will be made."""
        stopped = self._stop_reason is not None and not even_stopped
        return not stopped and self._order.left > 0 and self._more_training()

    def _more_epochs(self) -> bool:
        return self._stop_reason is None and self._epoch + 1 < self._num_epochs and self._more_training()

    def _training_to_make(self) -> int:
        epochs = self._num_epochs - 1 - self._epoch
        if self._stop_reason is not None or not self._more_training():
            return 0
        tasks = self._order.left + epochs * len(self._layout)
        if self._max_batches:
            batches_left = self._max_batches - self._accounting.batches_handed_out
            if self._max_batches < self._num_epochs * self._layout.batches:
                per_task = -(-self._layout.records_per_task // self._minibatch_size)
                tasks = min(tasks, -(-batches_left // per_task))
        return tasks

    # ------------------------------------------------------------ taking back

    def _put_back_unanswered(self, worker: int, held: Collection[int]) -> None:
        for lease_id, record in reversed(list(self._held[worker].items())):
            if lease_id not in held and not record.heard:
                self._release(record, done=None)
                record.move(TaskEvent.ANSWER_LOST)
                self._accounting.answers_lost += 1
                self._again[record.task.type].appendleft(record)

    def _take_all(self, worker: int, event: TaskEvent) -> list[tuple[Lease, Task]]:
        """Takes back all leases of `worker`; answers them, oldest first, with what is left to do."""
        records = list(self._held.get(worker, {}).values())
        taken: list[tuple[Lease, Task]] = []
        # From the newest to the oldest, each to the front of the queue: there they stand in their order.
        for record in reversed(records):
            lease = self._release(record, done=None)
            what = event
            if record is records[0]:
                record.losses += 1
                if record.losses > self._max_losses:
                    what = TaskEvent.LOSSES_USED_UP
            error = (
                f"no progress for {self._lease_seconds:g} s" if event is TaskEvent.LEASE_OVER else "the worker was lost"
            )
            if self._take_back(record, worker, what, error, "") is event:
                self._accounting.tasks_taken_over += 1
            taken.insert(0, (lease, record.task))
        return taken

    def _take_back(self, record: TaskRecord, worker: int, event: TaskEvent, error: str, traceback: str) -> TaskEvent:
        """Decides what becomes of a task that its worker did not finish; answers what happened."""
        task = record.task
        record.attempts.append(Attempt(worker, task.shard, event, error, traceback))
        record.shorten()
        fatal = event is TaskEvent.REPORTED_FATAL
        if task.type in RESUMABLE and not record.task.shard.records and not fatal:
            event = TaskEvent.NOTHING_LEFT
            self._close(record, event)
            return event
        record.move(event)
        if record.state is TaskState.FAILED:
            self._counts[task.type][TaskState.FAILED] += 1
            if self._failure is None:
                self._failure = Failure(task, event, worker, error, traceback, tuple(record.attempts))
        else:
            record.maybe_trained = task.type is TaskType.TRAINING
            self._again[task.type].appendleft(record)
        return event

    def _release(self, record: TaskRecord, done: bool | None) -> Lease:
        """Ends the lease of `record`. `done` tells how it was reported, None: it was not."""
        lease = record.lease
        assert lease is not None
        record.lease = None
        del self._doing[lease.id]
        held = self._held[lease.worker]
        del held[lease.id]
        if not held:
            del self._held[lease.worker]
        if done is not None:
            # The worker is alive, and only now begins with its next task.
            self._progress_at[lease.worker] = self._now
            closed = self._closed.setdefault(lease.worker, deque(maxlen=_REMEMBERED))
            closed.append((lease.id, done, record.task))
        return lease

    def _report_without_lease(self, worker: int, lease_id: int, done: bool) -> Outcome:
        for closed_id, was_done, task in self._closed.get(worker, ()):
            if closed_id == lease_id and was_done is done:
                return Outcome(True, f"{task} was reported before", task, duplicate=True)
        self._accounting.reports_refused += 1
        return Outcome(False, self._why_refused(worker, lease_id))

    def _why_refused(self, worker: int, lease_id: int) -> str:
        record = self._doing.get(lease_id)
        if record is not None and record.lease is not None:
            return f"lease {lease_id} belongs to worker {record.lease.worker}, not to worker {worker}"
        if worker in self._lost:
            return f"worker {worker} was given up as lost, its leases were taken away"
        return f"worker {worker} does not hold lease {lease_id} (any more)"

    # ------------------------------------------------------------ counting

    def _close(self, record: TaskRecord, event: TaskEvent) -> None:
        record.move(event)
        task = record.task
        self._counts[task.type][TaskState.DONE] += 1
        if task.type is TaskType.TRAINING:
            self._open[task.epoch] -= 1
            self._settle_epochs()
        elif task.type is TaskType.EVALUATION:
            self._rounds[task.evaluation_round] -= 1
            if not self._rounds[task.evaluation_round]:
                del self._rounds[task.evaluation_round]
                self._reach(MilestoneKind.ROUND_DONE, task.evaluation_round)
        elif task.type is TaskType.PREDICTION:
            self._prediction_left -= 1
            if not self._prediction_left:
                self._reach(MilestoneKind.PREDICTION_DONE)
        else:
            self._reach(MilestoneKind.TRAIN_END_DONE)

    def _settle_epochs(self) -> None:
        """Tells which epochs are done, in their order, and whether training is."""
        while self._epochs_done <= self._epoch:
            epoch = self._epochs_done
            if self._open.get(epoch) or (epoch == self._epoch and self._epoch_goes_on()):
                return
            self._open.pop(epoch, None)
            self._epochs_done += 1
            self._reach(MilestoneKind.EPOCH_DONE, epoch)
        if not self._training_done and not self._more_epochs():
            self._training_done = True
            self._reach(MilestoneKind.TRAINING_DONE)

    def _count_trained(self, task: Task, records: int) -> None:
        if task.type is TaskType.TRAINING and records:
            trained = self._accounting.records_trained
            trained[task.epoch] = trained.get(task.epoch, 0) + records

    def _count_dropped(self, epoch: int, records: int) -> None:
        dropped = self._accounting.records_dropped
        dropped[epoch] = dropped.get(epoch, 0) + records

    def _reach(self, kind: MilestoneKind, number: int = 0) -> None:
        self._milestones.append(Milestone(kind, number))


def _record_to_dict(record: TaskRecord) -> dict[str, Any]:
    task = record.task
    done = record.reported if task.type in RESUMABLE else 0
    return {
        "id": task.id,
        "type": task.type.value,
        "shard": [task.shard.name, task.shard.start + done, task.shard.end],
        "epoch": task.epoch,
        "failures": record.failures,
        "losses": record.losses,
        # The weights were saved with the queue, a moment before or after: what a worker had in hand may
        # be in them.
        "maybe_trained": task.type is TaskType.TRAINING and (record.maybe_trained or record.state is TaskState.DOING),
        "attempts": [
            [
                try_.worker,
                try_.shard.name,
                try_.shard.start,
                try_.shard.end,
                try_.event.value,
                try_.error,
                try_.traceback,
            ]
            for try_ in record.attempts
        ],
    }


def _record_from_dict(values: dict[str, Any]) -> TaskRecord:
    record = TaskRecord(Task(values["id"], TaskType(values["type"]), Shard(*values["shard"]), epoch=values["epoch"]))
    record.failures = values["failures"]
    record.losses = values["losses"]
    record.maybe_trained = values["maybe_trained"]
    record.attempts = [
        Attempt(worker, Shard(name, start, end), TaskEvent(event), error, traceback)
        for worker, name, start, end, event, error, traceback in values["attempts"]
    ]
    return record
