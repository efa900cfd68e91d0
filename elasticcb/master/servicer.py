"""The `Master` gRPC service: converts messages to calls of `MasterServer`, and to events, and their answers back."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from elasticcb.clients.ps_servers import ServerGroup
from elasticcb.errors import CallbackWarning, ConnectionLostError, UsageError, WireError
from elasticcb.master.batch_log import BatchEvent
from elasticcb.master.events import Wake
from elasticcb.master.gathering import begun_epochs
from elasticcb.master.job_machine import OTHERS_FIRST, JobMachine
from elasticcb.master.master_server import MasterServer
from elasticcb.master.members import Role, ServedCluster
from elasticcb.master.server_scaling import ServerScaling
from elasticcb.master.snapshot import JobSnapshot
from elasticcb.master.task import DecisionKind, Lease, TaskResult
from elasticcb.model.metric_messages import MODES, from_metric_states, from_outputs
from elasticcb.process.host import host_name
from elasticcb.process.stats import Stats
from elasticcb.proto import elasticcb_pb2 as pb
from elasticcb.rpc.tensors import to_message
from elasticcb.sharding.partition import Places, ShardMap

_KINDS = {
    DecisionKind.TASK: pb.GetTaskResponse.TASK,
    DecisionKind.WAIT: pb.GetTaskResponse.WAIT,
    DecisionKind.FINISHED: pb.GetTaskResponse.FINISHED,
}
_ROLES = {pb.WORKER: Role.WORKER, pb.PS: Role.PS}
# Well below the callers' deadlines, so that an answer always arrives in time.
LONG_POLL_SECONDS = 10.0
_PATIENCE_SECONDS = 2.0  # with an unresponsive server whose tables are read
_RESTORE_SECONDS = 30.0  # for the replacement of a lost server


class MasterServicer:
    """A thin layer: all decisions are made elsewhere."""

    def __init__(
        self,
        master: MasterServer,
        scaling: ServerScaling,
        doubt: Callable[[int], None],
        observe: Callable[[], JobSnapshot],
    ) -> None:
        self._master, self._scaling, self._doubt, self._observe = master, scaling, doubt, observe
        # The next call is the heartbeat.
        self._poll_seconds = min(LONG_POLL_SECONDS, master.cluster.silence_seconds / 3)

    def GetSettings(self, request: Any, context: Any) -> pb.GetSettingsResponse:
        if request.HasField("stats"):
            with self._master.state() as state:
                state.note_stats(request.id, Stats.from_message(request.stats))
        job, settings = self._master.next_job(request.after_job, request.id, self._poll_seconds, request.known_lost)
        with self._master.state() as state:
            lost = list(state.roster.lost_workers)
            over = state.closing or state.roster.released(request.id)
        if settings is None:
            return pb.GetSettingsResponse(over=over, lost_workers=lost)
        return pb.GetSettingsResponse(settings=settings.to_json(), job=job, lost_workers=lost)

    def GetProgram(self, request: Any, context: Any) -> pb.GetProgramResponse:
        return pb.GetProgramResponse(program=self._master.program_of(request.job, request.dataset))

    def GetIndex(self, request: Any, context: Any) -> pb.GetIndexResponse:
        return pb.GetIndexResponse(index=self._master.index_of(request.job, request.mode, request.file))

    def Register(self, request: Any, context: Any) -> pb.RegisterResponse:
        role = _role(request.role)
        member = self._master.register(role, request.index, request.address, request.pid, request.host, request.job)
        return pb.RegisterResponse(id=member.id, index=member.index)

    def GetCluster(self, request: Any, context: Any) -> pb.GetClusterResponse:
        if request.unreachable:
            self._doubt(request.unreachable)
        cluster = self._master.wait_for_cluster(request.id, self._poll_seconds, request.map_version)
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
            progressive=cluster.progressive,
            map_version=cluster.map_version,
        )

    def GetTask(self, request: Any, context: Any) -> pb.GetTaskResponse:
        seconds = 0.0 if request.at_once else LONG_POLL_SECONDS
        decision = self._master.get_task(request.worker_id, request.leases, seconds, context.is_active)
        answer = pb.GetTaskResponse(kind=_KINDS[decision.kind], reason=decision.reason)
        answer.later = decision.reason == OTHERS_FIRST
        with self._master.state() as state:
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
        worker = request.worker_id
        with self._master.state() as state:
            answer = state.report_progress(
                worker,
                request.lease,
                time.monotonic(),
                request.records_done,
                request.progressed,
                request.version,
                request.loss if request.batches else None,
                [_to_event(event) for event in request.batch_events],
                [CallbackWarning(warning.subject, warning.text, warning.errors) for warning in request.warnings],
                request.computing_seconds,
                request.servers,
                request.timed_batches,
                request.batch_seconds,
            )
        if request.printed:
            self._master.printed(worker, request.printed)
        with self._master.state() as state:
            if request.HasField("stats"):
                state.note_stats(worker, Stats.from_message(request.stats))
            split = state.split_for(worker)
            return pb.ReportProgressResponse(
                accepted=answer.accepted,
                reason=answer.reason,
                over=state.closing,
                leave=state.roster.released(worker),
                servers=state.newest_server,
                split=None if split is None else pb.Split(lease=split.lease, end=split.end),
            )

    def SplitTask(self, request: Any, context: Any) -> pb.SplitTaskResponse:
        with self._master.state() as state:
            answer = state.split(request.worker_id, request.split.lease, request.split.end, time.monotonic())
        return pb.SplitTaskResponse(accepted=answer.accepted, reason=answer.reason)

    def ReportTask(self, request: Any, context: Any) -> pb.ReportTaskResponse:
        if request.succeeded:
            result = TaskResult(
                version=request.version,
                states=from_metric_states(request.metrics),
                outputs=from_outputs(request.outputs),
                batches_skipped=request.batches_skipped,
                bad_records=request.bad_records,
                bad_record=request.bad_record,
                ended_after=request.records_done if request.exhausted else None,
                function_result=request.result,
                servers=request.servers,
                restarts=request.restarts_metrics,
            )
            outcome = self._master.report_done(request.worker_id, request.lease, result)
        else:
            with self._master.state() as state:
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
        with self._master.state() as state:
            shared = state.shared_callbacks if state.has(request.worker_id) else None
        if shared is None:
            return pb.ShareCallbacksResponse()
        if request.state:
            rate = request.learning_rate if request.HasField("learning_rate") else None
            shared.give_back(request.worker_id, request.state, rate)
            with self._master.change(Wake.DRIVER):
                pass  # whoever waits for it looks again
            return pb.ShareCallbacksResponse()
        number, data = shared.fetch(request.worker_id, request.known)
        return pb.ShareCallbacksResponse(number=number, state=data)

    def StopTraining(self, request: Any, context: Any) -> pb.StopTrainingResponse:
        with self._master.state() as state:
            if state.has(request.worker_id):
                state.stop_training(request.reason)
        return pb.StopTrainingResponse()

    def Leave(self, request: Any, context: Any) -> pb.LeaveResponse:
        if request.id:
            saved = request.saved if request.HasField("saved") else None
            self._master.leave(request.id, request.error, request.traceback, request.fatal, request.asked, saved)
        elif request.error:
            self._master.not_started(_role(request.role), request.index, request.error, request.traceback)
        return pb.LeaveResponse()

    def Scale(self, request: Any, context: Any) -> pb.ScaleResponse:
        answer = pb.ScaleResponse()
        if request.workers:
            answer.before = self._master.scale(request.workers)
        if request.servers:
            wish = self._scaling.ask(request.servers, request.waiting, self._poll_seconds)
            answer.done = wish is None or wish.done
            if wish is not None:
                answer.moved, answer.error, answer.waits_for = wish.moved, wish.error, wish.waits_for
        return answer

    def Status(self, request: Any, context: Any) -> pb.StatusResponse:
        answer = pb.StatusResponse(status=json.dumps(self._observe().to_json()))
        if request.HasField("past_after"):
            with self._master.state() as state:
                past = state.history.after(request.past_after)
            answer.past = json.dumps(past)
        return answer

    def Tables(self, request: Any, context: Any) -> pb.TablesResponse:
        return tables_of(self._master, request.top, request.id if request.HasField("id") else None)

    def Stop(self, request: Any, context: Any) -> pb.StopResponse:
        self._master.interrupt()
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
        failures=lease.failures,
    )


def tables_of(master: MasterServer, top: int, id: int | None, seconds: float = _RESTORE_SECONDS) -> pb.TablesResponse:
    """The content of all embedding tables of a running job, or the rows of one id, as its servers report it.

    Args:
        top: how many of the most frequently looked-up ids to return.
        id: the id whose rows to return; None: report on the tables.

    Raises `UsageError` when servers are missing.
    """
    give_up = time.monotonic() + seconds
    while True:
        with master.state():
            left = max(0.0, give_up - time.monotonic())
            state = master.wait_for(lambda state: state.serves(0) or _is_over(state), left)
            cluster, why_not = state.cluster, _why_not(state)
            memory_bytes = 0 if state.settings is None else state.settings.embedding.memory_bytes
        if why_not or cluster is None:
            raise UsageError(f"The embedding tables can't be read now: {why_not}.")
        try:
            return _answer(master, cluster, top, id, memory_bytes)
        except ConnectionLostError as error:
            if time.monotonic() > give_up:
                raise UsageError(f"A parameter server may just have been lost: {error} Try again.") from error


def _answer(
    master: MasterServer, cluster: ServedCluster, top: int, id: int | None, memory_bytes: int
) -> pb.TablesResponse:
    answer = pb.TablesResponse(memory_bytes=memory_bytes)
    answer.variables.extend(spec.to_message() for spec in cluster.variables)
    places = Places(tuple(cluster.servers), ShardMap(len(cluster.servers), cluster.map_version))
    servers = ServerGroup(places, cluster.variables, cluster.split, _PATIENCE_SECONDS, master.access)
    try:
        if id is None:
            answer.counts.extend(servers.on_all("CountTables", pb.CountTablesRequest(top=top)))
        else:
            _find(answer, servers, id)
    finally:
        servers.close()
    return answer


def _find(answer: pb.TablesResponse, servers: ServerGroup, id: int) -> None:
    answer.server = int(servers.shard_map.server_of(np.array([id], np.int64))[0])
    frame = servers.call(servers.known[answer.server], "FindRow", pb.FindRowRequest(id=id))
    del frame.header.tensors[:]
    answer.found.CopyFrom(frame.header)
    answer.found.tensors.extend(to_message(array, name) for name, array in frame.tensors.items())


def _is_over(state: JobMachine) -> bool:
    return state.closing or state.over


def _why_not(state: JobMachine) -> str:
    """Why the servers can't be queried; "": they can."""
    if _is_over(state):
        return "the job is over"
    if state.cluster is None:
        return "the job is starting, and its parameter servers have no model yet. Try again once it trains"
    if lost := state.missing_servers:
        return (
            f"parameter server {', '.join(map(str, lost))} was lost and is not restored yet. Try again in a few seconds"
        )
    return ""
