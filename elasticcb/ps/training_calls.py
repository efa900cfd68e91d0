"""Calls of a parameter server that train: they push movements and row gradients, and return weights and rows."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from elasticcb.errors import ElasticCBError, WireError
from elasticcb.optimizers.state_messages import from_tensors, to_tensors
from elasticcb.proto import elasticcb_pb2 as pb
from elasticcb.ps.served_model import MoveGate, ServedModel
from elasticcb.ps.update_policy import PushName
from elasticcb.rpc.tensors import Array, Frame
from elasticcb.sharding.array_names import STATE, TABLE, WANTED, WEIGHTS, by_index, named, without
from elasticcb.sharding.push import Push
from elasticcb.sharding.wire_codec import narrowed, widened, wire_dtype_of

_LONGEST_WAIT_SECONDS = 60.0  # for other workers, in one call


class TrainingCalls:
    """Handlers that are called with the model, under its lock."""

    def __init__(self, lost_workers: Collection[int]) -> None:
        self._lost_workers = lost_workers

    def exchange(self, frame: Frame[pb.ExchangeRequest], model: ServedModel) -> Frame[Any]:
        request = frame.header
        if request.map_version != model.shard_map.version:
            return Frame(pb.ExchangeResponse(status=pb.MOVED, map_version=model.shard_map.version), {})
        if model.gate is not None and not model.gate.admits(request.worker_id, request.sequence, request.create_rows):
            return Frame(pb.ExchangeResponse(status=pb.MOVING), {})
        rows_dtype = wire_dtype_of(request.rows_dtype, "rows")
        pushed = without(frame.tensors, WANTED)
        if request.sequence:
            self._push(request, pushed, model)
        elif pushed:
            raise WireError("A push needs a sequence number above 0; this one has none.")
        if request.joins:
            model.policy.join(request.worker_id)
        if request.rests:
            model.policy.rest(request.worker_id)
        self._merge_due(model)
        if not self._is_merged(PushName(request.worker_id, request.sequence), model):
            return Frame(pb.ExchangeResponse(status=pb.WAITS), {})
        parameters = model.parameters
        response = pb.ExchangeResponse(
            status=pb.DONE,
            version=parameters.version,
            state_version=parameters.state_version,
            learning_rate=parameters.learning_rate,
            base_learning_rate_version=model.rate_version,
            slots_version=model.slots_version,
            # Not for the replacement of a lost server, from which the worker had pulled nothing (`known_version` -1).
            alone=request.batches > 0
            and model.policy.workers == 1
            and 0 <= request.known_version == request.base == parameters.version - request.batches,
        )
        snapshot = model.snapshot_of(request.snapshot) if request.snapshot else None
        if snapshot is not None:
            response.version, response.state_version = snapshot.version, snapshot.state_version
        ids = by_index(WANTED, frame.tensors)
        rows = parameters.tables.lookup(ids, request.create_rows, snapshot and snapshot.tables)
        tensors = narrowed(named(TABLE, rows), rows_dtype)
        if response.alone:
            return Frame(response, tensors)
        if request.optimizers or request.batches:
            tensors |= to_tensors(parameters.optimizer_state(with_slots=request.optimizers))
        if not request.pull:
            return Frame(response, tensors)
        pulled = snapshot or parameters.snapshot()
        # Not "older than known": a restored server may be at a lower version.
        if pulled.version != request.known_version:
            tensors |= named(WEIGHTS, pulled.weights)
        if pulled.state_version != request.known_state_version:
            tensors |= named(STATE, pulled.state)
        return Frame(response, tensors)

    def _push(self, request: pb.ExchangeRequest, tensors: Mapping[str, Array], model: ServedModel) -> None:
        """Merges a push, or keeps it until it is due; not if it came before."""
        name = PushName(request.worker_id, request.sequence)
        if request.worker_id in self._lost_workers:
            raise ElasticCBError(
                f"The updates of worker {request.worker_id} are refused: the master declared it lost and reassigned "
                "its tasks."
            )
        if model.has(name):
            return
        push = model.reader.read(Push.decode(request, widened(tensors, model.specs)))
        model.parameters.check_state(from_tensors(push.optimizers))
        if push.batches:
            model.policy.come(name)
            model.waiting[name] = push
            self._merge_due(model)
            if name in model.waiting:
                model.waiting[name] = push.copied()
        else:
            model.parameters.merge([push])
            model.taken[name.worker] = name.sequence

    def _merge_due(self, model: ServedModel) -> None:
        names = model.policy.due(self._lost_workers)
        # Others repeat the batches of a lost worker.
        model.merge(names, leave_out=self._lost_workers)

    def _is_merged(self, name: PushName, model: ServedModel) -> bool:
        """Waits until a movement is merged, which other workers' movements may have to come for."""
        end = time.monotonic() + _LONGEST_WAIT_SECONDS
        while name in model.waiting and time.monotonic() < end and not model.is_closed:
            model.merged.wait(model.policy.patience)
            self._merge_due(model)
        return name not in model.waiting

    def move(self, frame: Frame[pb.MoveRequest], model: ServedModel) -> Frame[Any]:
        """Closes the model to pushes, or opens it again: see `MoveStep`."""
        request, response = frame.header, pb.MoveResponse(map_version=model.shard_map.version)
        if request.step == pb.OPEN:
            model.gate = model.gate if request.map_version != model.shard_map.version else None
            return Frame(response, {})
        if request.step == pb.CLOSE:
            model.gate = model.gate or MoveGate()
            model.flush()
            response.pushes.extend(_names(model.taken.items()))
        elif model.gate is not None:
            model.gate.allowed = {push.worker_id: push.sequence for push in request.pushes}
            response.pushes.extend(_names(model.gate.missing(model.taken)))
        return Frame(response, {})

    def finish_training(self, frame: Frame[pb.FinishTrainingRequest], model: ServedModel) -> Frame[Any]:
        model.flush()
        return Frame(pb.FinishTrainingResponse(version=model.parameters.version), {})

    def set_learning_rate(self, frame: Frame[pb.SetLearningRateRequest], model: ServedModel) -> Frame[Any]:
        rate = frame.header.learning_rate
        if not math.isfinite(rate):
            raise WireError(f"The learning rate can't be set to {rate}: it must be finite.")
        model.parameters.set_learning_rate(rate)
        model.rate_version += 1
        return Frame(pb.SetLearningRateResponse(), {})


def _names(pushes: Iterable[tuple[int, int]]) -> list[pb.PushName]:
    return [pb.PushName(worker_id=worker, sequence=sequence) for worker, sequence in pushes]
