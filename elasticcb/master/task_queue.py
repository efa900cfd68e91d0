"""The tasks of a job, as a pure state machine: events in, decisions with their reasons out.

No threads, no clock (`now` is an argument, in seconds), no gRPC, no Keras. The states and what moves a
task between them are the table `TRANSITIONS` in task.py; docs/tasks.md explains them.

Each event of that table befalls a task here, and nowhere else. Where a task is meanwhile, others know:

    TODO    todo.py; task_sources.py and epochs.py make tasks when they are handed out, so a queue of a
            million tasks holds little more than a shuffled index of four bytes a task
    DOING   leases.py
    closed  only counted, in queue_state.py, which holds all of these, and saves them

What a call brings about beyond its answer (an epoch is done, a round is done) is a `Milestone`, which the
caller fetches with `take_milestones`.
"""

from __future__ import annotations

from collections.abc import Collection

from elasticcb.errors import WireError
from elasticcb.master.decisions import Answer, DecisionKind, Outcome, TaskDecision
from elasticcb.master.queue_state import QueueState
from elasticcb.master.task import RESUMABLE, Lease, Task, TaskEvent, TaskState, TaskType
from elasticcb.master.task_record import Attempt, Failure, TaskRecord


class TaskQueue(QueueState):
    """Hands out tasks, takes reports, and hands out again what was not finished."""

    # ------------------------------------------------------------ a worker asks for a task

    def get_task(self, worker: int, now: float, held: Collection[int] | None = None) -> TaskDecision:
        """The next task for `worker`, if there is one.

        Args:
            held: the leases that the worker knows to have. A lease of it that is not among them and that
                it never reported on is put back: the answer that carried it got lost. A worker must
                name a lease until its last report on it was answered. None: it did not say.
        """
        doing = self._doing
        doing.tell_time(now)
        if self.failure is not None:
            return TaskDecision(DecisionKind.FINISHED, None, "the job has failed")
        if doing.is_lost(worker):
            return TaskDecision(DecisionKind.FINISHED, None, f"worker {worker} was given up as lost")
        if held is not None:
            self._put_back_unanswered(worker, held)
        if self._paused:
            return TaskDecision(DecisionKind.WAIT, None, "the job is being interrupted")
        record = self._todo.take(train_end=not doing and self._epochs.done, idle=not doing.held_by(worker))
        return self._nothing_to_hand_out() if record is None else self._hand_out(record, worker)

    def _put_back_unanswered(self, worker: int, held: Collection[int]) -> None:
        for record in reversed(self._doing.unanswered(worker, held)):
            self._doing.take_away(record)
            record.move(TaskEvent.ANSWER_LOST)
            self._accounting.answers_lost += 1
            self._todo.put_back(record)

    def _hand_out(self, record: TaskRecord, worker: int) -> TaskDecision:
        record.move(TaskEvent.HANDED_OUT)
        record.for_idle = False
        lease = self._doing.grant(record, worker)
        if record.maybe_done:
            record.maybe_done = False
            self._accounting.count_again(lease.task)
        if record.attempts:
            return TaskDecision(DecisionKind.TASK, lease, f"{lease.task}, after: {record.attempts[-1].event.value}")
        return TaskDecision(DecisionKind.TASK, lease, "the next task")

    def _nothing_to_hand_out(self) -> TaskDecision:
        doing = len(self._doing)
        if self._todo.train_end_waits:
            what = f"{doing} running tasks" if doing else "the training"
            return TaskDecision(DecisionKind.WAIT, None, f"TRAIN_END waits for {what}")
        if doing:
            return TaskDecision(DecisionKind.WAIT, None, f"all tasks are handed out, {doing} are running")
        if self._epochs.is_held:
            return TaskDecision(DecisionKind.WAIT, None, f"epoch {self._epochs.current} is not released")
        if self._finishing:
            return TaskDecision(DecisionKind.FINISHED, None, "all tasks are done")
        if self._held:
            return TaskDecision(DecisionKind.FINISHED, None, "all records are predicted; callbacks may end")
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
    ) -> Answer:
        """`worker` has done the first `records_done` records of the leased shard.

        More records than before keep all leases of the worker alive; the same number does not, for a
        worker that hangs may still send it, unless it says that it has `progressed`: where records are
        shuffled it can't tell which ones are done. A task without records is kept alive by any report, and a worker's
        leases by each while it is `computing` a batch, for that many seconds up to now, unless these are too many.

        Raises `WireError` when the shard has fewer records than that.
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
                f"Worker {worker} reported {records_done} records of {task} as done, which has "
                f"{task.shard.records}. This is a defect of the worker; please report it."
            )
        gained = records_done - record.reported
        if gained <= 0 and task.shard.records and not progressed:
            return self._doing.still(worker, computing)
        self._doing.progress(worker)
        record.reported = max(record.reported, records_done)
        if task.type in RESUMABLE and gained > 0:
            record.losses = 0
            self._accounting.count_records(task, gained)
        return Answer(True, "progress")

    def report_done(self, worker: int, lease_id: int, ended_after: int | None = None) -> Outcome:
        """`worker` has finished the task. Sending it again is accepted, as a duplicate.

        Args:
            ended_after: so many records of the shard there were, and the source ended: no task of the same
                epoch is made any more.
        """
        record = self._doing.find(worker, lease_id)
        if record is None:
            return self._report_without_lease(worker, lease_id, done=True)
        task = record.task
        counted = record.reported if task.type in RESUMABLE else 0
        self._doing.reported(record, done=True)
        done = task.shard.records if ended_after is None else ended_after
        self._accounting.count_records(task, done - counted)
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
        """`worker` could not finish the task. `fatal`: trying again can't help, the job fails at once."""
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
        """`worker` will do the first `end` records of the leased shard and no more: the rest goes to a worker that
        waits. With 0, which says that it has begun with none of them, it hands the task back.

        Said again, it changes nothing. Raises `WireError` when the task can't be split there.
        """
        record = self._doing.find(worker, lease_id)
        if record is None:
            self._accounting.reports_refused += 1
            return Answer(False, self._doing.why_not_held(worker, lease_id))
        task = record.task
        if task.type is not TaskType.TRAINING or not record.reported <= end <= task.shard.records:
            raise WireError(
                f"Worker {worker} wants to do the first {end} records of {task}, of which it has reported "
                f"{record.reported}. Expected a training task, and from as many to {task.shard.records}. This is a "
                "defect of the worker; please report it."
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
            return Answer(True, f"{task} is handed back")
        record.move(TaskEvent.SPLIT_OFF)
        self._todo.split(record, end)
        return Answer(True, f"what is behind the first {end} records of {task} is split off")

    # ------------------------------------------------------------ a worker is lost, or hangs

    def worker_lost(self, worker: int) -> list[Task]:
        """Takes back the leases of a worker that is gone for good; answers what is left of its tasks."""
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
        """Takes over what a worker that leaves hands back: all that it has done is reported, its callbacks ended."""
        self._doing.lose(worker)
        tasks = [task for _, task in self._take_all(worker, TaskEvent.HANDED_BACK, "the worker was asked to end")]
        self.results_kept(worker)
        return tasks

    def expire(self, now: float, waiting: bool = False) -> list[Lease]:
        """Takes back the leases of workers that made no progress for `lease_seconds`; answers those.

        Args:
            waiting: the workers wait for a parameter server that is lost, so that none can make progress: leases begin
                anew instead.
        """
        self._doing.tell_time(now)
        if waiting:
            self._doing.renew()
        error = f"no progress for {self._settings.lease_seconds:g} s"
        hung = self._doing.overdue()
        return [lease for worker in hung for lease, _ in self._take_all(worker, TaskEvent.LEASE_OVER, error)]

    def _take_all(self, worker: int, event: TaskEvent, error: str) -> list[tuple[Lease, Task]]:
        """Takes back all leases of `worker`; answers them, oldest first, with what is left to do."""
        records = self._doing.held_by(worker)
        taken: list[tuple[Lease, Task]] = []
        # From the newest to the oldest, each to the front of the queue: there they stand in their order.
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

    # ------------------------------------------------------------ an attempt is over

    def _end_attempt(
        self, record: TaskRecord, worker: int, event: TaskEvent, error: str, traceback: str = ""
    ) -> TaskEvent:
        """Decides what becomes of a task that its worker did not finish; answers what happened."""
        task = record.task
        record.attempts.append(Attempt(worker, task.shard, event, error, traceback))
        # Where `feed` shuffles, a worker can't tell which records are done.
        exact = event is TaskEvent.HANDED_BACK and bool(record.reported or not record.heard)
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

    # ------------------------------------------------------------ what the master says

    def stop_training(self, reason: str) -> None:
        """No new training task: those that are TODO are dropped, those that are DOING are finished."""
        if not self._epochs.done and self._epochs.stop_reason is None:
            self._stop(reason)

    def drop_training(self) -> None:
        """After `stop_training`: nobody will finish what was DOING then, either. No lease may be out."""
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
        """Drops the calls that are TODO; answers their numbers. Those that are DOING are finished."""
        dropped = self._todo.remove_all(TaskType.FUNCTION)
        for record in dropped:
            record.move(TaskEvent.FUNCTIONS_CANCELLED)
        unmade = self._functions.cancel()
        self._closed[TaskType.FUNCTION][TaskState.DROPPED] += len(dropped) + len(unmade)
        return [*(record.task.function for record in dropped), *unmade]
