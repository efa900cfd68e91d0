"""Calls of a parameter server that train: they push gradients, and return weights and rows."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from elasticcb.errors import ElasticCBError, WireError
from elasticcb.optimizers.state_messages import from_tensors, to_tensors
from elasticcb.proto import elasticcb_pb2 as pb
from elasticcb.ps.replica_log import Entry
from elasticcb.ps.served_model import PushAnswer, ServedModel, Staged
from elasticcb.ps.update_policy import Action, PushName
from elasticcb.rpc.tensors import Array, Frame
from elasticcb.sharding.array_names import STATE, TABLE, WANTED, WEIGHTS, by_index, named, without
from elasticcb.sharding.push import Push, knows_result
from elasticcb.sharding.wire_codec import narrowed, widened, wire_dtype_of


class TrainingCalls:
    """Handlers that are called with the model, under its lock."""

    def __init__(self, lost_workers: Collection[int]) -> None:
        self._lost_workers = lost_workers

    def exchange(self, frame: Frame[pb.ExchangeRequest], model: ServedModel) -> Frame[Any]:
        request = frame.header
        if request.map_version != model.buckets.version:
            return Frame(pb.ExchangeResponse(status=pb.MOVED, map_version=model.buckets.version), {})
        if model.gate is not None and not model.gate.admits(request.worker_id, request.sequence, request.create_rows):
            return Frame(pb.ExchangeResponse(status=pb.MOVING), {})
        rows_dtype = wire_dtype_of(request.rows_dtype, "rows")
        weights_dtype = wire_dtype_of(request.weights_dtype, "weights")
        pushed = without(frame.tensors, WANTED)
        verdict = PushAnswer(pb.NO_PUSH)
        if request.sequence:
            if request.worker_id in self._lost_workers:
                raise ElasticCBError(
                    f"The gradients of worker {request.worker_id} are refused: the master declared it lost and "
                    "reassigned its tasks."
                )
            verdict = self._push(request, pushed, model)
        elif pushed:
            raise WireError("A push needs a sequence number above 0; this one has none.")
        awaited = PushName(request.worker_id, request.awaited or request.sequence)
        due = model.policy.due(self._lost_workers)
        if due is not None:
            for name in due.pushes:
                if name.worker in self._lost_workers:  # others repeat its batches
                    del model.staged[name]
            model.update([name for name in due.pushes if name in model.staged])
        parameters = model.parameters
        response = pb.ExchangeResponse(
            status=verdict.status,  # type: ignore[arg-type]
            reason=verdict.reason,
            version=parameters.version,
            state_version=parameters.state_version,
            learning_rate=parameters.learning_rate,
            base_learning_rate_version=model.rate_version,
            waits=_waits(awaited, model),
            unknown=request.awaited > 0 and not _waits(awaited, model) and not model.answered.knows(awaited),
        )
        if response.waits or response.unknown:
            return Frame(response, {})
        snapshot = model.snapshot_of(request.snapshot) if request.snapshot else None
        if snapshot is not None:
            response.version, response.state_version = snapshot.version, snapshot.state_version
        ids = by_index(WANTED, frame.tensors)
        rows = parameters.tables.lookup(ids, request.create_rows, snapshot and snapshot.tables)
        tensors = narrowed(named(TABLE, rows), rows_dtype)
        knows = request.batches > 0 and knows_result(request, parameters.version)
        if (request.optimizers or request.batches or request.awaited) and not knows:
            tensors |= to_tensors(parameters.optimizer_state(with_slots=request.optimizers))
        if not request.pull or knows:
            return Frame(response, tensors)
        pulled = snapshot or parameters.snapshot()
        # Not "older than known": a restored server may be at a lower version.
        if pulled.version != request.known_version:
            tensors |= narrowed(named(WEIGHTS, pulled.weights), weights_dtype)
        if pulled.state_version != request.known_state_version:
            tensors |= named(STATE, pulled.state)
        return Frame(response, tensors)

    def _push(self, request: pb.ExchangeRequest, tensors: Mapping[str, Array], model: ServedModel) -> PushAnswer:
        name = PushName(request.worker_id, request.sequence)
        verdict = model.answered.find(name)
        if verdict is not None:
            return verdict
        if _waits(name, model):
            return PushAnswer(pb.ACCEPTED, "it waits")
        if model.answered.forgotten(name):
            return PushAnswer(pb.ACCEPTED, "this push was already answered")
        push = model.reader.read(Push.decode(request, widened(tensors, model.specs)))
        model.parameters.check_learning_rate(push)
        model.parameters.check_state(from_tensors(push.optimizers))
        verdict = self._judge(name, request, push, model)
        if not _waits(name, model):
            model.answered.remember(name, verdict)
        if model.replica is not None and verdict.status == pb.ACCEPTED:
            model.replica.note("Exchange", request, tensors)
        return verdict

    def _judge(self, name: PushName, request: pb.ExchangeRequest, push: Push, model: ServedModel) -> PushAnswer:
        reason = _non_finite(request, push, model)
        if reason:
            return PushAnswer(pb.NON_FINITE, reason)
        follows = model.policy.first_decides and model.index > 0
        if request.staged != follows:
            raise WireError(
                f"A push with staged={request.staged} came to server {model.index} of {model.num_ps} in "
                f"{model.policy.name} mode. Pushes are staged only in synchronous mode, and only on servers other than "
                "the first."
            )
        present = model.parameters.version
        if follows:
            # The first server decides whether and when it is used.
            model.staged[name] = Staged(push.copied(), request.version)
            return PushAnswer(pb.ACCEPTED, "staged")
        if push.batches == 0:  # only rows
            model.parameters.merge([push])
            return PushAnswer(pb.ACCEPTED, "rows")
        decision = model.policy.decide(name, request.version, present)
        if decision.action is Action.STALE:
            return PushAnswer(pb.STALE, decision.reason)
        applied_now = decision.action is Action.APPLY
        model.staged[name] = Staged(push if applied_now else push.copied(), request.version)
        if applied_now:
            model.update(decision.pushes)
        elif model.gate is not None and model.policy.workers_wait:  # other servers hold what this one must hand over
            model.flush()
        return PushAnswer(pb.ACCEPTED, decision.reason)

    def apply(self, frame: Frame[pb.ApplyRequest], model: ServedModel) -> Frame[Any]:
        request = frame.header
        parameters = model.parameters
        if not request.pushes:
            raise WireError("Apply has no pushes.")
        if request.version > parameters.version:  # else it is a retry
            names = [PushName(push.worker_id, push.sequence) for push in request.pushes]
            missing = [name for name in names if name not in model.staged]
            if missing or request.version != parameters.version + 1:
                raise ElasticCBError(
                    f"Server {model.index} can't follow the first server to version {request.version}: it is "
                    f"at version {parameters.version} and lacks {len(missing)} of {len(names)} pushes. It may "
                    "have been restarted. Start the job again from its last checkpoint."
                )
            parameters.apply(model.reader.mean([model.staged.pop(name).push for name in names]))
            model.drop_stale()
        return Frame(pb.ApplyResponse(version=parameters.version), {})

    def finish_training(self, frame: Frame[pb.FinishTrainingRequest], model: ServedModel) -> Frame[Any]:
        model.flush()
        model.staged.clear()
        if frame.header.finalize:
            model.parameters.finalize()
            if model.replica is not None:
                model.replica.note("FinishTraining", frame.header, {})
        return Frame(pb.FinishTrainingResponse(version=model.parameters.version), {})

    def set_learning_rate(self, frame: Frame[pb.SetLearningRateRequest], model: ServedModel) -> Frame[Any]:
        rate = frame.header.learning_rate
        if not math.isfinite(rate):
            raise WireError(f"The learning rate can't be set to {rate}: it must be finite.")
        model.parameters.set_learning_rate(rate)
        model.rate_version += 1
        if model.replica is not None:
            model.replica.note("SetLearningRate", frame.header, {})
        return Frame(pb.SetLearningRateResponse(), {})

    def replay(self, entry: Entry, model: ServedModel) -> bool:
        """Replays a change of a lost server that its neighbour kept; returns whether that was possible."""
        if entry.method == "Exchange":
            verdict = self._push(pb.ExchangeRequest.FromString(entry.header), entry.tensors, model)
            return verdict.status == pb.ACCEPTED
        if entry.method == "SetLearningRate":
            model.parameters.set_learning_rate(pb.SetLearningRateRequest.FromString(entry.header).learning_rate)
            return True
        return False


def _waits(name: PushName, model: ServedModel) -> bool:
    """Whether the worker must wait for others."""
    return model.policy.workers_wait and name in model.policy.waiting


def _non_finite(request: pb.ExchangeRequest, push: Push, model: ServedModel) -> str:
    """Why a push has NaN or infinity; "" if it does not."""
    what = ""
    if request.non_finite:
        what = request.non_finite
    elif not math.isfinite(request.loss):
        return f"the loss is {request.loss}"
    else:
        path = model.reader.non_finite(push)
        what = f"the gradient of {path!r}" if path else ""
    if not what:
        return ""
    return f"{what} holds NaN or infinity (loss {request.loss:g}, version {request.version})"
