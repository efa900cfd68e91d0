"""The `Master` gRPC service: converts messages to calls on the master and back. Calls of workers, servers and users are
answered under the lock of its state; long polls wait here.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from elasticcb.callbacks.warning import CallbackWarning
from elasticcb.data.mode import MODES
from elasticcb.errors import ElasticCBError, JobFailedError, JobOverError, UsageError, WireError
from elasticcb.master.batch_log import BatchEvent
from elasticcb.master.desk import Desk
from elasticcb.master.gathering import begun_epochs
from elasticcb.master.job_state import LATE, OTHERS_FIRST, TaskResult
from elasticcb.master.live_tables import LiveTables
from elasticcb.master.members import Member, Role, ServedCluster
from elasticcb.master.server_scaling import ServerScaling, check_under_way
from elasticcb.master.snapshot import JobSnapshot
from elasticcb.master.state_document import document
from elasticcb.master.task import Answer, DecisionKind, Lease, Outcome, TaskDecision
from elasticcb.model.metric_messages import Outputs, from_metric_states, from_outputs
from elasticcb.process.host import host_name
from elasticcb.process.signals import interrupt
from elasticcb.process.stats import Stats
from elasticcb.process.wording import how_many
from elasticcb.proto import elasticcb_pb2 as pb
from elasticcb.settings import MOST_WORKERS, Command, JobSettings

logger = logging.getLogger(__name__)

_OTHERS_SECONDS = 0.05  # after which a worker looks again whether others still come first


class Calls:
    """Answers calls, each in the thread of its caller."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._interrupted = False  # a stop was requested

    # ------------------------------------------------------------ processes

    def next_job(self, after: int, id: int, seconds: float, known_lost: int = 0) -> tuple[int, JobSettings | None]:
        """Waits up to `seconds` for a job newer than `after`, which process `id` (0: not registered) has finished."""
        with self._desk.state() as state:
            if id:
                state.idle(id, time.monotonic())
            roster = state.roster
            serves = roster.is_up(id, Role.PS)
            state = self._desk.wait_for(
                lambda state: (
                    state.number > after
                    or state.closing
                    or (serves and len(roster.lost_workers) > known_lost)
                    or roster.released(id)
                ),
                seconds,
            )
            return (state.number, state.settings) if state.number > after and not state.closing else (0, None)

    def program_of(self, job: int, dataset: int = 0) -> bytes:
        """The serialized job, or the function that creates a per-worker dataset."""
        with self._desk.state() as state:
            state.check_is_present(job)
            if dataset and dataset not in state.datasets:
                raise WireError(
                    f"Per-worker dataset {dataset} does not exist. Known datasets: {sorted(state.datasets) or 'none'}."
                )
            return state.datasets[dataset] if dataset else state.program

    def index_of(self, job: int, mode: str, file: str) -> bytes:
        """Byte offsets of a file's records, for workers; b"" while unknown."""
        with self._desk.state() as state:
            state.check_is_present(job)
            if state.over:
                raise JobOverError(f"Job {job} is over.")
            find = state.find_index
        return find(mode, file)

    def register(self, role: Role, index: int, address: str, pid: int, host: str, job: int = 1) -> Member:
        """Registers a process in a slot."""
        with self._desk.state() as state:
            state.check_is_present(job)
            member = state.roster.register(role, index, address, pid, host, time.monotonic(), job)
            state.register(member)
            return member

    def wait_for_cluster(self, id: int, seconds: float, map_version: int = 0) -> ServedCluster | None:
        """The servers, once all hold the model by a shard map of at least this version."""
        with self._desk.state() as state:
            state.seen(id, time.monotonic())
            job = state.roster.job_of(id)
            state = self._desk.wait_for(
                lambda state: state.serves(map_version) or state.closing or job != state.number, seconds
            )
            if state.closing:
                raise JobFailedError("The job ended before it started.")
            state.check_is_present(job)
            return state.cluster if state.serves(map_version) else None

    def leave(
        self,
        id: int,
        error: str,
        traceback: str,
        fatal: bool,
        asked: bool = False,
        saved: pb.SaveResponse | None = None,
    ) -> None:
        """A process exits, with or without an `error`; or because it was `asked` to.

        Args:
            saved: what a server has saved after its last answer.
        """
        if saved is not None:
            with self._desk.state() as state:
                server = None if state.closing else state.roster.member(id)
            if server is not None:  # it waits for the answer; not under the lock, because this writes files
                self._desk.take_last(server.index, saved)
        with self._desk.state() as state:
            member = state.roster.member(id)
            if asked and member is not None and not state.closing:
                self._desk.asked_to_end(member, error)
            elif error and member is not None and not state.closing:
                logger.warning("%s leaves: %s\n%s", member, error, traceback)
                try:
                    if fatal or state.over:  # would fail again, or needs no retry
                        state.roster.left(id)
                        when = " after its last task" if state.over else ""
                        raise JobFailedError(f"{member} failed{when}: {error}")
                    self._desk.lost(id, error)
                except JobFailedError as failure:
                    failure.user_traceback = traceback
                    state.error = failure
            elif member is not None:
                state.left(id)
            state.note_roster()
            state.wake()

    def not_started(self, role: Role, index: int, error: str, traceback: str) -> None:
        """A process failed before it could register; a replacement would fail the same way."""
        place = f"{role.value} {index}" if index >= 0 else f"a {role.value}"
        failure = JobFailedError(f"{place} could not start: {error}", traceback)
        with self._desk.state() as state:
            if not self._desk.backend.watches:
                state.say(str(failure))  # whoever started it may retry
            elif not state.closing:
                state.error = failure
                state.wake()

    # ------------------------------------------------------------ tasks

    def get_task(
        self, worker: int, held: Collection[int], seconds: float, waits: Callable[[], bool] = lambda: True
    ) -> TaskDecision:
        """Waits up to `seconds` for a task, which is handed out only while the worker still `waits` for it."""
        give_up = time.monotonic() + seconds
        with self._desk.state() as state:
            while True:
                now = time.monotonic()
                if not waits():
                    state.seen(worker, now)
                    return TaskDecision(DecisionKind.WAIT, None, "the worker closed the call")
                decision = state.get_task(worker, held, now)
                left = give_up - now
                if decision.kind is not DecisionKind.WAIT or left <= 0 or state.must_tell(worker, decision):
                    if decision.kind is DecisionKind.WAIT:
                        state.waits_for_task(worker, decision)
                    return decision
                state.crew.waiting.add(worker)
                state = self._desk.wait(min(left, _OTHERS_SECONDS) if decision.reason == OTHERS_FIRST else left)
                state.crew.waiting.discard(worker)

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
        servers: int = 0,
    ) -> Answer:
        """A heartbeat with a worker's progress.

        Args:
            loss: the mean over the batches since the last report.
            servers: `JobState.newest_server` when the first of them began.
        """
        with self._desk.state() as state:
            now = time.monotonic()
            state.seen(worker, now)
            if not state.has(worker):
                return Answer(False, LATE)
            state.heard_of_batches(worker, version, loss, events, warnings)
            if not lease or state.queue is None:
                return Answer(True, "no task")
            is_held = servers >= state.newest_server
            answer = state.queue.report_progress(worker, lease, records_done, now, progressed, computing, is_held)
            member = state.roster.member(worker)
            # Threads never count as hung.
            if answer.long_batch and member is not None and self._desk.backend.separate:
                text = f"Worker {member.index} {answer.reason}"
                state.warn(CallbackWarning(f"batch of lease {lease} from {records_done}", text, 0))
            state.note()
            return answer

    def report_done(self, worker: int, lease: int, result: TaskResult) -> Outcome:
        """A worker has finished a task."""
        # possibly slow, so before taking the lock
        with self._staged(result.outputs) as staged, self._desk.state() as state:
            outcome = state.report_done(worker, lease, time.monotonic(), result)
            output = state.prediction_output
            if outcome.counts and outcome.task is not None and staged is not None and output is not None:
                try:
                    output.commit(staged, outcome.task.shard, result.outputs)
                except ElasticCBError as error:
                    state.error = error  # without this part, the output file would be incomplete
            return outcome

    @contextlib.contextmanager
    def _staged(self, outputs: list[Outputs]) -> Iterator[Path | None]:
        """A part of `--output`; it counts once committed."""
        with self._desk.state() as state:
            output = state.prediction_output
        if output is None or not outputs:
            yield None
            return
        path = output.stage(outputs)
        try:
            yield path
        finally:
            output.discard(path)

    # ------------------------------------------------------------ users

    def scale(self, workers: int) -> int:
        """Changes the number of workers; returns the previous number.

        Raises `UsageError` when the job can't have that number.
        """
        with self._desk.state() as state:
            before, most = state.roster.size(Role.WORKER), max(self._desk.cluster.num_workers, MOST_WORKERS)
            if not 1 <= workers <= most:
                raise UsageError(f"{workers} workers is invalid: must be from 1 to {most}.")
            check_under_way(state)
            if state.settings is not None and state.settings.command is Command.CALL:
                raise UsageError("The workers of Cluster.schedule can't be scaled.")
            if workers > 1 and state.shared_callbacks is not None and state.shared_callbacks.names:
                raise UsageError(
                    f"The job can't have {workers} workers: hooks of {state.shared_callbacks.names} on its one worker "
                    "share their state with hooks in the program. Run it again with more workers."
                )
            if workers != before:
                self._desk.resize(Role.WORKER, workers)
                state.say(f"The job now has {how_many(workers, 'worker')} (was {before}).")
            if state.autoscales:
                state.end_autoscaling("the number of workers was set manually")
            return before

    def interrupt(self) -> None:
        """Stops the job like Ctrl-C, by interrupting the main thread; repeated calls have no effect.

        Raises `UsageError` when this process does not belong to a command.
        """
        with self._desk.state() as state:
            if signal.getsignal(signal.SIGTERM) is not interrupt:
                raise UsageError("A Python program runs this job. Stop that program instead.")
            if not self._interrupted and not state.closing:
                self._interrupted = True
                logger.info("Stop requested")
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)


_KINDS = {
    DecisionKind.TASK: pb.GetTaskResponse.TASK,
    DecisionKind.WAIT: pb.GetTaskResponse.WAIT,
    DecisionKind.FINISHED: pb.GetTaskResponse.FINISHED,
}
_ROLES = {pb.WORKER: Role.WORKER, pb.PS: Role.PS}
# Well below the callers' deadlines, so that an answer always arrives in time.
LONG_POLL_SECONDS = 10.0


class MasterServicer:
    """A thin layer: all decisions are made elsewhere."""

    def __init__(
        self,
        desk: Desk,
        calls: Calls,
        scaling: ServerScaling,
        doubt: Callable[[int], None],
        observe: Callable[[], JobSnapshot],
        past_after: Callable[[int], dict[str, Any]],
        silence_seconds: float,
    ) -> None:
        self._desk, self._calls, self._scaling = desk, calls, scaling
        self._tables = LiveTables(desk)
        self._doubt, self._observe, self._past_after = doubt, observe, past_after
        # The next call is the heartbeat.
        self._poll_seconds = min(LONG_POLL_SECONDS, silence_seconds / 3)

    def GetSettings(self, request: Any, context: Any) -> pb.GetSettingsResponse:
        if request.HasField("stats"):
            with self._desk.state() as state:
                state.note_stats(request.id, Stats.from_message(request.stats))
        job, settings = self._calls.next_job(request.after_job, request.id, self._poll_seconds, request.known_lost)
        with self._desk.state() as state:
            lost = list(state.roster.lost_workers)
            over = state.closing or state.roster.released(request.id)
        if settings is None:
            return pb.GetSettingsResponse(over=over, lost_workers=lost)
        return pb.GetSettingsResponse(settings=settings.to_json(), job=job, lost_workers=lost)

    def GetProgram(self, request: Any, context: Any) -> pb.GetProgramResponse:
        return pb.GetProgramResponse(program=self._calls.program_of(request.job, request.dataset))

    def GetIndex(self, request: Any, context: Any) -> pb.GetIndexResponse:
        return pb.GetIndexResponse(index=self._calls.index_of(request.job, request.mode, request.file))

    def Register(self, request: Any, context: Any) -> pb.RegisterResponse:
        role = _role(request.role)
        member = self._calls.register(role, request.index, request.address, request.pid, request.host, request.job)
        return pb.RegisterResponse(id=member.id, index=member.index)

    def GetCluster(self, request: Any, context: Any) -> pb.GetClusterResponse:
        if request.unreachable:
            self._doubt(request.unreachable)
        cluster = self._calls.wait_for_cluster(request.id, self._poll_seconds, request.map_version)
        if cluster is None:
            return pb.GetClusterResponse(ready=False)
        return pb.GetClusterResponse(
            ready=True,
            ps_addresses=[server.address for server in cluster.servers],
            ps_ids=[server.id for server in cluster.servers],
            variables=[spec.to_message() for spec in cluster.variables],
            split=cluster.split,
            batch_events=cluster.batch_events,
            predictions=cluster.predictions,
            replayed_metrics=cluster.replayed_metrics,
            map_version=cluster.map_version,
        )

    def GetTask(self, request: Any, context: Any) -> pb.GetTaskResponse:
        seconds = 0.0 if request.at_once else LONG_POLL_SECONDS
        decision = self._calls.get_task(request.worker_id, request.leases, seconds, context.is_active)
        answer = pb.GetTaskResponse(kind=_KINDS[decision.kind], reason=decision.reason)
        answer.later = decision.reason == OTHERS_FIRST
        with self._desk.state() as state:
            answer.epoch = 0 if state.queue is None else begun_epochs(state.queue)
            if decision.lease is not None:
                # The function to call; empty when the task was revoked meanwhile, because its result is not needed.
                payload = state.calls.get(decision.lease.task.function, b"")
                answer.task.CopyFrom(_to_message(decision.lease, payload))
                first = min((member.id for member in state.roster.up(Role.WORKER)), default=request.worker_id)
                answer.task.first_worker = request.worker_id <= first
                answer.task.epoch_version = state.epoch_version
                answer.task.peers.extend(state.peers)
        return answer

    def ReportProgress(self, request: Any, context: Any) -> pb.ReportProgressResponse:
        answer = self._calls.report_progress(
            request.worker_id,
            request.lease,
            request.records_done,
            request.progressed,
            request.version,
            request.loss if request.batches else None,
            [_to_event(event) for event in request.batch_events],
            [CallbackWarning(warning.subject, warning.text, warning.errors) for warning in request.warnings],
            request.computing_seconds,
            request.servers,
        )
        if request.printed:
            self._desk.printed(request.worker_id, request.printed)
        with self._desk.state() as state:
            state.note_pace(request.worker_id, request.timed_batches, request.batch_seconds, time.monotonic())
            if request.HasField("stats"):
                state.note_stats(request.worker_id, Stats.from_message(request.stats))
            split = state.split_for(request.worker_id)
            return pb.ReportProgressResponse(
                accepted=answer.accepted,
                reason=answer.reason,
                over=state.closing,
                leave=state.roster.released(request.worker_id),
                servers=state.newest_server,
                split=None if split is None else pb.Split(lease=split.lease, end=split.end),
            )

    def SplitTask(self, request: Any, context: Any) -> pb.SplitTaskResponse:
        with self._desk.state() as state:
            answer = state.split(request.worker_id, request.split.lease, request.split.end, time.monotonic())
        return pb.SplitTaskResponse(accepted=answer.accepted, reason=answer.reason)

    def ReportTask(self, request: Any, context: Any) -> pb.ReportTaskResponse:
        if request.succeeded:
            result = TaskResult(
                version=request.version,
                states=from_metric_states(request.metrics),
                outputs=from_outputs(request.outputs),
                batches_skipped=request.batches_skipped,
                ended_after=request.records_done if request.exhausted else None,
                function_result=request.result,
                servers=request.servers,
                restarts=request.restarts_metrics,
            )
            outcome = self._calls.report_done(request.worker_id, request.lease, result)
        else:
            with self._desk.state() as state:
                outcome = state.report_failed(
                    request.worker_id,
                    request.lease,
                    time.monotonic(),
                    request.error,
                    request.traceback,
                    request.fatal,
                )
        return pb.ReportTaskResponse(
            accepted=outcome.accepted, reason=outcome.reason, ends_pass=outcome.ends_pass or outcome.duplicate
        )

    def ShareCallbacks(self, request: Any, context: Any) -> pb.ShareCallbacksResponse:
        with self._desk.state() as state:
            shared = state.shared_callbacks if state.has(request.worker_id) else None
        if shared is None:
            return pb.ShareCallbacksResponse()
        if request.state:
            rate = request.learning_rate if request.HasField("learning_rate") else None
            shared.give_back(request.worker_id, request.state, rate)
            with self._desk.state() as state:
                state.wake_driver()
            return pb.ShareCallbacksResponse()
        number, data = shared.fetch(request.worker_id, request.known)
        return pb.ShareCallbacksResponse(number=number, state=data)

    def StopTraining(self, request: Any, context: Any) -> pb.StopTrainingResponse:
        with self._desk.state() as state:
            if state.has(request.worker_id):
                state.stop_training(request.reason)
        return pb.StopTrainingResponse()

    def Leave(self, request: Any, context: Any) -> pb.LeaveResponse:
        if request.id:
            saved = request.saved if request.HasField("saved") else None
            self._calls.leave(request.id, request.error, request.traceback, request.fatal, request.asked, saved)
        elif request.error:
            self._calls.not_started(_role(request.role), request.index, request.error, request.traceback)
        return pb.LeaveResponse()

    def Scale(self, request: Any, context: Any) -> pb.ScaleResponse:
        answer = pb.ScaleResponse()
        if request.workers:
            answer.before = self._calls.scale(request.workers)
        if request.servers:
            wish = self._scaling.ask(request.servers, request.waiting, self._poll_seconds)
            answer.done = wish is None or wish.done
            if wish is not None:
                answer.moved, answer.error, answer.waits_for = wish.moved, wish.error, wish.waits_for
        return answer

    def Status(self, request: Any, context: Any) -> pb.StatusResponse:
        answer = pb.StatusResponse(status=json.dumps(document(self._observe())))
        if request.HasField("past_after"):
            answer.past = json.dumps(self._past_after(request.past_after))
        return answer

    def Tables(self, request: Any, context: Any) -> pb.TablesResponse:
        return self._tables.ask(request.top, request.id if request.HasField("id") else None)

    def Stop(self, request: Any, context: Any) -> pb.StopResponse:
        self._calls.interrupt()
        return pb.StopResponse(pid=os.getpid(), host=host_name())


def _role(number: pb.Role) -> Role:
    if number not in _ROLES:
        raise WireError(f"A message has role {number}; expected a worker or a parameter server.")
    return _ROLES[number]


def _to_event(event: Any) -> BatchEvent:
    if event.type not in MODES:
        raise WireError(f"A batch of type {event.type} was reported; expected one of {sorted(MODES)}.")
    logs = dict(sorted(event.logs.items()))  # the order of Keras's compiled train_step
    return BatchEvent(MODES[event.type], event.number, event.version, event.size, logs)


def _to_message(lease: Lease, payload: bytes) -> pb.Task:
    task = lease.task
    return pb.Task(
        id=task.id,
        lease=lease.id,
        type=task.type.name,
        shard=pb.Shard(name=task.shard.name, start=task.shard.start, end=task.shard.end),
        epoch=task.epoch,
        evaluation_round=task.evaluation_round,
        payload=payload,
    )
