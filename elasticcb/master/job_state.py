"""The state of one job: what happens comes in, answers and effects come out; pure: no threads, clock, gRPC or Keras.

Times are seconds of one rising clock, and arguments.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from elasticcb.errors import (
    ClusterLostError,
    ElasticCBError,
    JobFailedError,
    JobOverError,
    UsageError,
)
from elasticcb.master.accounting import Speed
from elasticcb.master.batch_log import BatchEvent, BatchLog
from elasticcb.master.cluster_state import ServedCluster, ServerPlace, Totals, Wish
from elasticcb.master.decisions import Answer, DecisionKind, Outcome, TaskDecision
from elasticcb.master.evaluation import EvaluationRounds
from elasticcb.master.roster import Member, Role, Roster
from elasticcb.master.snapshot import JobSnapshot
from elasticcb.master.stragglers import Paces, Split, plan_split
from elasticcb.master.task import Task, TaskState, TaskType
from elasticcb.master.task_queue import TaskQueue
from elasticcb.settings import Command, JobSettings

if TYPE_CHECKING:
    from elasticcb.callbacks.warning import CallbackWarning
    from elasticcb.master.journal import Memory
    from elasticcb.master.prediction_output import PredictionOutput
    from elasticcb.model.metric_messages import Outputs
    from elasticcb.process.stats import Stats
    from elasticcb.sharding.bucket_map import BucketMap

logger = logging.getLogger(__name__)

LATE = "it is of a job that is over"


@dataclass
class Crew:
    """The processes of a cluster, over all its jobs.

    Attributes:
        waiting: workers that wait for a task.
        stats: by id of a process, what it said last of itself.
        closing: no job will come any more.
    """

    roster: Roster
    waiting: set[int] = field(default_factory=set)
    stats: dict[int, Stats] = field(default_factory=dict)
    closing: bool = False


@dataclass
class Effects:
    """What follows from changes of the state.

    Attributes:
        entries: for the journal, in their order; "states" are pairs of an epoch and metric states.
        shortens: whether the journal is to be made as short as it can be.
        lines: for the user.
        driver, everybody: whether to wake the thread that drives the job, and all that wait.
    """

    entries: list[dict[str, Any]] = field(default_factory=list)
    shortens: bool = False
    lines: list[str] = field(default_factory=list)
    driver: bool = False
    everybody: bool = False


class JobState:
    """One job, as workers, servers and people see it. `Guarded` holds the one of the present job.

    Args:
        crew: the processes that do it.
        number: of the job, from 1; 0: there is none yet.
        settings: of the job; None before the first one.
        program: what it runs instead of a model file (elasticcb/model/program.py).
        datasets: functions that make per-worker datasets, pickled, by number.
        started: when the job began.

    Attributes:
        told: what the thread that drives the job tells people of it.
        evaluated_before: records that were evaluated before the last round.
        start_version: of the model, when the job began.
        queue: None until the model is built.
        cluster: what workers must know of the servers; None until those hold the model.
        find_index: what the data reader knows of a file, by mode and name; b"" while it does not.
        lost_ps: when servers were lost in whose places no other holds the model yet, by place.
        wish: for another number of servers, the last one.
        checkpoint_written: when the newest checkpoint was, or the job began.
        loss: mean over the batches of the last report.
        autoscales: the number of workers follows the throughput.
        epoch_states: training metrics by epoch: sums; of `merging_units`, the states of each task.
        calls, results: of functions, by number: what to call, while it is not done; what came of it, until it is taken.
        prediction_output: takes predictions in place of `predictions`: by first unit of a task, outputs by batch.
        error: found while answering a call; ends the job.
        over: there are no more tasks in this job.
        has_journal: entries are written down.
    """

    def __init__(
        self,
        crew: Crew,
        number: int = 0,
        settings: JobSettings | None = None,
        program: bytes = b"",
        datasets: Mapping[int, bytes] | None = None,
        started: float = 0.0,
    ) -> None:
        self.crew, self.number, self.settings = crew, number, settings
        self.program, self.datasets, self.started = program, {} if datasets is None else datasets, started
        self.checkpoint_written = started
        self.told = JobSnapshot()
        self.speed = Speed()
        self.evaluated_before = 0
        self.start_version = 0
        self.queue: TaskQueue | None = None
        self.cluster: ServedCluster | None = None
        self.rounds = EvaluationRounds()
        self.batch_log = BatchLog()
        self.find_index: Callable[[str, str], bytes] = lambda mode, file: b""
        self.lost_ps: dict[int, float] = {}
        self.wish: Wish | None = None
        self.version = 0
        self.loss: float | None = None
        self.totals = Totals()
        self.paces = Paces()
        self.autoscales = False
        self.epoch_states: dict[int, dict[str, list[Any]]] = {}
        self.merging_units: frozenset[str] = frozenset()
        self.calls: dict[int, bytes] = {}
        self.results: dict[int, bytes] = {}
        self.prediction_output: PredictionOutput | None = None
        self.predictions: dict[int, list[Outputs]] = {}
        self.error: Exception | None = None
        self.over = False
        self.has_journal = False
        self._effects = Effects()
        self._warned: set[str] = set()  # subjects
        self._warnings: list[str] = []  # that nobody has seen
        self._noted_totals: dict[str, Any] = {}
        self._noted_roster: dict[str, Any] = {}

    @property
    def roster(self) -> Roster:
        return self.crew.roster

    @property
    def closing(self) -> bool:
        return self.crew.closing

    @property
    def ready(self) -> bool:
        """Whether the servers hold the model, and tasks are handed out."""
        return self.cluster is not None and self.queue is not None and not self.closing

    # ------------------------------------------------------------ effects

    def take_effects(self) -> Effects:
        """What is to be carried out now."""
        taken, self._effects = self._effects, Effects()
        return taken

    def wake(self) -> None:
        """All that wait are to look again."""
        self._effects.everybody = True

    def wake_driver(self) -> None:
        """Something changed that no worker waits for."""
        self._effects.driver = True

    def say(self, text: str) -> None:
        """Shows the user a line about the job."""
        self._effects.lines.append(text)

    def note(self, **entry: Any) -> None:
        """Writes down where the job stands, with `entry`. The job ends when that is not possible.

        Of a task that failed, nothing: when the job goes on, the task is to be tried again.
        """
        if self.has_journal and self.queue is not None and self.queue.failure is None:
            totals = self._all_totals()
            if totals != self._noted_totals:
                self._noted_totals = entry["totals"] = totals
            self._write(queue=self.queue.to_dict(leases=True), version=self.version, **entry)

    def note_roster(self) -> None:
        """Writes down who is there, if that has changed."""
        if self.has_journal and (roster := self.roster.to_dict()) != self._noted_roster:
            self._noted_roster = roster
            self._write(roster=roster, next_id=self.roster.next_id)

    def shorten_journal(self) -> None:
        """Makes it as short as it can be."""
        self._effects.shortens = True

    def journaled_states(self) -> list[tuple[int, dict[str, list[Any]]]]:
        """Epoch and metric states of all that a short journal holds of epochs that are not ended."""
        return [
            (epoch, {name: states})
            for epoch, by_name in self.epoch_states.items()
            for name, values in by_name.items()
            for states in (values if name in self.merging_units else [values])
        ]

    def _write(self, **entry: Any) -> None:
        if self.has_journal:
            self._effects.entries.append(entry)

    def _all_totals(self) -> dict[str, Any]:
        """What the summary tells beside the queue's accounting, as JSON values."""
        lost = {role.name: [self.roster.lost_count(role), self.roster.replaced_count(role)] for role in Role}
        return {**self.totals.to_dict(), **lost}

    # ------------------------------------------------------------ after another master

    def resume(self, memory: Memory) -> None:
        """Takes over what an earlier master knew of training."""
        self.version = max(self.version, memory.version)
        totals = dict(memory.totals)
        if totals:
            for role in Role:
                self.roster.count_earlier(role, *totals.pop(role.name))
            self.totals.count_earlier(totals)
        for epoch, tasks in memory.states.items():
            for states in tasks:
                self._add_epoch_states(epoch, states)

    def take_over(self, memory: Memory, queue: TaskQueue, now: float) -> None:
        """Goes on with the workers and servers of another master, which was killed, and with its queue."""
        assert memory.roster is not None
        self.queue, self.has_journal = queue, True
        self.merging_units = frozenset(memory.merging_units)
        self.resume(memory)
        self.roster.restore(memory.roster, now)
        self._noted_roster = self.roster.to_dict()

    # ------------------------------------------------------------ what ends the job

    def raise_error(self) -> None:
        """Raises what was found while calls were answered, and when the cluster was closed."""
        if self.closing:  # and nothing may be started any more
            raise JobFailedError("The cluster was closed before the job was done.")
        if self.error is not None:
            raise self.error

    def raise_if_nobody_is_left(self) -> None:
        """A worker whose callbacks have ended takes no task any more, although predictions may come back."""
        if self.queue is None or not self.queue.has_returned or self.roster.any_left(Role.WORKER, self.number):
            return
        tasks = self.queue.counts()[TaskType.PREDICTION][TaskState.TODO]
        raise ClusterLostError(
            f"{tasks} prediction tasks have to be done again, and no worker is left to do them: one was lost before "
            "the `on_predict_end` of its callbacks had run, the others have run theirs, and all restarts are used up. "
            "Run the job again, with more restarts (--max_worker_restarts)."
        )

    def check_is_present(self, job: int) -> None:
        """Raises `JobOverError` when the process is of another job."""
        if job != self.number:
            raise JobOverError(f"Job {job} is over; the present one is {self.number}.")

    def seen(self, id: int, now: float) -> None:
        """A process gives a sign of life. Raises `UsageError` when it is not one of the job."""
        sighting = self.roster.seen(id, now)
        if not sighting.accepted:
            raise UsageError(f"The master refuses process {id}: {sighting.reason}.")

    def has(self, id: int) -> bool:
        """Whether a process does the present job."""
        return self.roster.job_of(id) == self.number

    # ------------------------------------------------------------ what the user hears

    def warn(self, warning: CallbackWarning) -> None:
        """Counts it; the first of each subject is to be shown."""
        self.totals.callback_errors += warning.errors
        if warning.subject not in self._warned:
            self._warned.add(warning.subject)
            self._warnings.append(warning.text)

    def tell(self, **news: Any) -> None:
        """What people are to see of the job besides, by name of a field of the snapshot."""
        self.told = replace(self.told, **news)

    def note_progress(self, now: float) -> None:
        """What can be told only by one who looks again and again."""
        if self.settings is None or self.settings.command is not Command.TRAIN:
            return
        if self.told.seconds_to_first_step is None and self.version > self.start_version:
            self.tell(seconds_to_first_step=now - self.started)
        if self.queue is not None:
            self.speed.note(now, sum(self.queue.accounting.records_trained.values()))

    def take_warnings(self) -> list[str]:
        """What is new to the user."""
        taken, self._warnings = self._warnings, []
        return taken

    # ------------------------------------------------------------ processes

    def idle(self, id: int, now: float) -> None:
        """A process is done with its job."""
        self.seen(id, now)
        if self.queue is not None and self.has(id):
            self.queue.results_kept(id)
        self.roster.idle(id)
        self.wake()

    def register(self, member: Member) -> None:
        """A process is there."""
        logger.info("%s is there", member)
        self.note_roster()
        self.wake()

    def server_lost(self, index: int, now: float) -> None:
        """Another is to take its place."""
        self.lost_ps.setdefault(index, now)
        settings = self.settings
        if settings is not None and settings.cluster.ps_replicas and settings.command is Command.TRAIN:
            before = (index - 1) % settings.cluster.num_ps
            self.say(f"Parameter server {before} has no replica until parameter server {index} is back.")
        self.wake()

    def server_is_back(self, index: int, place: ServerPlace) -> None:
        """Another server in this place holds the model."""
        self.lost_ps.pop(index, None)
        if self.cluster is not None:
            servers = [*self.cluster.servers]
            servers[index] = place
            self.cluster = replace(self.cluster, servers=servers)
            self._write(servers=servers)
        self.wake()

    def servers_have_moved(self, servers: Sequence[ServerPlace], buckets: BucketMap) -> None:
        """These servers hold the model from now on."""
        if self.cluster is not None:
            self.cluster = replace(self.cluster, servers=tuple(servers), buckets=buckets)
        self.wake()

    @property
    def servers_in_use(self) -> int:
        """How many servers hold a part of the model."""
        return 0 if self.cluster is None else len(self.cluster.servers)

    def serves(self, map_version: int) -> bool:
        """Whether all servers hold the model, by a map of at least this version."""
        known = self.cluster is not None and self.cluster.map_version >= map_version
        return known and not any(index < self.servers_in_use for index in self.lost_ps)

    def worker_lost(self, worker: int) -> None:
        """Its tasks go back."""
        if self.queue is not None:
            _log_back(self.queue.worker_lost(worker))
        self.paces.forget(worker)
        self.note()
        self.wake()

    def worker_left(self, member: Member) -> None:
        """It was asked to end, and has put down its work."""
        if self.queue is not None and member.role is Role.WORKER:
            _log_back(self.queue.worker_left(member.id))
        self.paces.forget(member.id)

    def left(self, id: int) -> None:
        """A process has ended, as it should."""
        self.roster.left(id)
        if self.queue is not None:
            self.queue.worker_lost(id)

    def end_autoscaling(self, reason: str) -> None:
        """The number of workers stays what it is."""
        self.autoscales = False
        self.note(autoscale=False)
        self.say(f"Autoscale: off, since {reason}.")

    # ------------------------------------------------------------ tasks

    def get_task(self, worker: int, held: Any, now: float) -> TaskDecision:
        """A task for `worker`, which has those leases already; or why there is none."""
        self.seen(worker, now)
        if self.closing or not self.has(worker):
            return TaskDecision(DecisionKind.FINISHED, None, "the job is over")
        if self.queue is None:
            return TaskDecision(DecisionKind.WAIT, None, "the master is starting")
        decision = self.queue.get_task(worker, now, held)
        if decision.kind is DecisionKind.TASK:
            self.note()
        return decision

    def idle_workers(self) -> list[int]:
        """Those that wait for a task, and have none."""
        if self.queue is None:
            return []
        return [
            each for each in self.crew.waiting if self.roster.member(each) is not None and not self.queue.leases(each)
        ]

    def split_for(self, worker: int) -> Split | None:
        """What `worker` should leave to workers that wait."""
        queue = self.queue
        if not self.crew.waiting or queue is None or queue.has_returned:
            return None
        idle = self.idle_workers()
        return plan_split(worker, queue.batches_left(), idle, self.paces) if idle else None

    def split(self, worker: int, lease: int, end: int, now: float) -> Answer:
        """`worker` will do the first `end` records of its lease, and no more."""
        self.seen(worker, now)
        if self.queue is None or not self.has(worker):
            return Answer(False, LATE)
        answer = self.queue.split(worker, lease, end)
        self.note()
        logger.info("Worker %d gives: %s", worker, answer.reason)
        self.wake()
        return answer

    def note_pace(self, worker: int, batches: int, seconds: float) -> None:
        """`worker` has trained so many batches in so many seconds."""
        member = self.roster.member(worker)
        verdict = self.paces.note(worker, batches, seconds)
        if verdict is not None and member is not None:
            self._warnings.append(f"Worker {member.index} {verdict.reason}.")
            if member.index not in self.totals.stragglers:
                self.totals.stragglers.append(member.index)

    def note_stats(self, id: int, stats: Stats) -> None:
        """What a process has counted since it started."""
        if self.roster.member(id) is not None:
            self.crew.stats[id] = stats

    def reached_version(self, version: int) -> None:
        """The model is at `version`, or was."""
        if version > self.version:
            self.version = version
            self.wake_driver()

    def heard_of_batches(
        self,
        worker: int,
        version: int,
        loss: float | None,
        events: Sequence[BatchEvent],
        warnings: Sequence[CallbackWarning],
    ) -> None:
        """What a worker tells beside the progress of its task."""
        self.reached_version(version)
        self.batch_log.add(worker, version, events)
        for warning in warnings:
            self.warn(warning)
        if loss is not None:
            self.loss = loss

    def report_done(
        self,
        worker: int,
        lease: int,
        now: float,
        version: int,
        states: dict[str, list[Any]],
        outputs: list[Outputs],
        gradients_rejected: int,
        batches_skipped: int,
        ended_after: int | None,
        result: bytes,
    ) -> Outcome:
        """A worker has done a task. Predictions are kept here only where there is no `prediction_output`."""
        self.seen(worker, now)
        if self.queue is None or not self.has(worker):
            return Outcome(False, LATE)
        self.reached_version(version)
        outcome = self.queue.report_done(worker, lease, ended_after)
        task = outcome.task
        if outcome.counts and task is not None:
            self.totals.gradients_rejected += gradients_rejected
            self.totals.batches_skipped += batches_skipped
            self._take_in(task, states, outputs, result)
            self.note(**({"states": [(task.epoch, states)]} if task.type is TaskType.TRAINING else {}))
        if self.queue.is_idle or self.queue.has_returned or (task is not None and task.type is TaskType.FUNCTION):
            self.wake()
        else:  # nothing that could be handed out has come of it
            self.wake_driver()
        return outcome

    def _take_in(self, task: Task, states: dict[str, list[Any]], outputs: list[Outputs], result: bytes) -> None:
        if task.type is TaskType.TRAINING:
            self._add_epoch_states(task.epoch, states)
        elif task.type is TaskType.EVALUATION:
            try:
                self.rounds.collect(task.evaluation_round, task.id, states, outputs)
            except ElasticCBError as error:
                self.error = error  # a task that is done but not counted: the round can't be right any more
        elif task.type is TaskType.PREDICTION:
            if self.prediction_output is None and outputs:
                self.predictions[task.shard.start] = outputs
        elif task.type is TaskType.FUNCTION:
            self.results[task.function] = result
            del self.calls[task.function]

    def take_predictions(self) -> dict[int, list[Outputs]]:
        """What the job predicted, by first unit of a task: outputs by batch. They may be large, and are not kept."""
        taken, self.predictions = self.predictions, {}
        return taken

    def report_failed(self, worker: int, lease: int, now: float, error: str, traceback: str, fatal: bool) -> Outcome:
        """A worker has failed in a task."""
        self.seen(worker, now)
        if self.queue is None or not self.has(worker):
            return Outcome(False, LATE)
        outcome = self.queue.report_failed(worker, lease, error, traceback, fatal)
        self.note()
        logger.warning("Worker %d: %s: %s\n%s", worker, outcome.reason, error, traceback)
        self.wake()
        return outcome

    def stop_training(self, reason: str) -> None:
        """Training is to end."""
        if self.queue is None or self.queue.stop_reason is None:  # a hook that asked for it asks each time
            logger.info("Training is asked to stop: %s", reason)
        if self.queue is not None:
            self.queue.stop_training(reason)
            self.note()
        self.wake()

    def finish(self) -> None:
        """There are no more tasks."""
        if self.queue is not None:
            self.queue.finish()
        self.over = True
        self.wake()

    def _add_epoch_states(self, epoch: int, states: Mapping[str, Sequence[Any]]) -> None:
        total = self.epoch_states.setdefault(epoch, {})
        for name, values in states.items():
            if name in self.merging_units:
                total.setdefault(name, []).append(values)
                continue
            before = total.get(name)
            total[name] = [
                np.asarray(value, np.float64) + (before[i] if before is not None else 0)
                for i, value in enumerate(values)
            ]


def _log_back(tasks: Sequence[Task]) -> None:
    for task in tasks:
        logger.info("%s goes back", task)
