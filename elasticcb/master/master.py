"""The one process that owns the tasks, the evaluation rounds and the job's state.

Its workers and servers do one job after another: a command has one, `elasticcb.Cluster` as many as it is asked.

gRPC threads feed the task queue under one lock. Everything slow (Keras, parameter servers, files,
callbacks) happens in the thread that calls `run`, which wakes up when the queue reaches something.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from elasticcb.callbacks.warning import CallbackWarning
from elasticcb.cluster.base import ClusterBackend
from elasticcb.errors import ClusterLostError, ElasticCBError, JobFailedError, JobOverError, UsageError, WireError
from elasticcb.master.batch_log import BatchEvent, BatchLog
from elasticcb.master.cluster_state import Cluster, Recoveries, ServerPlace, Totals
from elasticcb.master.conditions import Changes
from elasticcb.master.decisions import Answer, Decision, DecisionKind, Outcome
from elasticcb.master.evaluation import EvaluationRounds
from elasticcb.master.journal import Journal, Memory, states_entry
from elasticcb.master.metrics_server import MetricsServer
from elasticcb.master.prediction_output import PredictionOutput
from elasticcb.master.processes import Processes
from elasticcb.master.roster import Member, Role, Roster
from elasticcb.master.server_scaling import ServerScaling
from elasticcb.master.servicer import MasterServicer
from elasticcb.master.stragglers import Paces, Split, plan_split
from elasticcb.master.task import Task, TaskState, TaskType
from elasticcb.master.task_queue import TaskQueue
from elasticcb.master.watchdog import Watchdog
from elasticcb.model.metric_messages import Outputs
from elasticcb.process.stats import Stats
from elasticcb.proto.elasticcb_pb2_grpc import add_MasterServicer_to_server
from elasticcb.rpc.calls import Server
from elasticcb.rpc.health import HealthServer
from elasticcb.rpc.health_names import MASTER_SERVICE
from elasticcb.security.credentials import OPEN, Access, is_loopback
from elasticcb.settings import MOST_WORKERS, ClusterSettings, Command, JobSettings
from elasticcb.sharding.bucket_map import BucketMap
from elasticcb.status import JobStatus

logger = logging.getLogger(__name__)

_LARGEST_MESSAGE = 2**31 - 1  # bytes; protobuf takes no more
_TICK_SECONDS = 0.25  # between looks at processes and deadlines when nothing happens
_LATE = "it is of a job that is over"


class Master:
    """The present job's state, as workers and servers see it through gRPC.

    Args:
        cluster: how many processes, and where to listen.
        backend: starts and watches the processes.
        say: shows a line to the user.
        access: by which it and its processes know each other.

    The thread that drives the job (`job.py`) uses the attributes below while holding `changed`.
    """

    def __init__(self, cluster: ClusterSettings, backend: ClusterBackend, say: Any, access: Access = OPEN) -> None:
        self.changed = Changes()
        self.access = access
        self._show = say
        self._cluster_settings = cluster
        self._backend = backend
        self._jobs = 0
        self._program = b""
        self.datasets: dict[int, bytes] = {}  # functions that make per-worker datasets, pickled; for all jobs
        self.roster = Roster(cluster.num_workers, cluster.num_ps, cluster.max_worker_restarts, cluster.max_ps_restarts)
        self.processes = Processes(self.roster, backend, self._worker_lost, self._ps_lost, self.say)
        # Each worker may have a long poll under way and two more calls; so may each server.
        threads = 8 + 4 * (max(cluster.num_workers, MOST_WORKERS) + cluster.num_ps)  # those that are needed start
        host = cluster.host or backend.host
        self._server = Server(host, cluster.port, threads, access, _LARGEST_MESSAGE)
        exposed = access.exposed_at(host)
        if exposed:
            say(exposed)
        add_MasterServicer_to_server(MasterServicer(self, cluster.silence_seconds), self._server.grpc_server)
        self._watchdog = Watchdog(self, cluster.silence_seconds, backend.watches)
        self.closing = False  # no job will come any more
        self._interrupted = False  # somebody has asked for the end
        self._waiting: set[int] = set()  # workers that wait for a task
        self.stats: dict[int, Stats] = {}  # by id of a process, what it said last of itself
        self._reset()
        self._metrics: MetricsServer | None = None
        if cluster.metrics_port is not None:
            self._metrics = MetricsServer(self, host, cluster.metrics_port)
            exposed = "" if is_loopback(host) else ", to everybody on that network"
            say(f"Metrics are served at http://{self._metrics.address}/metrics{exposed}.")
        self._health: HealthServer | None = None
        if cluster.health_port is not None:
            self._health = HealthServer(host, cluster.health_port, MASTER_SERVICE, lambda: self.ready)
            say(f"Health checks are answered at {self._health.address}.")

    def _reset(self) -> None:
        self.settings: JobSettings | None = None
        self.describe: Callable[[float], JobStatus] | None = None
        self.queue: TaskQueue | None = None  # None until the model is built
        self.rounds = EvaluationRounds()
        self.batch_log = BatchLog()
        # What the data reader knows of a file, by mode and name; b"" while it does not.
        self.find_index: Callable[[str, str], bytes] = lambda mode, file: b""
        self._warned: set[str] = set()  # subjects
        self._unsaid: list[str] = []
        self.cluster: Cluster | None = None  # None until the servers hold the model
        self.server_scaling = ServerScaling(self)
        # When servers were lost in whose places no other holds the model yet, in seconds, by place.
        self.lost_ps: dict[int, float] = {}
        self.recoveries = Recoveries()
        self.version = 0
        self.loss: float | None = None  # mean over the batches of the last report
        self.totals = Totals()
        self.paces = Paces()
        self._noted_totals: dict[str, Any] = {}
        self.autoscales = False  # the number of workers follows the throughput
        self.epoch_states: dict[int, dict[str, list[Any]]] = {}  # training metrics by epoch: sums, or see below
        self.merging_units: frozenset[str] = frozenset()  # of these, the states of each task
        self.calls: dict[int, bytes] = {}  # FUNCTION: by number, what to call, while it is not done
        self.results: dict[int, bytes] = {}  # FUNCTION: by number, what came of it, until that is taken
        self.prediction_output: PredictionOutput | None = None  # takes them in place of the next
        self.predictions: dict[int, list[Outputs]] = {}  # by first unit of a task: outputs by batch
        self.error: Exception | None = None  # found while answering a call; ends the job
        self.over = False  # there are no more tasks in this job
        self.journal: Journal | None = None  # of a job that can be resumed
        self._noted_roster: dict[str, Any] = {}

    @property
    def address(self) -> str:
        return self._server.address

    def refused_calls(self) -> dict[str, int]:
        """How many calls it has refused, by reason in words."""
        return self._server.refused.counts()

    @property
    def ready(self) -> bool:
        """Whether the servers hold the model, and tasks are handed out."""
        return self.cluster is not None and self.queue is not None and not self.closing

    @property
    def metrics_address(self) -> str:
        """Where it serves its metrics; "" if it does not."""
        return "" if self._metrics is None else self._metrics.address

    @property
    def health_address(self) -> str:
        """Where it answers health checks; "" if it does not."""
        return "" if self._health is None else self._health.address

    @property
    def job(self) -> int:
        """The number of the present job, from 1; 0 before the first."""
        return self._jobs

    @property
    def patience_seconds(self) -> float:
        """Of calls to a server."""
        return self._cluster_settings.patience_seconds

    def say(self, text: str) -> None:
        """Shows the user a line about the job."""
        self._show(text)
        self._backend.note(text)

    def start(self) -> None:
        self._server.start()
        if self._backend.separate:  # a thread may stand at a breakpoint
            self._watchdog.start()

    def begin_job(
        self,
        settings: JobSettings,
        program: bytes = b"",
        describe: Callable[[float], JobStatus] | None = None,
    ) -> None:
        """Makes the processes begin a job; those of the last one are done with it.

        Args:
            program: what the job runs instead of a model file (elasticcb/model/program.py).
            describe: how the job looks to people at a time, in seconds.
        """
        with self.changed:
            self._reset()
            self.settings, self.describe = settings, describe
            self._program = program
            self.roster.recovers_ps = _recovers_ps(settings)
            self._jobs += 1
            self.changed.notify_all()

    def close(self) -> None:
        """Answers what waits, and tells everybody that no job will come any more."""
        with self.changed:
            self.closing = True
            self.changed.notify_all()

    def stop(self) -> None:
        """Ends the server."""
        self.close()
        self._watchdog.stop()
        self._server.stop()
        for server in (self._metrics, self._health):
            if server is not None:
                server.stop()

    def wait(self, seconds: float = _TICK_SECONDS) -> None:
        """For the thread that drives the job, holding `changed`: until something changed, at most for `seconds`."""
        self.changed.wait_as_driver(seconds)

    def shut_down(self, grace_seconds: float) -> None:
        """Ends all processes, by and by."""
        try:
            self.close()
            if not self._backend.watches:
                self.wait_until(lambda: not any(self.roster.up(role) for role in Role), grace_seconds)
            self._backend.stop(grace_seconds)
        finally:
            self.stop()

    def wait_until(self, condition: Callable[[], bool], seconds: float) -> None:
        """Waits for processes to end their work, and notes those that end themselves; gives up after `seconds`."""
        give_up = time.monotonic() + seconds
        with self.changed:
            while not condition() and time.monotonic() < give_up:
                self.wait()
                self.processes.note_ended()

    def start_processes(self) -> None:
        """Has those processes started that are missing. Threads wait until `tend` starts them: TensorFlow can't
        be imported by several at once, and the seeds that a model sets are those of the process."""
        if self._backend.separate:
            with self.changed:
                self.processes.start_missing(self.address)

    def tend(self) -> None:
        """Looks after processes and leases. Raises what ends the job."""
        with self.changed:
            if self.closing:  # and nothing may be started any more
                raise JobFailedError("The cluster was closed before the job was done.")
            if self.error is not None:
                raise self.error
            if self.queue is not None:
                self._raise_failure()
                # A thread without progress may stand at a breakpoint; nobody could end it anyway.
                for lease in self.queue.expire(time.monotonic()) if self._backend.separate else ():
                    logger.warning("Worker %d made no progress on %s; its lease is over", lease.worker, lease.task)
                    self._replace_hung(lease.worker)
            self.processes.check()
            self.processes.start_missing(self.address)
            self._note_roster()
            self._raise_failure()
            self._raise_if_nobody_is_left()

    def _raise_if_nobody_is_left(self) -> None:
        """A worker whose callbacks have ended takes no task any more, although predictions may come back."""
        if self.queue is None or not self.queue.has_returned or self.roster.any_left(Role.WORKER, self._jobs):
            return
        tasks = self.queue.counts()[TaskType.PREDICTION][TaskState.TODO]
        raise ClusterLostError(
            f"{tasks} prediction tasks have to be done again, and no worker is left to do them: one was lost before "
            "the `on_predict_end` of its callbacks had run, the others have run theirs, and all restarts are used up. "
            "Run the job again, with more restarts (--max_worker_restarts)."
        )

    def _raise_failure(self) -> None:
        failure = self.queue.failure if self.queue is not None else None
        if failure is not None:
            raise failure.to_error(self.processes.where(failure.worker))

    def note(self, **entry: Any) -> None:
        """Writes down where the job stands, with `entry`. Hold `changed`. The job ends when that is not possible.

        Of a task that failed, nothing: when the job goes on, the task is to be tried again.
        """
        if self.journal is not None and self.queue is not None and self.queue.failure is None:
            totals = self._totals()
            if totals != self._noted_totals:
                self._noted_totals = entry["totals"] = totals
            self._write(queue=self.queue.to_dict(leases=True), version=self.version, **entry)

    def _write(self, **entry: Any) -> None:
        if self.journal is not None:
            try:
                self.journal.add(**entry)
                if self.journal.is_large:
                    self.rewrite_journal()
            except JobFailedError as error:
                self.error = error

    def _note_roster(self) -> None:
        """Writes down who is there, if that has changed."""
        if self.journal is not None and (roster := self.roster.to_dict()) != self._noted_roster:
            self._noted_roster = roster
            self._write(roster=roster, next_id=self.roster.next_id)

    def _totals(self) -> dict[str, Any]:
        """What the summary tells beside the queue's accounting, as JSON values."""
        lost = {role.name: [self.roster.lost_count(role), self.roster.replaced_count(role)] for role in Role}
        recoveries = Recoveries([max(self.recoveries.seconds, default=0.0)], self.recoveries.updates_lost)
        return {**asdict(self.totals), "recoveries": asdict(recoveries), **lost}

    def rewrite_journal(self) -> None:
        """Makes it as short as it can be. Hold `changed`."""
        if self.journal is not None:
            entries: list[Any] = []
            for epoch, by_name in self.epoch_states.items():
                for name, values in by_name.items():
                    each = values if name in self.merging_units else [values]
                    entries += [pair for states in each for pair in states_entry(epoch, {name: states})]
            self.journal.rewrite(entries)

    def take_over(self, journal: Journal, queue: TaskQueue, running: Mapping[tuple[str, int], int | str]) -> None:
        """Goes on with the workers and servers of another master, which was killed, and with its queue.

        Args:
            journal: of that master.
            running: processes that live, by role and place.
        """
        memory = journal.memory
        assert memory.roster is not None
        with self.changed:
            self.journal, self.queue = journal, queue
            self.merging_units = frozenset(memory.merging_units)
            self.resume(memory)
            now = time.monotonic()
            self.roster.restore(memory.roster, now)
            self._noted_roster = self.roster.to_dict()
            self.processes.take_over(running)
            if memory.workers:  # it may be newer than the roster
                self.processes.resize(Role.WORKER, memory.workers)
            self.processes.resize(Role.PS, len(memory.servers))  # others hold nothing
            for index, (_, id) in enumerate(memory.servers):
                server = self.roster.at(Role.PS, index)
                if server is None or server.id != id:  # it may be there, but holds no model yet
                    self.lost_ps.setdefault(index, now)

    def resume(self, memory: Memory) -> None:
        """Takes over what an earlier master knew of training. Hold `changed`."""
        self.version = max(self.version, memory.version)
        totals = dict(memory.totals)
        if totals:
            for role in Role:
                self.roster.count_earlier(role, *totals.pop(role.name))
            earlier = Recoveries(**totals.pop("recoveries"))
            self.recoveries.seconds += earlier.seconds
            self.recoveries.updates_lost += earlier.updates_lost
            self.totals = Totals(**totals)
        for epoch, tasks in memory.states.items():
            for states in tasks:
                self._add_epoch_states(epoch, states)

    def take_predictions(self) -> dict[int, list[Outputs]]:
        """What the job predicted, by first unit of a task: outputs by batch. They may be large, and are not kept."""
        with self.changed:
            taken, self.predictions = self.predictions, {}
            return taken

    def warn(self, warning: CallbackWarning) -> None:
        """Counts it; the first of each subject is shown by `say_warnings`."""
        with self.changed:
            self.totals.callback_errors += warning.errors
            if warning.subject not in self._warned:
                self._warned.add(warning.subject)
                self._unsaid.append(warning.text)

    def say_warnings(self) -> None:
        """Shows what is new to the user."""
        with self.changed:
            texts, self._unsaid = self._unsaid, []
        for text in texts:
            self.say(text)

    def reached_version(self, version: int) -> None:
        """The model is at `version`, or was."""
        with self.changed:
            if version > self.version:
                self.version = version
                self.changed.notify_driver()

    # ------------------------------------------------------------ called by the servicer

    def next_job(self, after: int, id: int, seconds: float, known_lost: int = 0) -> tuple[int, JobSettings | None]:
        """Waits up to `seconds` for a job newer than `after`; process `id` (0: it has none) is done with that one.

        Args:
            known_lost: of a server, of how many lost workers it knows; it does not wait when there are more.
        """
        with self.changed:
            if id:
                self._seen(id)
                if self.queue is not None and self.roster.job_of(id) == self._jobs:
                    self.queue.results_kept(id)
                self.roster.idle(id)
                self.changed.notify_all()
            serves = self.roster.is_up(id, Role.PS)

            def news() -> bool:
                lost = serves and len(self.roster.lost_workers) > known_lost
                return self._jobs > after or self.closing or lost or self.roster.released(id)

            self.changed.wait_for(news, seconds)
            return (self._jobs, self.settings) if self._jobs > after and not self.closing else (0, None)

    def program_of(self, job: int, dataset: int = 0) -> bytes:
        """What the job runs, or the function that makes a per-worker dataset."""
        with self.changed:
            self._check_is_present(job)
            if dataset and dataset not in self.datasets:
                raise WireError(
                    f"There is no per-worker dataset {dataset}; there are {sorted(self.datasets) or 'none'}."
                )
            return self.datasets[dataset] if dataset else self._program

    def index_of(self, job: int, mode: str, file: str) -> bytes:
        """Where records of a file begin, for workers; b"" while that is not known here."""
        with self.changed:
            self._check_is_present(job)
            find = self.find_index
        return find(mode, file)

    def register(self, role: Role, index: int, address: str, pid: int, host: str, job: int = 1) -> Member:
        with self.changed:
            self._check_is_present(job)
            member = self.roster.register(role, index, address, pid, host, time.monotonic(), job)
            logger.info("%s is there", member)
            self._note_roster()
            self.changed.notify_all()
            return member

    def wait_for_cluster(self, id: int, seconds: float, map_version: int = 0) -> Cluster | None:
        """The servers, when all hold the model, by a map of at least this version."""
        with self.changed:
            self._seen(id)
            job = self.roster.job_of(id)

            def ready() -> bool:
                known = self.cluster is not None and self.cluster.map_version >= map_version
                return known and not any(index < self.servers_in_use for index in self.lost_ps)

            self.changed.wait_for(lambda: ready() or self.closing or job != self._jobs, seconds)
            if self.closing:
                raise JobFailedError("The job ended before it began.")
            self._check_is_present(job)
            return self.cluster if ready() else None

    def doubt(self, server: int) -> None:
        """A server does not answer somebody, who asks where it is."""
        self._watchdog.doubt(server)

    @property
    def servers_in_use(self) -> int:
        """How many servers hold a part of the model."""
        return 0 if self.cluster is None else len(self.cluster.servers)

    def ps_have_moved(self, servers: Sequence[ServerPlace], buckets: BucketMap) -> None:
        """These servers hold the model from now on; others may leave."""
        with self.changed:
            if self.cluster is not None:
                self.cluster = replace(self.cluster, servers=tuple(servers), buckets=buckets)
            self.processes.resize(Role.PS, len(servers))
            self.changed.notify_all()

    def get_task(
        self, worker: int, held: Collection[int], seconds: float, waits: Callable[[], bool] = lambda: True
    ) -> Decision:
        """Waits up to `seconds` for a task, which is handed out only while the worker still `waits` for it."""
        give_up = time.monotonic() + seconds
        with self.changed:
            while True:
                self._seen(worker)
                now = time.monotonic()
                if not waits():
                    return Decision(DecisionKind.WAIT, None, "the worker has hung up")
                if self.closing or self.roster.job_of(worker) != self._jobs:
                    decision = Decision(DecisionKind.FINISHED, None, "the job is over")
                elif self.queue is None:
                    decision = Decision(DecisionKind.WAIT, None, "the master is starting")
                else:
                    decision = self.queue.get_task(worker, now, held)
                    if decision.kind is DecisionKind.TASK:
                        self.note()
                if decision.kind is not DecisionKind.WAIT or now >= give_up:
                    return decision
                self._waiting.add(worker)
                self.changed.wait(give_up - now)
                self._waiting.discard(worker)

    def note_pace(self, worker: int, batches: int, seconds: float) -> None:
        """`worker` has trained so many batches in so many seconds."""
        with self.changed:
            member = self.roster.member(worker)
            verdict = self.paces.note(worker, batches, seconds)
            if verdict is not None and member is not None:
                self._unsaid.append(f"Worker {member.index} {verdict.reason}.")
                if member.index not in self.totals.stragglers:
                    self.totals.stragglers.append(member.index)

    def note_stats(self, id: int, stats: Stats) -> None:
        """What a process has counted since it started."""
        with self.changed:
            if self.roster.member(id) is not None:
                self.stats[id] = stats

    def split_for(self, worker: int) -> Split | None:
        """What `worker` should leave to workers that wait."""
        with self.changed:
            queue = self.queue
            if not self._waiting or queue is None or queue.has_returned:
                return None
            idle = self.idle_workers()
            return plan_split(worker, queue.batches_left(), idle, self.paces) if idle else None

    def idle_workers(self) -> list[int]:
        """Those that wait for a task, and have none. Hold `changed`."""
        if self.queue is None:
            return []
        return [each for each in self._waiting if self.roster.member(each) is not None and not self.queue.leases(each)]

    def split(self, worker: int, lease: int, end: int) -> Answer:
        """`worker` will do the first `end` records of its lease, and no more."""
        with self.changed:
            self._seen(worker)
            if self.queue is None or self.roster.job_of(worker) != self._jobs:
                return Answer(False, _LATE)
            answer = self.queue.split(worker, lease, end)
            self.note()
            logger.info("Worker %d gives: %s", worker, answer.reason)
            self.changed.notify_all()
            return answer

    def report_progress(
        self,
        worker: int,
        lease: int,
        records_done: int,
        progressed: bool,
        version: int,
        loss: float | None,
        events: Sequence[BatchEvent] = (),
        warnings: Sequence[CallbackWarning] = (),
        computing: float = 0.0,
    ) -> Answer:
        with self.changed:
            self._seen(worker)
            if self.roster.job_of(worker) != self._jobs:
                return Answer(False, _LATE)
            self.reached_version(version)
            self.batch_log.add(worker, version, events)
            for warning in warnings:
                self.warn(warning)
            if loss is not None:
                self.loss = loss
            if not lease or self.queue is None:
                return Answer(True, "no task")
            answer = self.queue.report_progress(worker, lease, records_done, time.monotonic(), progressed, computing)
            member = self.roster.member(worker)
            if answer.long_batch and member is not None and self._backend.separate:  # a thread is never taken for hung
                text = f"Worker {member.index} {answer.reason}"
                self.warn(CallbackWarning(f"batch of lease {lease} from {records_done}", text, 0))
            self.note()
            return answer

    def report_done(
        self,
        worker: int,
        lease: int,
        version: int,
        states: dict[str, list[Any]],
        outputs: list[Outputs],
        gradients_rejected: int,
        batches_skipped: int,
        ended_after: int | None = None,
        result: bytes = b"",
    ) -> Outcome:
        with self._staged(outputs) as staged, self.changed:  # it may be large, so before the lock
            self._seen(worker)
            if self.queue is None or self.roster.job_of(worker) != self._jobs:
                return Outcome(False, _LATE)
            self.reached_version(version)
            outcome = self.queue.report_done(worker, lease, ended_after)
            task = outcome.task
            if outcome.accepted and not outcome.duplicate and task is not None:
                self.totals.gradients_rejected += gradients_rejected
                self.totals.batches_skipped += batches_skipped
                if task.type is TaskType.TRAINING:
                    self._add_epoch_states(task.epoch, states)
                elif task.type is TaskType.EVALUATION:
                    self._collect(task.evaluation_round, task.id, states, outputs)
                elif task.type is TaskType.PREDICTION:
                    self._keep_predictions(task, outputs, staged)
                elif task.type is TaskType.FUNCTION:
                    self.results[task.function] = result
                    del self.calls[task.function]
                self.note(**({"states": states_entry(task.epoch, states)} if task.type is TaskType.TRAINING else {}))
            if self.queue.is_idle or self.queue.has_returned or (task is not None and task.type is TaskType.FUNCTION):
                self.changed.notify_all()
            else:  # nothing that could be handed out has come of it
                self.changed.notify_driver()
            return outcome

    def report_failed(self, worker: int, lease: int, error: str, traceback: str, fatal: bool) -> Outcome:
        with self.changed:
            self._seen(worker)
            if self.queue is None or self.roster.job_of(worker) != self._jobs:
                return Outcome(False, _LATE)
            outcome = self.queue.report_failed(worker, lease, error, traceback, fatal)
            self.note()
            logger.warning("Worker %d: %s: %s\n%s", worker, outcome.reason, error, traceback)
            self.changed.notify_all()
            return outcome

    def stop_training(self, reason: str, worker: int = 0) -> None:
        """Training is to end: a worker (0: the master itself) says so."""
        with self.changed:
            if worker and self.roster.job_of(worker) != self._jobs:
                return
            if self.queue is None or self.queue.stop_reason is None:  # a hook that asked for it asks each time
                logger.info("Training is asked to stop: %s", reason)
            if self.queue is not None:
                self.queue.stop_training(reason)
                self.note()
            self.changed.notify_all()

    def interrupt(self) -> None:
        """Ends the job as Ctrl-C does, which would come to the main thread, whatever it does; a second time is none.

        Raises `UsageError` when this process is not that of a command.
        """
        with self.changed:
            if signal.getsignal(signal.SIGTERM) is not signal.default_int_handler:
                raise UsageError("The job is one of a Python program. End that program.")
            if not self._interrupted and not self.closing:
                self._interrupted = True
                logger.info("Asked to stop")
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)

    def leave(self, id: int, error: str, traceback: str, fatal: bool, asked: bool = False) -> None:
        with self.changed:
            member = self.roster.member(id)
            if asked and member is not None and not self.closing:
                self._asked_to_end(member, error)
            elif error and member is not None and not self.closing:
                logger.warning("%s leaves: %s\n%s", member, error, traceback)
                try:
                    if fatal or self.over:  # what it failed in would fail, or is not done, again
                        self.roster.left(id)
                        when = " after its last task" if self.over else ""
                        raise JobFailedError(f"{member} failed{when}: {error}")
                    self.processes.lost(id, error)
                except JobFailedError as failure:
                    failure.user_traceback = traceback
                    self.error = failure
            elif member is not None:
                self.roster.left(id)
                if self.queue is not None:
                    self.queue.worker_lost(id)
            self._note_roster()
            self.changed.notify_all()

    def scale(self, workers: int) -> int:
        """Has another number of workers from now on; answers how many there were to be.

        Raises `UsageError` when that is no number of workers that the job can have.
        """
        with self.changed:
            before, most = self.roster.size(Role.WORKER), max(self._cluster_settings.num_workers, MOST_WORKERS)
            if not 1 <= workers <= most:
                raise UsageError(f"The job can't have {workers} workers. Expected from 1 to {most}.")
            if self.closing or self.over or self.queue is None:
                raise UsageError(
                    f"The job {'is starting' if self.queue is None else 'is over'}; it can't be scaled now."
                )
            if self.settings is not None and self.settings.command is Command.CALL:
                raise UsageError("Functions of Cluster.schedule run; their workers can't be scaled.")
            if workers != before:
                self.resize(workers)
                self.say(f"The job has {workers} workers from now on; there were {before}.")
            if self.autoscales:
                self.end_autoscaling("the number of workers was set by hand")
            return before

    def end_autoscaling(self, reason: str) -> None:
        """The number of workers stays what it is. Hold `changed`."""
        self.autoscales = False
        self.note(autoscale=False)
        self.say(f"Autoscale: off, since {reason}.")

    def resize(self, workers: int) -> None:
        """Has another number of workers from now on. Hold `changed`."""
        self.processes.resize(Role.WORKER, workers)
        self.note(workers=workers)
        self.changed.notify_all()

    def is_released(self, worker: int) -> bool:
        """Whether a process is to leave, since fewer are needed."""
        with self.changed:
            return self.roster.released(worker)

    def not_started(self, role: Role, index: int, error: str, traceback: str) -> None:
        """A process failed before it could register; another one would fail the same way."""
        with self.changed:
            place = f"{role.value} {index}" if index >= 0 else f"a {role.value}"
            failure = JobFailedError(f"{place} could not start: {error}", traceback)
            if not self._backend.watches:
                self.say(str(failure))  # whoever started it may try again
            elif not self.closing:
                self.error = failure
                self.changed.notify_all()

    # ------------------------------------------------------------

    def _check_is_present(self, job: int) -> None:
        if job != self._jobs:
            raise JobOverError(f"Job {job} is over; the present one is {self._jobs}.")

    def _seen(self, id: int) -> None:
        sighting = self.roster.seen(id, time.monotonic())
        if not sighting.accepted:
            raise UsageError(f"The master refuses process {id}: {sighting.reason}.")

    def _add_epoch_states(self, epoch: int, states: dict[str, list[Any]]) -> None:
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

    def _collect(self, round_id: int, task_id: int, states: dict[str, Any], outputs: list[Outputs]) -> None:
        try:
            self.rounds.collect(round_id, task_id, states, outputs)
        except ElasticCBError as error:
            self.error = error  # a task that is done but not counted: the round can't be right any more

    @contextlib.contextmanager
    def _staged(self, outputs: list[Outputs]) -> Iterator[Path | None]:
        """A part of `--output`, which counts when it is committed."""
        output = self.prediction_output
        if output is None or not outputs:
            yield None
            return
        path = output.stage(outputs)
        try:
            yield path
        finally:
            output.discard(path)

    def _keep_predictions(self, task: Task, outputs: list[Outputs], staged: Path | None) -> None:
        if self.prediction_output is None:
            if outputs:
                self.predictions[task.shard.start] = outputs
        elif staged is not None:
            try:
                self.prediction_output.commit(staged, task.shard, outputs)
            except ElasticCBError as error:
                self.error = error  # without this part the file can't be complete

    def _ps_lost(self, index: int) -> None:
        self.lost_ps.setdefault(index, time.monotonic())
        settings = self.settings
        if settings is not None and settings.cluster.ps_replicas and settings.command is Command.TRAIN:
            before = (index - 1) % settings.cluster.num_ps
            self.say(f"Parameter server {before} has no replica until parameter server {index} is back.")
        self.changed.notify_all()

    def ps_is_back(self, index: int, place: ServerPlace) -> None:
        """Another server in this place holds the model."""
        with self.changed:
            self.lost_ps.pop(index, None)
            if self.cluster is not None:
                servers = [*self.cluster.servers]
                servers[index] = place
                self.cluster = replace(self.cluster, servers=servers)
                self._write(servers=servers)
            self.changed.notify_all()

    def _worker_lost(self, worker: int) -> None:
        if self.queue is not None:
            _log_back(self.queue.worker_lost(worker))
        self.paces.forget(worker)
        self.note()
        self.changed.notify_all()

    def _asked_to_end(self, member: Member, reason: str) -> None:
        if self.over and member.role is Role.WORKER:  # nobody needs another one
            self.roster.left(member.id)
            return
        if self.queue is not None and member.role is Role.WORKER:
            _log_back(self.queue.worker_left(member.id))
        self.paces.forget(member.id)
        try:
            self.processes.asked_to_end(member, reason)
        except JobFailedError as failure:
            self.error = failure
        self.note()

    def _replace_hung(self, worker: int) -> None:
        member = self.roster.member(worker)
        if member is not None:
            self.processes.replace(member, "it made no progress on its task")


def _log_back(tasks: Sequence[Task]) -> None:
    for task in tasks:
        logger.info("%s goes back", task)


def _recovers_ps(settings: JobSettings) -> bool:
    """Whether a server can take the place of a lost one: from its recovery files, or with weights that did not change.

    In synchronous mode several servers must stand at one version, which those files can't tell.
    """
    if settings.command in (Command.EVALUATE, Command.PREDICT):
        return True
    consistent = settings.training.use_async or settings.cluster.num_ps == 1
    return consistent and settings.checkpoint.interval_seconds > 0
