"""One job as a pure state machine: events come in, answers and effects go out. No threads, clock, gRPC or Keras.

A method marked `@event` is an event, and what it returns is the answer. What it changes is persisted before the answer
leaves, and whoever waits wakes up: `MasterServer` carries both out, so that no method has to ask for it. The
transitions of tasks are the table `TRANSITIONS` in task.py.

Times are arguments, in seconds of one monotonic clock.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from elasticcb.errors import (
    CallbackWarning,
    ClusterLostError,
    DataError,
    ElasticCBError,
    JobFailedError,
    JobOverError,
    UsageError,
)
from elasticcb.master.batch_log import BatchEvent, BatchLog
from elasticcb.master.evaluation import EpochStates, EvaluationRounds
from elasticcb.master.events import Effects, Wake, event
from elasticcb.master.gathering import Gathering
from elasticcb.master.job_history import JobHistory
from elasticcb.master.members import Member, Role, ServedCluster, Totals, Wish
from elasticcb.master.roster import Roster
from elasticcb.master.snapshot import JobSnapshot
from elasticcb.master.speeds import Speeds
from elasticcb.master.stragglers import Split, plan_split
from elasticcb.master.task import (
    Answer,
    DecisionKind,
    Lease,
    Milestone,
    Outcome,
    Task,
    TaskDecision,
    TaskResult,
    TaskState,
    TaskType,
)
from elasticcb.master.task_queue import TaskQueue
from elasticcb.process.wording import how_many
from elasticcb.settings import Command, JobSettings, Updates

if TYPE_CHECKING:
    from elasticcb.data.unbounded import Partition
    from elasticcb.master.callback_arrays import SharedCallbacks
    from elasticcb.master.journal import Memory
    from elasticcb.master.prediction_output import PredictionOutput
    from elasticcb.master.stream_ranges import Period
    from elasticcb.model.metric_messages import Outputs
    from elasticcb.process.stats import Stats
    from elasticcb.sharding.partition import ServerPlace

logger = logging.getLogger(__name__)

LATE = "its job has ended"
OTHERS_FIRST = "other workers come first"
_STORY = 50  # events that the error of a bug tells


def _after_decision(machine: JobMachine, decision: TaskDecision) -> Wake | None:
    if decision.lease is None:
        return None
    return Wake.NOBODY if machine.gathering is None else Wake.ALL  # for those that come later


def _after_report(machine: JobMachine, outcome: Outcome) -> Wake:
    queue, task = machine.queue, outcome.task
    concerns_all = queue is None or queue.is_idle or queue.has_returned or queue.wants_save
    if concerns_all or (task is not None and task.type is TaskType.FUNCTION):
        return Wake.ALL
    return Wake.DRIVER  # nothing to hand out resulted


def _if_any(machine: JobMachine, answer: object) -> Wake | None:
    return Wake.ALL if answer else None


class JobMachine:
    """The state of one job, and of the processes that run one job after another.

    Args:
        separate: whether workers are processes; threads never count as hung.
        settings: settings of the job; None before the first one.
        datasets: pickled functions that create per-worker datasets, by number.

    Attributes:
        waiting: ids of the workers that wait for a task.
        status: fields of the snapshot that the driving thread sets.
        queue: None until the model is built.
        gathering: None unless each round is of all workers that train.
        cluster: what workers need to know of the servers; None until these hold the model.
        find_index: returns the data reader's index of a file, by mode and name; b"" while unknown.
        lost_ps: when each lost server was lost, by index, until its replacement holds the model.
        wish: the last request to change the number of servers.
        checkpoint_written: when the newest checkpoint was written, or the job started.
        exported: when the newest export for serving was complete; None: there is none.
        calls, results: of FUNCTION tasks by id: functions still to call; results until fetched.
        prediction_output: receives predictions instead of `predictions`: outputs by batch, by first unit of a task.
        error: an error found while answering a call; ends the job.
    """

    def __init__(
        self,
        roster: Roster,
        separate: bool = True,
        number: int = 0,
        settings: JobSettings | None = None,
        program: bytes = b"",
        datasets: Mapping[int, bytes] | None = None,
        started: float = 0.0,
    ) -> None:
        self.roster, self.separate = roster, separate
        self.waiting: set[int] = set()
        self.stats: dict[int, Stats] = {}
        self.closing = False
        self.number, self.settings = number, settings
        self.program, self.datasets, self.started = program, {} if datasets is None else datasets, started
        self.checkpoint_written = started
        self.exported: float | None = None
        self.status = JobSnapshot()
        self.speeds = Speeds()
        self.history = JobHistory()
        self.evaluated_before = 0  # records, before the last round
        self.start_version = 0
        self.queue: TaskQueue | None = None
        command, updates = (None, None) if settings is None else (settings.command, settings.training.updates)
        self.gathering = Gathering() if command is Command.TRAIN and updates is Updates.SYNC else None
        self.epoch_version = 0  # of the model when the current epoch began
        self.shared_callbacks: SharedCallbacks | None = None
        self.cluster: ServedCluster | None = None
        self.rounds = EvaluationRounds()
        self.batch_log = BatchLog()
        self.find_index: Callable[[str, str], bytes] = lambda mode, file: b""
        self.lost_ps: dict[int, float] = {}
        self.wish: Wish | None = None
        self.version = 0
        self.loss: float | None = None  # mean over the batches of the last report
        self.totals = Totals()
        self.autoscales = False
        self.epoch_states = EpochStates()
        self.calls: dict[int, bytes] = {}
        self.results: dict[int, bytes] = {}
        self.prediction_output: PredictionOutput | None = None
        self.predictions: dict[int, list[Outputs]] = {}
        self.error: Exception | None = None
        self.over = False
        self._effects = Effects()
        self.story: deque[tuple[Any, ...]] = deque(maxlen=_STORY)  # the last events
        self._warned: set[str] = set()  # warned subjects
        self._roster_before: dict[str, Any] = {}  # when processes were last checked

    def next_job(
        self, settings: JobSettings, program: bytes, datasets: Mapping[int, bytes] | None, started: float
    ) -> JobMachine:
        """The machine of the next job of the same processes."""
        following = JobMachine(self.roster, self.separate, self.number + 1, settings, program, datasets, started)
        following.waiting, following.stats, following.closing = self.waiting, self.stats, self.closing
        return following

    @property
    def ready(self) -> bool:
        """Whether the servers hold the model and tasks are handed out."""
        return self.cluster is not None and self.queue is not None and not self.closing

    # ------------------------------------------------------------ events and effects

    def changed(self, wakes: Wake = Wake.ALL) -> None:
        """Something has changed that the journal keeps, or that these threads wait for."""
        self._effects.changed = True
        self._effects.wake = max(wakes, self._effects.wake)

    def persist(self, **facts: Any) -> None:
        """Adds these to what the journal gets: fields of `Memory`, by name."""
        self._effects.changed = True
        self._effects.facts.update(facts)

    def print(self, text: str) -> None:
        """Prints a line about the job to the user."""
        self._effects.lines.append(text)

    def take_effects(self) -> Effects:
        """Removes and returns the effects to carry out now."""
        taken, self._effects = self._effects, Effects()
        return taken

    def to_dict(self) -> dict[str, Any] | None:
        """What another master of the job needs, as JSON values, besides facts and metric states of tasks; None before
        tasks are handed out.

        Nothing is kept of a failed task and of what comes after: a resumed job tries it again.
        """
        if self.queue is None or self.queue.failure is not None:
            return None
        losses = self.roster.losses
        return {
            "queue": self.queue.to_dict(),
            "version": self.version,
            "totals": {
                **self.totals.to_dict(),
                **{role.name: [losses.lost[role], losses.replaced[role]] for role in Role},
            },
            "roster": self.roster.to_dict(),
            "next_id": self.roster.next_id,
        }

    # ------------------------------------------------------------ what ends the job

    def raise_error(self) -> None:
        """Raises an error found while answering calls, or when the cluster was closed."""
        if self.closing:  # no process may be started any more
            raise JobFailedError("The cluster was closed before the job finished.")
        if self.error is not None:
            raise self.error

    def raise_if_nobody_is_left(self) -> None:
        """Raises if predictions must be repeated but all workers have ended their callbacks and take no more tasks."""
        if self.queue is None or not self.queue.has_returned or self.roster.any_left(Role.WORKER, self.number):
            return
        tasks = self.queue.counts()[TaskType.PREDICTION][TaskState.TODO]
        raise ClusterLostError(
            f"{how_many(tasks, 'prediction task')} must be repeated, but no worker is left. A worker was lost before "
            "the `on_predict_end` hooks of its callbacks ran, the other workers have finished, and all restarts are "
            "used up. Run the job again with more restarts (max_worker_restarts)."
        )

    def check_is_present(self, job: int) -> None:
        """Raises `JobOverError` when the process belongs to another job."""
        if job != self.number:
            raise JobOverError(f"Job {job} is over; the current job is {self.number}.")

    def check_under_way(self) -> None:
        """Raises `UsageError` when the job can't be scaled because it has not started or is over."""
        if self.closing or self.over:
            raise UsageError("The job is over and can't be scaled.")
        if self.queue is None or self.settings is None:
            raise UsageError("The job is starting and can't be scaled yet. Try again in a few seconds.")

    @event()
    def fail(self, error: Exception) -> None:
        """Ends the job with this error."""
        self.error = error

    @event()
    def finish(self) -> None:
        """Marks the job as having no more tasks."""
        if self.queue is not None:
            self.queue.finish()
        self.over = True

    @event()
    def close(self) -> None:
        """No more jobs will come."""
        self.closing = True

    # ------------------------------------------------------------ processes

    def seen(self, id: int, now: float) -> None:
        """A heartbeat of a process. Raises `UsageError` when it does not belong to the job."""
        sighting = self.roster.seen(id, now)
        if not sighting.accepted:
            raise UsageError(f"The master refuses process {id}: {sighting.reason}.")

    def has(self, id: int) -> bool:
        """Whether a process works on the current job."""
        return self.roster.job_of(id) == self.number

    @event()
    def idle(self, id: int, now: float) -> None:
        """A process has finished its job."""
        self.seen(id, now)
        if self.queue is not None and self.has(id):
            self.queue.results_kept(id)
        self.roster.idle(id)

    @event()
    def register(self, role: Role, index: int, address: str, pid: int, host: str, now: float, job: int) -> Member:
        """A process registers for a job. Raises `JobOverError`, and `UsageError` as `Roster.register`."""
        self.check_is_present(job)
        member = self.roster.register(role, index, address, pid, host, now, job)
        logger.info("%s joined", member)
        self.history.record_event("joined", f"{member} joined.")
        return member

    @event()
    def server_lost(self, index: int, now: float) -> None:
        """A server is lost; another will replace it."""
        self.lost_ps.setdefault(index, now)

    @event()
    def server_is_back(self, index: int, place: ServerPlace, complete: bool) -> bool:
        """The replacement of a lost server holds its part of the model, as the server left it if that is `complete`.
        Returns whether what it lacks is trained again."""
        self.lost_ps.pop(index, None)
        repeated = not complete and self.queue is not None and self.queue.updates_lost()
        if self.cluster is not None:
            servers = [*self.cluster.servers]
            servers[index] = place
            self.cluster = replace(self.cluster, servers=servers)
            self.persist(servers=servers)
            self.history.record_event("recovery", f"Parameter server {index} has its part of the model again.")
        return repeated

    @event()
    def servers_have_moved(self, servers: Sequence[ServerPlace], map_version: int) -> None:
        """These servers hold the model from now on."""
        if self.cluster is not None:
            self.cluster = replace(self.cluster, servers=tuple(servers), map_version=map_version)

    @event()
    def servers_have_saved(self, mark: int, written: bool) -> None:
        """The servers have saved what was reported before `mark`, or can't; as in `TaskQueue.saved`."""
        if self.queue is not None:
            self.queue.saved(mark, written)

    @property
    def newest_server(self) -> int:
        """Id of the newest server that holds a part of the model; that of a replacement is higher than all before."""
        return 0 if self.cluster is None else max((place.id for place in self.cluster.servers), default=0)

    def serves(self, map_version: int) -> bool:
        """Whether all servers hold the model, by a shard map of at least this version."""
        known = self.cluster is not None and self.cluster.map_version >= map_version
        return known and not self.missing_servers

    @property
    def missing_servers(self) -> list[int]:
        """Indexes of the lost servers whose parts of the model are unavailable."""
        in_use = 0 if self.cluster is None else len(self.cluster.servers)
        return [index for index in self.lost_ps if index < in_use]

    @event(_if_any)
    def processes_checked(self) -> bool:
        """Missing processes were requested, and some may have ended. Returns whether that has changed the roster."""
        before, self._roster_before = self._roster_before, self.roster.to_dict()
        return self._roster_before != before

    @event()
    def worker_lost(self, worker: int) -> None:
        """A worker is lost; its tasks are requeued."""
        if self.queue is not None:
            _log_back(self.queue.worker_lost(worker))
        self._forget(worker)

    @event()
    def worker_left(self, member: Member) -> None:
        """A process was asked to stop: it has reported what is done, and its tasks are requeued."""
        if self.queue is not None and member.role is Role.WORKER:
            _log_back(self.queue.worker_left(member.id))
        if member.role is Role.WORKER:
            self._forget(member.id)

    @event()
    def left(self, id: int) -> None:
        """A process exited normally."""
        self.roster.left(id)
        if self.queue is not None:
            self.queue.worker_lost(id)

    def _forget(self, worker: int) -> None:
        self.speeds.forget(worker)
        member = self.roster.find(worker)
        if member is not None:
            self.history.left(member.index)

    @event()
    def end_autoscaling(self, reason: str) -> None:
        """Stops autoscaling; the number of workers stays."""
        self.autoscales = False
        self.persist(autoscale=False)
        self.print(f"Autoscale: off, because {reason}.")

    # ------------------------------------------------------------ tasks

    @event(_after_decision)
    def get_task(self, worker: int, held: Any, now: float) -> TaskDecision:
        """A task for `worker`, which already holds `held` leases; or why there is none."""
        self.seen(worker, now)
        if self.closing or not self.has(worker):
            return TaskDecision(DecisionKind.FINISHED, None, "the job is over")
        if self.queue is None:
            return TaskDecision(DecisionKind.WAIT, None, "the master is starting")
        if self.gathering is not None:
            up = [member.id for member in self.roster.up(Role.WORKER)]
            if self.gathering.asks(worker, self.queue, up, self.roster.size(Role.WORKER), now):
                return TaskDecision(DecisionKind.WAIT, None, OTHERS_FIRST)
        decision = self.queue.get_task(worker, now, held)
        if decision.lease is not None:
            if self.gathering is not None:
                self.gathering.gets(worker, self.queue)
            member = self.roster.member(worker)
            if member is not None:
                self.history.began(decision.lease, member.index)
        return decision

    @event(_if_any)
    def stream_grew(self, seen: Mapping[str, Partition], now: float, period: Period | None) -> bool:
        """What is there of a stream's partitions by now. Returns whether somebody has to act on it."""
        if self.queue is None or self.queue.stream is None or self.over:
            return False
        try:
            story = self.queue.grow(seen, now, period)
        except DataError as error:
            self.error = error
            return True
        if story:
            self.warn(CallbackWarning("lost records of the stream", story, 0))
        return self.queue.has_milestones or (bool(self.waiting) and self.queue.stream.is_ready)

    @event(_if_any)
    def end_epoch(self, epoch: int) -> bool:
        """This epoch of a stream gets no more records. Returns whether that is news."""
        return self.queue is not None and self.queue.end_epoch(epoch)

    def must_tell(self, worker: int, decision: TaskDecision) -> bool:
        """Whether a worker must be told now that there is no task for it: until then, others wait for its batches."""
        if self.gathering is None or self.queue is None or decision.reason == OTHERS_FIRST:
            return False
        return not self.gathering.is_told(worker, self.queue)

    def waits_for_task(self, worker: int, decision: TaskDecision) -> None:
        """The answer to a worker is that there is no task for it now."""
        if self.gathering is not None and self.queue is not None and decision.reason != OTHERS_FIRST:
            self.gathering.has_none(worker, self.queue)

    @property
    def peers(self) -> list[int]:
        """Ids of the workers whose movements the first round of an epoch waits for."""
        if self.gathering is None or self.queue is None:
            return []
        return self.gathering.peers(self.queue, [member.id for member in self.roster.up(Role.WORKER)])

    def idle_workers(self) -> list[int]:
        """Workers that wait for a task and hold none."""
        if self.queue is None:
            return []
        return [each for each in self.waiting if self.roster.member(each) is not None and not self.queue.leases(each)]

    def split_for(self, worker: int) -> Split | None:
        """How `worker` should split its task for idle workers, if it should."""
        queue = self.queue
        if not self.waiting or queue is None or queue.has_returned:
            return None
        idle = self.idle_workers()
        return plan_split(worker, queue.batches_left(), idle, self.speeds.paces) if idle else None

    @event()
    def split(self, worker: int, lease: int, end: int, now: float) -> Answer:
        """`worker` will only process the first `end` records of its lease."""
        self.seen(worker, now)
        if self.queue is None or not self.has(worker):
            return Answer(False, LATE)
        answer = self.queue.split(worker, lease, end)
        self.queue.drop_training()
        logger.info("Worker %d gives: %s", worker, answer.reason)
        return answer

    @event(Wake.NOBODY)
    def report_progress(
        self,
        worker: int,
        lease: int,
        now: float,
        records_done: int,
        progressed: bool = False,
        version: int = 0,
        loss: float | None = None,
        events: Sequence[BatchEvent] = (),
        warnings: Sequence[CallbackWarning] = (),
        computing: float = 0.0,
        servers: int = 0,
        timed_batches: int = 0,
        batch_seconds: float = 0.0,
    ) -> Answer:
        """A heartbeat with a worker's progress on a lease, as in `TaskQueue.report_progress`; 0: it has none.

        Args:
            loss: the mean over the batches since the last report.
            servers: `newest_server` when the first of these batches began.
        """
        self.seen(worker, now)
        if not self.has(worker):
            return Answer(False, LATE)
        self.reached_version(version)
        self.batch_log.add(worker, version, events)
        for warning in warnings:
            self.warn(warning)
        if loss is not None:
            self.loss = loss
        self._note_pace(worker, timed_batches, batch_seconds, now)
        if not lease or self.queue is None:
            return Answer(True, "no task")
        if not records_done:
            self.speeds.not_counted(worker, timed_batches)
        is_held = servers >= self.newest_server
        answer = self.queue.report_progress(worker, lease, records_done, now, progressed, computing, is_held)
        member = self.roster.member(worker)
        if answer.long_batch and member is not None and self.separate:
            text = f"Worker {member.index} {answer.reason}"
            self.warn(CallbackWarning(f"batch of lease {lease} from {records_done}", text, 0))
        return answer

    def _note_pace(self, worker: int, batches: int, seconds: float, now: float) -> None:
        """`worker` has trained `batches` batches in `seconds` seconds."""
        member = self.roster.member(worker)
        verdict = self.speeds.trained(worker, batches, seconds, now)
        if verdict and member is not None:
            self.print(f"Worker {member.index} {verdict}.")
            if member.index not in self.totals.stragglers:
                self.totals.stragglers.append(member.index)

    def note_stats(self, id: int, stats: Stats) -> None:
        """Statistics of a process since its start."""
        if self.roster.member(id) is not None:
            self.stats[id] = stats

    @event(lambda machine, is_newer: Wake.DRIVER if is_newer else None)
    def reached_version(self, version: int) -> bool:
        """The model is, or was, at `version`. Returns whether that is news."""
        is_newer = version > self.version
        self.version = max(version, self.version)
        return is_newer

    @event(_after_report)
    def report_done(self, worker: int, lease: int, now: float, result: TaskResult) -> Outcome:
        """A worker has finished a task. Predictions are kept here only without a `prediction_output`."""
        self.seen(worker, now)
        if self.queue is None or not self.has(worker):
            return Outcome(False, LATE)
        self.reached_version(result.version)
        outcome = self.queue.report_done(worker, lease, result.ended_after, result.servers >= self.newest_server)
        outcome = replace(outcome, ends_pass=self.queue.has_milestones)
        task = outcome.task
        if outcome.counts and task is not None:
            self.history.ended(lease, "done", task)
            self.totals.batches_skipped += result.batches_skipped
            self._note_bad_records(result)
            self._take_in(worker, task, result)
        return outcome

    def _note_bad_records(self, result: TaskResult) -> None:
        if not result.bad_records or self.settings is None:
            return
        self.totals.bad_records += result.bad_records
        self.warn(CallbackWarning("bad records", result.bad_record, 0))
        limit = self.settings.data.bad_records_limit
        if limit and self.totals.bad_records > limit:
            self.error = DataError(
                f"{how_many(self.totals.bad_records, 'record')} can't be converted; bad_records_limit allows "
                f"{limit}. One of them: {result.bad_record}\nCorrect the feed or the data, or raise the limit."
            )

    def _take_in(self, worker: int, task: Task, result: TaskResult) -> None:
        if task.type is TaskType.TRAINING:
            self.speeds.task_ended(worker)
            if result.restarts:
                self.epoch_states.forget(task.epoch)
                self._effects.restarted.append(task.epoch)
                self._effects.states = [each for each in self._effects.states if each[0] != task.epoch]
            self.epoch_states.add(task.epoch, result.states)
            self._effects.states.append((task.epoch, result.states))
        elif task.type is TaskType.EVALUATION:
            try:
                self.rounds.collect(task.evaluation_round, task.id, result.states, result.outputs, result.restarts)
            except ElasticCBError as error:
                self.error = error  # a finished task that is not counted would make the round wrong
        elif task.type is TaskType.PREDICTION:
            if self.prediction_output is None and result.outputs:
                self.predictions[task.shard.start] = result.outputs
        elif task.type is TaskType.FUNCTION:
            self.results[task.function] = result.function_result
            del self.calls[task.function]

    def take_predictions(self) -> dict[int, list[Outputs]]:
        """Removes and returns the predictions (possibly large): outputs by batch, by first unit of a task."""
        taken, self.predictions = self.predictions, {}
        return taken

    @event()
    def report_failed(self, worker: int, lease: int, now: float, error: str, traceback: str, fatal: bool) -> Outcome:
        """A worker failed in a task."""
        self.seen(worker, now)
        if self.queue is None or not self.has(worker):
            return Outcome(False, LATE)
        outcome = self.queue.report_failed(worker, lease, error, traceback, fatal)
        self.history.ended(lease, "failed")
        # The error that ends the job is shown by who raises it.
        level = logging.WARNING if self.queue.failure is None else logging.INFO
        logger.log(level, "Worker %d: %s: %s\n%s", worker, outcome.reason, error, traceback)
        return outcome

    @event(_if_any)
    def expire(self, now: float) -> list[Lease]:
        """Time passes: revokes the leases of workers that hang, and returns them."""
        if self.queue is None or not self.separate:  # a thread may be at a breakpoint, and can't be killed anyway
            return []
        return self.queue.expire(now, bool(self.missing_servers))

    @event(_if_any)
    def take_milestones(self) -> list[Milestone]:
        """What the driving thread must act on since the last call."""
        return [] if self.queue is None else self.queue.take_milestones()

    @event()
    def stop_training(self, reason: str, before_batch: bool = False) -> None:
        """Requests the end of training; `before_batch` as in `TaskQueue.stop_training`."""
        if self.queue is None or self.queue.stop_reason is None:  # a hook repeats its request at each call
            logger.info("Training was asked to stop: %s", reason)
        if self.queue is not None:
            self.queue.stop_training(reason, before_batch)

    @event()
    def evaluation_begins(self, number: int, version: int, sources: Sequence[tuple[str, int]]) -> None:
        """The servers keep a snapshot of `version` for the pass with this number, whose tasks are added."""
        assert self.queue is not None
        self.rounds.snapshot_taken(version)
        self.evaluated_before = self.queue.accounting.records_evaluated
        self.queue.add_evaluation(number, sources)

    @event()
    def epoch_ends(self, epoch: int, **facts: Any) -> None:
        """The hooks of an epoch's end have run; `facts` as in `persist`."""
        self.epoch_states.end_before(epoch + 1)  # only now: the journal keeps them until the epoch has ended
        self.persist(ended_epochs=epoch + 1, epoch_begun=False, **facts)
        self._effects.compacts = True

    @event(Wake.NOBODY)
    def epoch_begins(self, **facts: Any) -> None:
        """The hooks of an epoch's begin have run; `facts` as in `persist`."""
        self.persist(epoch_begun=True, **facts)

    @event()
    def release_epoch(self, epoch: int) -> None:
        """The hooks before an epoch have run, and the servers have what they changed: workers may get its tasks."""
        self.epoch_version = self.version
        if self.queue is not None:
            self.queue.release_epoch(epoch - 1)

    @event()
    def add_train_end(self) -> None:
        """Everything else is done: adds the TRAIN_END task."""
        assert self.queue is not None
        self.queue.add_train_end()

    @event(_if_any)
    def pause(self, who: str, why: str) -> bool:
        """Hands out no tasks for this reason of `who`; "": for none of it any more. Returns whether that changes
        anything."""
        return self.queue is not None and self.queue.pause(who, why)

    # ------------------------------------------------------------ messages to the user

    @event(Wake.NOBODY)
    def warn(self, warning: CallbackWarning) -> None:
        """Counts the warning; shows the first one of each subject."""
        self.totals.callback_errors += warning.errors
        if warning.subject not in self._warned:
            self._warned.add(warning.subject)
            self.print(warning.text)

    def set_status(self, **news: Any) -> None:
        """Sets fields of the snapshot, by name."""
        self.status = replace(self.status, **news)

    def note_progress(self, now: float) -> None:
        """Updates values that must be sampled regularly."""
        if self.settings is None or self.settings.command is not Command.TRAIN:
            return
        if self.status.seconds_to_first_step is None and self.version > self.start_version:
            self.set_status(seconds_to_first_step=now - self.started)
            self.persist(first_step=now - self.started)
        if self.queue is not None:
            self.speeds.note(now, self.queue)

    # ------------------------------------------------------------ after another master

    @event()
    def resume(self, memory: Memory) -> None:
        """Adopts an earlier master's knowledge of the training."""
        self.version = max(self.version, memory.version)
        totals = dict(memory.totals)
        if totals:
            for role in Role:
                self.roster.losses.count_earlier(role, *totals.pop(role.name))
            self.totals.count_earlier(totals)
        self.epoch_states.end_before(memory.ended_epochs)
        for epoch, tasks in memory.states.items():
            for states in tasks:
                self.epoch_states.add(epoch, states)

    @event()
    def take_over(self, memory: Memory, queue: TaskQueue, now: float) -> None:
        """Takes over the workers and servers of a killed master, with its queue."""
        assert memory.roster is not None
        self.queue = queue
        self.epoch_states.merging = frozenset(memory.merging_units)
        self.resume(memory)
        self.set_status(seconds_to_first_step=memory.first_step)
        self.roster.restore(memory.roster, now)


def _log_back(tasks: Sequence[Task]) -> None:
    for task in tasks:
        logger.info("%s is back in the queue", task)
