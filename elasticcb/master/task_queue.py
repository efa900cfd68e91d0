"""The tasks of a job, as a pure state machine: events in, decisions with their reasons out.

No threads, no clock (`now` is an argument, in seconds), no gRPC, no Keras. The states and transitions are the table
`TRANSITIONS` in task.py; docs/tasks.md explains them.

Every event of that table is handled here, and nowhere else. The tasks of each state are stored in:

    TODO    task_sources.py and epochs.py, which create tasks when they are handed out, so a queue of a million
            tasks needs little more than a shuffled index of four bytes per task
    DOING   leases.py
    closed  only counted

Consequences of a call beyond its answer (an epoch is done, a round is done) are `Milestone`s, which the caller fetches
with `take_milestones`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

from elasticcb.data.unbounded import Partition
from elasticcb.errors import CheckpointError, WireError
from elasticcb.master.accounting import Accounting, Attempt, Failure, TaskRecord
from elasticcb.master.epochs import Epochs
from elasticcb.master.leases import Leases
from elasticcb.master.stream_ranges import Period, StreamRanges
from elasticcb.master.task import (
    RESUMABLE,
    Answer,
    BatchesLeft,
    DecisionKind,
    Lease,
    Milestone,
    MilestoneKind,
    Outcome,
    QueueSettings,
    Task,
    TaskDecision,
    TaskEvent,
    TaskState,
    TaskType,
    training_part,
)
from elasticcb.master.task_sources import (
    EvaluationTasks,
    FunctionTasks,
    PredictionTasks,
    Supply,
    Todo,
    TrainEndTask,
)
from elasticcb.process.wording import how_many

_MOST_UNSAVED = 500  # parts of tasks, which each entry of the journal repeats
_FORMAT = 2  # 1: without what is trained again

# Results of these are kept elsewhere in the master's memory: metric states, functions to call.
_NOT_SAVED = frozenset({TaskType.EVALUATION, TaskType.FUNCTION})


class TaskQueue:
    """The tasks of a queue by their state (`_todo`, `_doing`, and `_closed`, which only counts them), and everything
    else it knows. Every created task is in exactly one of the three.

    Args:
        training: names of sources, and numbers of their records.
        prediction: likewise; these tasks are handed out in order.
    """

    def __init__(
        self,
        settings: QueueSettings,
        training: Sequence[tuple[str, int]] = (),
        prediction: Sequence[tuple[str, int]] = (),
    ) -> None:
        self._settings = settings
        self._training_layout = settings.layout(training)
        self._prediction_layout = settings.layout(prediction)
        self._epochs = Epochs(self._training_layout, settings)
        self._evaluation = EvaluationTasks()
        self._prediction = PredictionTasks(self._prediction_layout)
        self._functions = FunctionTasks()
        self._supplies: dict[TaskType, Supply] = {
            TaskType.EVALUATION: self._evaluation,
            TaskType.TRAINING: self._epochs,
            TaskType.PREDICTION: self._prediction,
            TaskType.FUNCTION: self._functions,
            TaskType.TRAIN_END: TrainEndTask(),
        }
        self._todo = Todo(self._supplies)
        self._doing = Leases(settings.lease_seconds)
        # By worker: predicted tasks, whose results are lost with it until the `on_predict_end` hooks there have run.
        self._held: dict[int, list[TaskRecord]] = {}
        self._closed = {kind: dict.fromkeys(TaskState, 0) for kind in TaskType}  # DONE, FAILED, DROPPED
        self.failure: Failure | None = None
        self._pauses: dict[str, str] = {}  # why nothing is handed out, even if there are tasks; by who paused it
        self._finishing = False  # no more tasks will be added
        self._stops_after: tuple[str, int] | None = None  # why the first batch after an epoch will be the last one
        self._accounting = Accounting()
        self._milestones: list[Milestone] = []  # not fetched yet
        self._given = {
            "format": _FORMAT,
            "settings": asdict(settings),
            "training": [list(source) for source in self._training_layout.sources],
            "prediction": [list(source) for source in self._prediction_layout.sources],
        }
        if training and self._epochs.done:
            self._milestones.append(Milestone(MilestoneKind.TRAINING_DONE))
        if prediction and not self._prediction_layout:
            self._milestones.append(Milestone(MilestoneKind.PREDICTION_DONE))

    # ------------------------------------------------------------ a worker asks for a task

    def get_task(self, worker: int, now: float, held: Collection[int] | None = None) -> TaskDecision:
        """The next task for `worker`, if there is one.

        Args:
            held: leases that the worker knows it has. A lease missing here on which it never reported is requeued: the
                answer that assigned it got lost. A worker must list a lease until its last report on it is answered.
                None: the worker did not list any.
        """
        doing = self._doing
        doing.tell_time(now)
        if self._epochs.stream is not None:
            self._epochs.stream.asked_by(worker, now)
        if self.failure is not None:
            return TaskDecision(DecisionKind.FINISHED, None, "the job has failed")
        if doing.is_lost(worker):
            return TaskDecision(DecisionKind.FINISHED, None, f"worker {worker} was declared lost")
        if held is not None:
            self._put_back_unanswered(worker, held)
        for why in filter(None, self._pauses.values()):
            return TaskDecision(DecisionKind.WAIT, None, why)
        record = self._todo.take(
            train_end=not doing and self._epochs.done,
            idle=not doing.held_by(worker),
            failed_on=worker if doing.others_hold(worker) else None,
        )
        if record is not None and self._stops_after is not None and record.task.type is TaskType.TRAINING:
            self._stop_after_batch(record)
        return self._nothing_to_hand_out() if record is None else self._hand_out(record, worker)

    def _stop_after_batch(self, record: TaskRecord) -> None:
        """Carries out a stop that was asked for before the epoch's first batch, if `record` is of that epoch."""
        assert self._stops_after is not None
        reason, epoch = self._stops_after
        if record.task.epoch > epoch:
            self._stops_after = None
            if record.task.shard.records > self._settings.minibatch_size:
                self._todo.split(record, self._settings.minibatch_size)
            self._stop(reason)

    def _put_back_unanswered(self, worker: int, held: Collection[int]) -> None:
        for record in reversed(self._doing.unanswered(worker, held)):
            self._doing.take_away(record)
            record.move(TaskEvent.ANSWER_LOST)
            self._accounting.answers_lost += 1
            self._todo.put_back(record)

    def _hand_out(self, record: TaskRecord, worker: int) -> TaskDecision:
        record.move(TaskEvent.HANDED_OUT)
        record.for_idle = False
        record.stale_from = None
        lease = self._doing.grant(record, worker)
        if record.maybe_done:
            record.maybe_done = False
            self._accounting.count_again(lease.task)
        if record.attempts:
            return TaskDecision(
                DecisionKind.TASK, lease, f"{lease.task}, last attempt: {record.attempts[-1].event.value}"
            )
        return TaskDecision(DecisionKind.TASK, lease, "the next task")

    def _nothing_to_hand_out(self) -> TaskDecision:
        doing = len(self._doing)
        if self._todo.train_end_waits:
            what = how_many(doing, "running task") if doing else "the training"
            return TaskDecision(DecisionKind.WAIT, None, f"TRAIN_END waits for {what}")
        if doing:
            return TaskDecision(DecisionKind.WAIT, None, f"all tasks are handed out; running: {doing}")
        if self._epochs.is_held:
            return TaskDecision(DecisionKind.WAIT, None, f"epoch {self._epochs.current} has not been released")
        if self._finishing:
            return TaskDecision(DecisionKind.FINISHED, None, "all tasks are done")
        if self._held:
            return TaskDecision(DecisionKind.FINISHED, None, "all records are predicted; callbacks can finish")
        return TaskDecision(DecisionKind.WAIT, None, "all tasks are done, more may come")

    # ------------------------------------------------------------ a worker reports

    def report_progress(
        self,
        worker: int,
        lease_id: int,
        records_done: int,
        now: float,
        progressed: bool = False,
        computing: float = 0.0,
        is_held: bool = True,
    ) -> Answer:
        """`worker` has processed the first `records_done` records of the leased shard.

        A higher number than before renews all leases of the worker. The same number does not, because a hung worker may
        still send it, unless the worker reports that it `progressed`: with shuffled records it can't tell which ones
        are done. Any report renews a task without records. A report that the worker has been `computing` a batch, for
        that many seconds, renews its leases up to a limit.

        Args:
            is_held: all present servers were in use when the first batch began that was not reported before.

        Raises `WireError` when the shard has fewer records.
        """
        self._doing.tell_time(now)
        record = self._doing.find(worker, lease_id)
        if record is None:
            self._accounting.reports_refused += 1
            return Answer(False, self._doing.why_not_held(worker, lease_id))
        record.heard = True
        task = record.task
        if not 0 <= records_done <= task.shard.records:
            raise WireError(
                f"Worker {worker} reported {records_done} records of {task} as done, but the task has "
                f"{task.shard.records}. This is a bug in the worker; please report it."
            )
        gained = records_done - record.reported
        if gained <= 0 and task.shard.records and not progressed:
            return self._doing.still(worker, computing)
        self._doing.progress(worker)
        self._trained(record, records_done, is_held)
        record.reported = max(record.reported, records_done)
        if task.type in RESUMABLE and gained > 0:
            record.losses = 0
            self._accounting.count_records(task, gained)
        return Answer(True, "progress")

    def report_done(self, worker: int, lease_id: int, ended_after: int | None = None, is_held: bool = True) -> Outcome:
        """`worker` has finished the task. A repeated report is accepted as a duplicate.

        Args:
            ended_after: the source ended after this many records of the shard: no more tasks of the epoch are created.
            is_held: as in `report_progress`.
        """
        record = self._doing.find(worker, lease_id)
        if record is None:
            return self._report_without_lease(worker, lease_id, done=True)
        task = record.task
        counted = record.reported if task.type in RESUMABLE else 0
        self._doing.reported(record, done=True)
        done = task.shard.records if ended_after is None else ended_after
        self._accounting.count_records(task, done - counted)
        self._trained(record, done, is_held)
        self._take_back(record, done)
        if ended_after is not None and task.type is TaskType.TRAINING:
            self._epochs.source_ended(task.epoch)
        record.move(TaskEvent.REPORTED_DONE)
        if self._settings.hold_predictions and task.type is TaskType.PREDICTION:
            self._closed[task.type][TaskState.DONE] += 1
            self._held.setdefault(worker, []).append(record)
        else:
            self._count_done(task)
        return Outcome(True, f"{task} is done", task)

    def report_failed(self, worker: int, lease_id: int, error: str, traceback: str, fatal: bool = False) -> Outcome:
        """`worker` failed in the task. `fatal`: retrying can't help, so the job fails at once."""
        record = self._doing.find(worker, lease_id)
        if record is None:
            return self._report_without_lease(worker, lease_id, done=False)
        task = record.task
        record.failures += 1
        if fatal:
            event = TaskEvent.REPORTED_FATAL
        elif record.failures > self._settings.max_retries:
            event = TaskEvent.RETRIES_USED_UP
        else:
            event = TaskEvent.REPORTED_FAILED
        self._doing.reported(record, done=False)
        event = self._end_attempt(record, worker, event, error, traceback)
        if event is TaskEvent.NOTHING_LEFT:
            return Outcome(True, f"{task} failed after its last record ({error}); nothing is left to do", task)
        if self.failure is not None:
            return Outcome(True, f"{task} failed: {event.value}", task)
        self._accounting.tasks_retried += 1
        return Outcome(
            True, f"{task} failed {record.failures} of {self._settings.max_retries + 1} times; tried again", task
        )

    def _report_without_lease(self, worker: int, lease_id: int, done: bool) -> Outcome:
        task = self._doing.reported_before(worker, lease_id, done)
        if task is not None:
            return Outcome(True, f"{task} was reported before", task, duplicate=True)
        self._accounting.reports_refused += 1
        return Outcome(False, self._doing.why_not_held(worker, lease_id))

    def split(self, worker: int, lease_id: int, end: int) -> Answer:
        """`worker` will process only the first `end` records of the leased shard; the rest goes to a waiting worker.
        With 0, which means that it has not begun, it returns the whole task.

        Repeating the call has no effect. Raises `WireError` when the task can't be split there.
        """
        record = self._doing.find(worker, lease_id)
        if record is None:
            self._accounting.reports_refused += 1
            return Answer(False, self._doing.why_not_held(worker, lease_id))
        task = record.task
        if task.type is not TaskType.TRAINING or not record.reported <= end <= task.shard.records:
            raise WireError(
                f"Worker {worker} asked to keep only the first {end} records of {task}, of which it has reported "
                f"{record.reported}. Expected a training task, and a number from {record.reported} to "
                f"{task.shard.records}. This is a bug in the worker; please report it."
            )
        record.heard = True
        if end == task.shard.records:
            return Answer(True, "there is nothing to split off")
        self._accounting.tasks_split += 1
        if end == 0:
            self._doing.take_away(record)
            record.move(TaskEvent.HANDED_BACK)
            record.for_idle = True
            self._todo.put_back(record)
            return Answer(True, f"{task} was handed back")
        record.move(TaskEvent.SPLIT_OFF)
        self._todo.split(record, end)
        return Answer(True, f"{task} was split after its first {end} records")

    # ------------------------------------------------------------ a worker is lost, or hangs

    def worker_lost(self, worker: int) -> list[Task]:
        """Revokes the leases of a lost worker; returns what remains of its tasks."""
        self._doing.lose(worker)
        error = "the worker was lost"
        tasks = [task for _, task in self._take_all(worker, TaskEvent.WORKER_LOST, error)]
        for record in reversed(self._held.pop(worker, [])):
            task = record.task
            record.attempts.append(Attempt(worker, task.shard, TaskEvent.RESULTS_LOST, error))
            record.move(TaskEvent.RESULTS_LOST)
            record.reported, record.maybe_done = 0, True
            self._closed[task.type][TaskState.DONE] -= 1
            self._accounting.count_records(task, -task.shard.records)
            self._accounting.tasks_taken_over += 1
            self._todo.put_back(record)
            tasks.insert(0, task)
        return tasks

    def worker_left(self, worker: int) -> list[Task]:
        """Requeues what a leaving worker returns: all its work is reported, and its callbacks have ended."""
        self._doing.lose(worker)
        tasks = [task for _, task in self._take_all(worker, TaskEvent.HANDED_BACK, "the worker was asked to end")]
        self.results_kept(worker)
        return tasks

    def expire(self, now: float, waiting: bool = False) -> list[Lease]:
        """Revokes the leases of workers without progress for `lease_seconds`; returns these leases.

        Args:
            waiting: the workers wait for a lost parameter server and can't make progress: leases are renewed instead.
        """
        self._doing.tell_time(now)
        if waiting:
            self._doing.renew()
        error = f"no progress for {self._settings.lease_seconds:g} s"
        hung = self._doing.overdue()
        return [lease for worker in hung for lease, _ in self._take_all(worker, TaskEvent.LEASE_OVER, error)]

    def _take_all(self, worker: int, event: TaskEvent, error: str) -> list[tuple[Lease, Task]]:
        """Revokes all leases of `worker`; returns them, oldest first, with the remaining work."""
        records = self._doing.held_by(worker)
        taken: list[tuple[Lease, Task]] = []
        # From newest to oldest, each to the front of the queue, which keeps their order.
        for record in reversed(records):
            lease = self._doing.take_away(record)
            what = event
            if record is records[0] and event is not TaskEvent.HANDED_BACK:
                record.losses += 1
                if record.losses > self._settings.max_losses:
                    what = TaskEvent.LOSSES_USED_UP
            if self._end_attempt(record, worker, what, error) is event:
                self._accounting.tasks_taken_over += 1
            taken.insert(0, (lease, record.task))
        return taken

    def results_kept(self, worker: int) -> None:
        """`on_predict_end` of the callbacks has run on `worker`: their results are safe."""
        for record in self._held.pop(worker, []):
            self._settle(record.task)

    # ------------------------------------------------------------ a server is lost

    def begin_save(self) -> int:
        """The servers begin to write recovery files; `saved` takes the result when all have written."""
        return self._epochs.unsaved.mark()

    def saved(self, mark: int, written: bool = True) -> None:
        """What was reported before the mark can't be lost any more; if it could not be `written`, it is not trained
        again if it is."""
        records, accounting = self._epochs.unsaved.saved(mark), self._accounting
        accounting.records_given_up = 0 if written else accounting.records_given_up + records
        self._milestones += self._epochs.settle()

    @property
    def wants_save(self) -> bool:
        """Whether recovery files should be written now: training ends with them, and reports must not pile up."""
        unsaved = len(self._epochs.unsaved)
        return unsaved > _MOST_UNSAVED or bool(unsaved and self._epochs.all_trained)

    def updates_lost(self) -> bool:
        """The replacement of a lost server lacks what was reported since it saved, which is trained again; also what is
        reported later on present leases, until a report of batches that began afterwards. Returns whether all lost
        updates are repeated."""
        if self._settings.repeats_lost:
            for record in self._doing:
                if record.task.type is TaskType.TRAINING and record.stale_from is None:
                    record.stale_from = record.reported
        for part in self._epochs.unsaved.take():
            self._repeat(part)
        return self._settings.repeats_lost and not self._accounting.records_given_up

    def _trained(self, record: TaskRecord, done: int, is_held: bool) -> None:
        """Its worker has trained the first `done` records of the shard."""
        if is_held:
            self._take_back(record, record.reported)
        can_be_lost = self._settings.repeats_lost and record.task.type is TaskType.TRAINING
        if can_be_lost and record.stale_from is None and done > record.reported:
            self._epochs.unsaved.add(record.part(record.reported, done))

    def _take_back(self, record: TaskRecord, done: int) -> None:
        """The lease has ended, after `done` records of the shard."""
        part = record.stale_part(done)
        record.stale_from = None
        if part is not None:
            self._repeat(part)

    # ------------------------------------------------------------ an attempt ends

    def _end_attempt(
        self, record: TaskRecord, worker: int, event: TaskEvent, error: str, traceback: str = ""
    ) -> TaskEvent:
        """Decides what happens to a task that its worker did not finish; returns the event."""
        task = record.task
        record.attempts.append(Attempt(worker, task.shard, event, error, traceback))
        # If `feed` shuffles, a worker can't tell which records are done.
        exact = event is TaskEvent.HANDED_BACK and bool(record.reported or not record.heard)
        self._take_back(record, record.reported)
        record.shorten()
        if record.nothing_left and event is not TaskEvent.REPORTED_FATAL:
            event = TaskEvent.NOTHING_LEFT
        record.move(event)
        if record.state is TaskState.DONE:
            self._count_done(task)
        elif record.state is TaskState.FAILED:
            self._closed[task.type][TaskState.FAILED] += 1
            if self.failure is None:
                self.failure = Failure(task, event, worker, error, traceback, tuple(record.attempts))
        else:
            record.maybe_done = task.type in RESUMABLE and not exact
            self._todo.put_back(record)
        return event

    def _count_done(self, task: Task) -> None:
        self._closed[task.type][TaskState.DONE] += 1
        self._settle(task)

    def _settle(self, task: Task) -> None:
        """The task is done for good."""
        self._milestones += self._supplies[task.type].close(task)

    def _repeat(self, part: Task) -> None:
        """Part of a training task, or of several attempts at it, is trained again as a task of its own."""
        record = TaskRecord(replace(part, id=self._todo.next_id))
        self._todo.next_id += 1
        self._accounting.count_records(part, -part.shard.records)
        self._epochs.reopen(record.task)
        ends = [
            each for each in self._milestones if each.kind is MilestoneKind.EPOCH_DONE and each.number >= part.epoch
        ]
        if ends:  # nobody has acted on them: these epochs end later
            self._milestones = [each for each in self._milestones if each not in ends]
            self._epochs.epochs_done = ends[0].number
        if self._epochs.stop_reason is None:
            record.maybe_done = True
            self._todo.append(record)
            return
        record.move(TaskEvent.TRAINING_STOPPED)
        self._closed[TaskType.TRAINING][TaskState.DROPPED] += 1
        self._accounting.count_dropped(part.epoch, part.shard.records)
        self._milestones += self._epochs.close(record.task)

    # ------------------------------------------------------------ requests of the master

    def stop_training(self, reason: str, before_batch: bool = False) -> None:
        """No new training tasks: TODO tasks are dropped, DOING tasks are finished.

        Args:
            before_batch: this was asked for before the first batch of an epoch, which is trained, as in `fit`.
        """
        if self._epochs.done or self.stop_reason is not None:
            return
        if before_batch:
            self._stops_after = reason, self._epochs.current
        else:
            self._stop(reason)

    def drop_training(self) -> None:
        """After `stop_training`: also drops tasks, or parts of them, that were DOING then and are TODO again."""
        if not self._epochs.done and self._epochs.stop_reason is not None:
            self._stop(self._epochs.stop_reason)

    def _stop(self, reason: str) -> None:
        dropped = self._todo.remove_all(TaskType.TRAINING)
        for record in dropped:
            record.move(TaskEvent.TRAINING_STOPPED)
            self._accounting.count_dropped(record.task.epoch, record.task.shard.records)
        unmade, records = self._epochs.unmade()
        self._accounting.count_dropped(self._epochs.current, records)
        self._closed[TaskType.TRAINING][TaskState.DROPPED] += len(dropped) + unmade
        self._milestones += self._epochs.stop(reason, [record.task for record in dropped])

    def cancel_functions(self) -> list[int]:
        """Drops function calls that are TODO; returns their ids. DOING calls are finished."""
        dropped = self._todo.remove_all(TaskType.FUNCTION)
        for record in dropped:
            record.move(TaskEvent.FUNCTIONS_CANCELLED)
        unmade = self._functions.cancel()
        self._closed[TaskType.FUNCTION][TaskState.DROPPED] += len(dropped) + len(unmade)
        return [*(record.task.function for record in dropped), *unmade]

    def add_evaluation(self, round: int, sources: Sequence[tuple[str, int]]) -> int:
        """Adds the tasks of an evaluation pass, ahead of all others; returns their number.

        Raises `UsageError` when the round was added before and is not done.
        """
        layout = self._settings.layout(sources)
        self._milestones += self._evaluation.add(round, layout)
        return len(layout)

    def grow(self, seen: Mapping[str, Partition], now: float, period: Period | None = None) -> str:
        """The records of a stream that are there by now; returns a message about lost ones, as `StreamRanges.grow`,
        and raises its errors."""
        stream = self._epochs.stream
        assert stream is not None
        stories = [stream.grow(seen, now, period)]
        for record in [*self._todo]:  # drawn before, also by an earlier master
            shard = record.task.shard
            if shard.name in seen and (first := min(seen[shard.name].first, shard.end)) > shard.start:
                stories.append(stream.lose(replace(shard, end=first)))
                record.task = replace(record.task, shard=replace(shard, start=first))
                if record.nothing_left:
                    self._todo.remove(record)
                    record.move(TaskEvent.NOTHING_LEFT)
                    self._count_done(record.task)
        self._milestones += self._epochs.settle()
        return " ".join(filter(None, stories))

    def end_epoch(self, epoch: int) -> bool:
        """The epoch of a stream gets no more records, if it is the current one, and has some. Returns whether that is
        news."""
        stream = self._epochs.stream
        if stream is None or self._epochs.current != epoch or not stream.left or not stream.end_epoch():
            return False
        self._milestones += self._epochs.settle()
        return True

    @property
    def stream(self) -> StreamRanges | None:
        """The partitions of a stream; None: the job has data of known size."""
        return self._epochs.stream

    def trained_to(self, saved: bool) -> dict[str, int]:
        """By partition of a stream: the offset before which all is trained; if `saved`, also by the servers."""
        offsets = {} if self.stream is None else self.stream.positions
        tasks = [record.task for record in (*self._doing, *self._todo)] + (list(self._epochs.unsaved) if saved else [])
        for task in tasks:
            if task.type is TaskType.TRAINING and task.shard.name in offsets:
                offsets[task.shard.name] = min(offsets[task.shard.name], task.shard.start)
        return offsets

    def release_epoch(self, epoch: int) -> None:
        """Lets the epoch after `epoch` begin; matters only with `hold_epochs`."""
        self._epochs.release(epoch)

    def pause(self, who: str, why: str) -> bool:
        """Stops handing out tasks; DOING tasks may finish. With an empty `why`, `who` pauses it no longer. A queue
        saved now continues when restored. Returns whether this changes anything."""
        before = self._pauses.get(who, "")
        self._pauses[who] = why
        return before != why

    def add_function(self, number: int) -> None:
        """Adds a function call with id `number`, after all earlier ones."""
        self._functions.add(number)

    def add_train_end(self) -> None:
        """Adds the job's only TRAIN_END task, handed out when no other task is open."""
        self._todo.add_train_end()

    def finish(self) -> None:
        """No more tasks will be added: once all are done, `get_task` returns FINISHED instead of WAIT."""
        self._finishing = True

    # ------------------------------------------------------------ queries

    @property
    def has_milestones(self) -> bool:
        """Whether `take_milestones` would return any."""
        return bool(self._milestones)

    def take_milestones(self) -> list[Milestone]:
        """Milestones reached since the last call, in order. Call it after every other call."""
        milestones, self._milestones = self._milestones, []
        return milestones

    @property
    def epoch(self) -> int:
        """The epoch whose training tasks are being created, 0-based."""
        return max(self._epochs.current, 0)

    @property
    def batches_handed_out(self) -> int:
        """Of training; a range that is handed out again counts once."""
        return self._epochs.batches_made

    @property
    def training_done(self) -> bool:
        """Whether all training tasks are done (or dropped), and the servers have saved that."""
        return self._epochs.done

    @property
    def all_trained(self) -> bool:
        """Whether all training tasks are done (or dropped); training is, once that is saved."""
        return self._epochs.all_trained

    @property
    def stop_reason(self) -> str | None:
        """Why training was stopped early; None if it was not."""
        return self._epochs.stop_reason if self._stops_after is None else self._stops_after[0]

    @property
    def records_per_epoch(self) -> int:
        return self._training_layout.records

    def ran_out(self, epoch: int) -> bool:
        """Whether the source ended too early in `epoch`; if any number is fine, whether it was empty."""
        expected = 1 if self._settings.open_ended else self.records_per_epoch
        trained = self._accounting.records_trained.get(epoch, 0)
        return epoch in self._epochs.ended_by_source and self.stop_reason is None and trained < expected

    @property
    def accounting(self) -> Accounting:
        """A copy of the current counters."""
        return self._accounting.copy(batches_handed_out=self._epochs.batches_made)

    @property
    def is_idle(self) -> bool:
        """Whether no task is handed out."""
        return not self._doing

    def leases(self, worker: int | None = None) -> list[Lease]:
        """Active leases, of one worker or of all, oldest first."""
        records = self._doing if worker is None else self._doing.held_by(worker)
        return [record.lease for record in records if record.lease is not None]

    @property
    def workers_in_training(self) -> list[int]:
        """Ids of the workers that hold training tasks."""
        return sorted({lease.worker for lease in self.leases() if lease.task.type is TaskType.TRAINING})

    @property
    def has_returned(self) -> bool:
        """Whether requeued tasks, or parts of tasks, are waiting."""
        return self._todo.has_returned

    def batches_left(self) -> dict[int, list[BatchesLeft]]:
        """Batches left to report of each worker's leases, oldest first."""
        left: dict[int, list[BatchesLeft]] = {}
        for record in self._doing:
            if record.lease is not None:
                task = record.task
                batch = self._settings.minibatch_size
                entry = BatchesLeft(record.lease.id, task.type, task.shard.records, record.reported, batch)
                left.setdefault(record.lease.worker, []).append(entry)
        return left

    def counts(self) -> dict[TaskType, dict[TaskState, int]]:
        """The number of tasks in each state.

        TODO includes tasks still to be created, of all epochs. If `max_batches` will end training early, that part is
        an estimate.
        """
        counts = {kind: {**closed, TaskState.TODO: self._todo.count(kind)} for kind, closed in self._closed.items()}
        for record in self._doing:
            counts[record.task.type][TaskState.DOING] += 1
        return counts

    # ------------------------------------------------------------ saving

    def to_dict(self) -> dict[str, Any]:
        """The whole state as JSON values, for the journal; what never changes, such as sources, as the same objects.
        DOING tasks are saved as TODO, with their remaining records, and with what workers need to continue them.

        Functions and evaluation passes are not saved: the metric states of their finished tasks are in the master's
        memory, so they start over after a restart.
        """
        records = [record for record in (*self._doing, *self._todo) if record.task.type not in _NOT_SAVED]
        return {
            **self._given,
            **self._epochs.to_dict(),
            "predicted": self._prediction.made,
            "train_end_added": self._todo.train_end_added,
            "finishing": self._finishing,
            "stops_after": self._stops_after,
            "next_task": self._todo.next_id,
            **self._doing.to_dict(_NOT_SAVED),
            "stale": [part.to_list() for record in self._doing if (part := record.stale_part(record.reported))],
            "unsaved": self._epochs.unsaved.to_list(),
            "todo": [record.to_dict() for record in sorted(records, key=lambda record: record.task.id)],
            "closed": {
                kind.value: {state.value: number for state, number in states.items() if number}
                for kind, states in self._closed.items()
                if kind not in _NOT_SAVED
            },
            "accounting": self.accounting.to_dict(),
            "milestones": [
                [milestone.kind.value, milestone.number]
                for milestone in self._milestones
                if milestone.kind is not MilestoneKind.ROUND_DONE
            ],
        }

    @classmethod
    def from_dict(cls, saved: dict[str, Any], now: float | None = None) -> TaskQueue:
        """The queue saved by `to_dict`; milestones that were not fetched are repeated.

        Raises `CheckpointError` when `saved` is invalid.
        """
        with _reading(saved):
            sources = ([(name, count) for name, count in saved[kind]] for kind in ("training", "prediction"))
            queue = cls(QueueSettings(**saved["settings"]), *sources)
            queue._restore(saved, now)
        return queue

    def _restore(self, saved: dict[str, Any], now: float | None) -> None:
        self._accounting = Accounting.from_dict(saved["accounting"])
        self._epochs.restore(saved, self._accounting.batches_handed_out)
        self._prediction.restore(saved["predicted"])
        self._todo.train_end_added = saved["train_end_added"]
        self._todo.next_id = saved["next_task"]
        self._doing.restore(saved)
        self._finishing = saved["finishing"]
        self._stops_after = saved["stops_after"] and tuple(saved["stops_after"])
        for kind, states in saved["closed"].items():
            for state, number in states.items():
                self._closed[TaskType(kind)][TaskState(state)] = number
        self._milestones = [Milestone(MilestoneKind(kind), number) for kind, number in saved["milestones"]]
        records = [TaskRecord.from_dict(values) for values in saved["todo"]]
        # Reopen all before closing the first, or a half-restored epoch would look complete.
        for record in records:
            self._supplies[record.task.type].reopen(record.task)
        for part in saved["unsaved"]:
            self._epochs.unsaved.add(training_part(*part))
        if now is not None:
            self._doing.tell_time(now)
            self._doing.resume_reports(saved["reports"])
            by_id = {record.task.id: record for record in records}
            for lease_id, worker, task_id, *progress in saved["leases"]:
                record = by_id[task_id]
                record.resume(*progress)
                self._doing.resume(record, worker, lease_id)
        for record in records:
            if record.lease is not None:
                continue
            if record.nothing_left:  # its worker had reported all records, but not yet the task
                self._count_done(record.task)
            else:
                self._todo.append(record)
        for part in saved["stale"] if now is None else ():  # else they come back when their leases end
            self._repeat(training_part(*part))
        # A FAILED task is not open again, and must not keep its epoch open forever.
        self._milestones += self._epochs.settle()

    def repeat_milestones(self, ended_epochs: int) -> None:
        """After restoring: repeats milestones that were reached, and perhaps fetched, but not acted on.

        Args:
            ended_epochs: the end of epochs before this one needs no repetition.
        """
        epochs = range(ended_epochs, self._epochs.epochs_done)
        self._milestones = [Milestone(MilestoneKind.EPOCH_DONE, epoch) for epoch in epochs]
        if self._closed[TaskType.TRAIN_END][TaskState.DONE]:
            self._milestones.append(Milestone(MilestoneKind.TRAIN_END_DONE))
        elif self._epochs.done and not self._todo.train_end_added:
            self._milestones.append(Milestone(MilestoneKind.TRAINING_DONE))


@contextmanager
def _reading(saved: dict[str, Any]) -> Iterator[None]:
    """Raises `CheckpointError` when `saved` was not written by `to_dict`."""
    if saved.get("format") != _FORMAT:
        raise CheckpointError(
            f"The task queue in this journal has format {saved.get('format')!r}; this release reads format "
            f"{_FORMAT}. Use the release of elasticcb that wrote the journal."
        )
    try:
        yield
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise CheckpointError(
            f"The task queue in this journal can't be read ({type(error).__name__}: {error}). Restore the journal from "
            "a backup, or start a new job from the newest checkpoint."
        ) from error
