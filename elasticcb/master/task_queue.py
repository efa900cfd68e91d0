"""The tasks of a job, as a pure state machine: events in, decisions with their reasons out.

No threads, no clock (`now` is an argument, in seconds), no gRPC, no Keras. The states and transitions are the table
`TRANSITIONS` in task.py; docs/tasks.md explains them.

Every event of that table is handled here, and nowhere else. The tasks of each state are stored in:

    TODO    todo.py; task_sources.py and epochs.py create tasks when they are handed out, so a queue of a
            million tasks needs little more than a shuffled index of four bytes per task
    DOING   leases.py
    closed  only counted, in queue_state.py, which holds all of these, and saves them

Consequences of a call beyond its answer (an epoch is done, a round is done) are `Milestone`s, which the caller fetches
with `take_milestones`.
"""

from __future__ import annotations

from collections.abc import Collection

from elasticcb.errors import WireError
from elasticcb.master.accounting import Attempt, Failure, TaskRecord
from elasticcb.master.queue_state import QueueState
from elasticcb.master.task import (
    RESUMABLE,
    Answer,
    DecisionKind,
    Lease,
    Outcome,
    Task,
    TaskDecision,
    TaskEvent,
    TaskState,
    TaskType,
)
from elasticcb.process.wording import how_many

_MOST_UNSAVED = 500  # parts of tasks, which each entry of the journal repeats


class TaskQueue(QueueState):
    """Hands out tasks, accepts reports, and requeues unfinished tasks."""

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
        if self.failure is not None:
            return TaskDecision(DecisionKind.FINISHED, None, "the job has failed")
        if doing.is_lost(worker):
            return TaskDecision(DecisionKind.FINISHED, None, f"worker {worker} was declared lost")
        if held is not None:
            self._put_back_unanswered(worker, held)
        for why in filter(None, self._pauses.values()):
            return TaskDecision(DecisionKind.WAIT, None, why)
        record = self._todo.take(train_end=not doing and self._epochs.done, idle=not doing.held_by(worker))
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
            self._held.hold(worker, record)
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
        for record in reversed(self._held.take(worker)):
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
