"""The events of one job: calls come in, answers and effects go out. Pure: no threads, clock, gRPC or Keras.

Times are arguments, in seconds of one monotonic clock.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from elasticcb.clients.ps_places import ServerPlace
from elasticcb.errors import (
    ClusterLostError,
    ElasticCBError,
    JobFailedError,
    JobOverError,
    UsageError,
)
from elasticcb.master.accounting import Speed
from elasticcb.master.batch_log import BatchEvent
from elasticcb.master.job_record import JobRecord
from elasticcb.master.members import Member, Role
from elasticcb.master.stragglers import Split, plan_split
from elasticcb.master.task import Answer, DecisionKind, Outcome, Task, TaskDecision, TaskState, TaskType
from elasticcb.process.wording import how_many

if TYPE_CHECKING:
    from elasticcb.callbacks.warning import CallbackWarning
    from elasticcb.model.metric_messages import Outputs, States
    from elasticcb.process.stats import Stats

logger = logging.getLogger(__name__)

LATE = "its job has ended"
OTHERS_FIRST = "other workers come first"


@dataclass(frozen=True)
class TaskResult:
    """A worker's report of a finished task.

    Attributes:
        outputs: by batch: predictions, or inputs of metrics without mergeable state.
        ended_after: number of records after which the source ended; None: it did not.
        servers: `JobState.newest_server` when the first batch began that was not reported before.
        restarts: `states` and `outputs` replace those of earlier tasks of the epoch or pass.
    """

    version: int
    states: States = field(default_factory=dict)
    outputs: list[Outputs] = field(default_factory=list)
    batches_skipped: int = 0
    ended_after: int | None = None
    function_result: bytes = b""
    servers: int = 0
    restarts: bool = False


class JobState(JobRecord):
    """One job, as workers, servers and users act on it. `Guarded` holds the current job's."""

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
            "used up. Run the job again with more restarts (--max_worker_restarts)."
        )

    def check_is_present(self, job: int) -> None:
        """Raises `JobOverError` when the process belongs to another job."""
        if job != self.number:
            raise JobOverError(f"Job {job} is over; the current job is {self.number}.")

    def seen(self, id: int, now: float) -> None:
        """A heartbeat of a process. Raises `UsageError` when it does not belong to the job."""
        sighting = self.roster.seen(id, now)
        if not sighting.accepted:
            raise UsageError(f"The master refuses process {id}: {sighting.reason}.")

    def has(self, id: int) -> bool:
        """Whether a process works on the current job."""
        return self.roster.job_of(id) == self.number

    # ------------------------------------------------------------ processes

    def idle(self, id: int, now: float) -> None:
        """A process has finished its job."""
        self.seen(id, now)
        if self.queue is not None and self.has(id):
            self.queue.results_kept(id)
        self.roster.idle(id)
        self.wake()

    def register(self, member: Member) -> None:
        """A process has registered."""
        logger.info("%s joined", member)
        self.past.happened("joined", f"{member} joined.")
        self.note_roster()
        self.wake()

    def server_lost(self, index: int, now: float) -> None:
        """A server is lost; another will replace it."""
        self.lost_ps.setdefault(index, now)
        self.wake()

    def server_is_back(self, index: int, place: ServerPlace, complete: bool) -> bool:
        """The replacement of a lost server holds its part of the model, as the server left it if that is `complete`.
        Returns whether what it lacks is trained again."""
        self.lost_ps.pop(index, None)
        repeated = not complete and self.queue is not None and self.queue.updates_lost()
        if self.cluster is not None:
            servers = [*self.cluster.servers]
            servers[index] = place
            self.cluster = replace(self.cluster, servers=servers)
            self._write(servers=servers)
            self.past.happened("recovery", f"Parameter server {index} has its part of the model again.")
        self.note()
        self.wake()
        return repeated

    def servers_have_moved(self, servers: Sequence[ServerPlace], map_version: int) -> None:
        """These servers hold the model from now on."""
        if self.cluster is not None:
            self.cluster = replace(self.cluster, servers=tuple(servers), map_version=map_version)
        self.wake()

    @property
    def newest_server(self) -> int:
        """Id of the newest server that holds a part of the model; that of a replacement is higher than all before."""
        return 0 if self.cluster is None else max((place.id for place in self.cluster.servers), default=0)

    @property
    def servers_in_use(self) -> int:
        """Number of servers that hold a part of the model."""
        return 0 if self.cluster is None else len(self.cluster.servers)

    def serves(self, map_version: int) -> bool:
        """Whether all servers hold the model, by a shard map of at least this version."""
        known = self.cluster is not None and self.cluster.map_version >= map_version
        return known and not self.lacks_servers

    @property
    def lacks_servers(self) -> bool:
        """Whether a part of the model is unavailable because its server was lost."""
        return any(index < self.servers_in_use for index in self.lost_ps)

    def worker_lost(self, worker: int) -> None:
        """A worker is lost; its tasks are requeued."""
        if self.queue is not None:
            _log_back(self.queue.worker_lost(worker))
        self._forget(worker)
        self.note()
        self.wake()

    def worker_left(self, member: Member) -> None:
        """A process was asked to stop: it has reported what is done, and its tasks are requeued."""
        if self.queue is not None and member.role is Role.WORKER:
            _log_back(self.queue.worker_left(member.id))
        if member.role is Role.WORKER:
            self._forget(member.id)

    def left(self, id: int) -> None:
        """A process exited normally."""
        self.roster.left(id)
        if self.queue is not None:
            self.queue.worker_lost(id)

    def end_autoscaling(self, reason: str) -> None:
        """Stops autoscaling; the number of workers stays."""
        self.autoscales = False
        self.note(autoscale=False)
        self.say(f"Autoscale: off, because {reason}.")

    # ------------------------------------------------------------ tasks

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
        if decision.lease is not None and self.gathering is not None:
            self.gathering.gets(worker, self.queue)
            self.wake()  # for those that come later
        if decision.lease is not None:
            self.note()
            member = self.roster.member(worker)
            if member is not None:
                self.past.began(decision.lease, member.index)
        return decision

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
        return [
            each for each in self.crew.waiting if self.roster.member(each) is not None and not self.queue.leases(each)
        ]

    def split_for(self, worker: int) -> Split | None:
        """How `worker` should split its task for idle workers, if it should."""
        queue = self.queue
        if not self.crew.waiting or queue is None or queue.has_returned:
            return None
        idle = self.idle_workers()
        return plan_split(worker, queue.batches_left(), idle, self.paces) if idle else None

    def split(self, worker: int, lease: int, end: int, now: float) -> Answer:
        """`worker` will only process the first `end` records of its lease."""
        self.seen(worker, now)
        if self.queue is None or not self.has(worker):
            return Answer(False, LATE)
        answer = self.queue.split(worker, lease, end)
        self.queue.drop_training()
        self.note()
        logger.info("Worker %d gives: %s", worker, answer.reason)
        self.wake()
        return answer

    def note_pace(self, worker: int, batches: int, seconds: float, now: float) -> None:
        """`worker` has trained `batches` batches in `seconds` seconds."""
        member = self.roster.member(worker)
        verdict = self.paces.note(worker, batches, seconds)
        if self.paces.knows(worker):
            self.speeds.setdefault(worker, Speed()).note(now, self.paces.batches(worker))
        if verdict and member is not None:
            self.say(f"Worker {member.index} {verdict}.")
            if member.index not in self.totals.stragglers:
                self.totals.stragglers.append(member.index)

    def _forget(self, worker: int) -> None:
        self.paces.forget(worker)
        self.speeds.pop(worker, None)
        member = self.roster.find(worker)
        if member is not None:
            self.past.left(member.index)

    def note_stats(self, id: int, stats: Stats) -> None:
        """Statistics of a process since its start."""
        if self.roster.member(id) is not None:
            self.crew.stats[id] = stats

    def reached_version(self, version: int) -> None:
        """The model is, or was, at `version`."""
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
        """Handles what a worker reports besides the progress of its task."""
        self.reached_version(version)
        self.batch_log.add(worker, version, events)
        for warning in warnings:
            self.warn(warning)
        if loss is not None:
            self.loss = loss

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
            self.past.ended(lease, "done", task)
            self.totals.batches_skipped += result.batches_skipped
            self._take_in(task, result)
            noted: dict[str, Any] = {}
            if task.type is TaskType.TRAINING:
                noted["states"] = [(task.epoch, result.states)]
                if result.restarts:
                    noted["restarted"] = [task.epoch]
            self.note(**noted)
        concerns_all = self.queue.is_idle or self.queue.has_returned or self.queue.wants_save
        if concerns_all or (task is not None and task.type is TaskType.FUNCTION):
            self.wake()
        else:  # nothing to hand out resulted
            self.wake_driver()
        return outcome

    def _take_in(self, task: Task, result: TaskResult) -> None:
        if task.type is TaskType.TRAINING:
            if result.restarts:
                self.epoch_states.forget(task.epoch)
            self.epoch_states.add(task.epoch, result.states)
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

    def report_failed(self, worker: int, lease: int, now: float, error: str, traceback: str, fatal: bool) -> Outcome:
        """A worker failed in a task."""
        self.seen(worker, now)
        if self.queue is None or not self.has(worker):
            return Outcome(False, LATE)
        outcome = self.queue.report_failed(worker, lease, error, traceback, fatal)
        self.past.ended(lease, "failed")
        self.note()
        # The error that ends the job is shown by who raises it.
        level = logging.WARNING if self.queue.failure is None else logging.INFO
        logger.log(level, "Worker %d: %s: %s\n%s", worker, outcome.reason, error, traceback)
        self.wake()
        return outcome

    def stop_training(self, reason: str, before_batch: bool = False) -> None:
        """Requests the end of training; `before_batch` as in `TaskQueue.stop_training`."""
        if self.queue is None or self.queue.stop_reason is None:  # a hook repeats its request at each call
            logger.info("Training was asked to stop: %s", reason)
        if self.queue is not None:
            self.queue.stop_training(reason, before_batch)
            self.note()
        self.wake()

    def finish(self) -> None:
        """Marks the job as having no more tasks."""
        if self.queue is not None:
            self.queue.finish()
        self.over = True
        self.wake()


def _log_back(tasks: Sequence[Task]) -> None:
    for task in tasks:
        logger.info("%s is back in the queue", task)
