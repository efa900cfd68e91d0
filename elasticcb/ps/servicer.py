"""Answers the calls of `ParameterServer`: checks, asks the update policy, changes the parameters.

One lock lets one call at a time read or change the model. Blocks of weights are made once per version
and shared by all answers, so that the lock is held for little more than an update.
"""

from __future__ import annotations

import functools
import logging
import math
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from elasticcb.checkpoint import parts
from elasticcb.errors import CheckpointError, ElasticCBError, WireError
from elasticcb.optimizers.state import OptimizerState
from elasticcb.optimizers.state_messages import from_tensors, to_tensors
from elasticcb.proto import elasticcb_pb2 as pb
from elasticcb.ps.migration import Moves
from elasticcb.ps.once import Once
from elasticcb.ps.optimizer_set import MakeOptimizers
from elasticcb.ps.parameters import Parameters
from elasticcb.ps.peers import Peers
from elasticcb.ps.push_reader import PushReader
from elasticcb.ps.recovery import (
    RecoveryLog,
    RecoveryWriter,
    Saved,
    forget_older,
    log_folder,
    read_by_older_map,
)
from elasticcb.ps.replica import Neighbours, Replica
from elasticcb.ps.replica_log import Entry, Origin
from elasticcb.ps.served_model import Change, Exported, PushAnswer, ServedModel, Staged, values_of
from elasticcb.ps.table_limits import TableLimits
from elasticcb.ps.update_policy import Action, Answered, PushName, policy_of
from elasticcb.rpc.frame_service import Handler
from elasticcb.rpc.services import PS_METHODS
from elasticcb.rpc.tensors import Frame, dtype_of
from elasticcb.security.credentials import OPEN, Access
from elasticcb.settings import TrainingSettings
from elasticcb.sharding.array_names import STATE, TABLE, WANTED, WEIGHTS, by_index, named, only, without
from elasticcb.sharding.bucket_map import BucketMap
from elasticcb.sharding.partition import MOST_SERVERS, Slice, VariableSpec, partition
from elasticcb.sharding.push import Push
from elasticcb.sharding.table_state import TableState
from elasticcb.sharding.table_state import from_tensors as tables_from
from elasticcb.sharding.table_state import to_tensors as tables_to
from elasticcb.tf.convert import forget_kernels

Array = npt.NDArray[Any]
logger = logging.getLogger(__name__)


class Servicer:
    """The calls of one parameter server.

    Args:
        training: asynchronous or synchronous, and how many gradients make an update.
        make_optimizers: makes fresh optimizers, as many as asked for; None where nothing is trained.
        access: to the job, to call other servers with.
        limits: of embedding tables.
        recovery: the folder for recovery files of all servers, and the seconds between two of them; None: none are
            written.
        warn: shows the user that something is wrong which the job survives.
        patience_seconds: of calls to other servers.
        lost_workers: ids of those whose pushes are refused. It may grow.
        replicas: whether a neighbour keeps what these files lack.

    Attributes:
        handlers: what answers each call, by the method's name.
    """

    def __init__(
        self,
        training: TrainingSettings,
        make_optimizers: MakeOptimizers | None,
        access: Access = OPEN,
        limits: TableLimits | None = None,
        recovery: tuple[Path, float] | None = None,
        warn: Callable[[str], None] = logger.warning,
        patience_seconds: float = 30.0,
        lost_workers: Collection[int] = (),
        replicas: bool = False,
    ) -> None:
        self._lost_workers = lost_workers
        self._access, self._patience = access, patience_seconds
        self._replicas = replicas
        self._recovery = recovery
        self._warn = warn
        self._writer: RecoveryWriter | None = None
        self._limits = limits or TableLimits()
        self._training = training
        self._make_optimizers = make_optimizers
        self._lock = threading.Lock()
        self._initializing = threading.Lock()
        self._once = Once()
        self._model: ServedModel | None = None
        self._neighbours = Neighbours()
        self._moves = Moves(self._lock, access, lambda: self._model, self._empty_model, self._serve, self)
        self.handlers = self._answers()

    def _answers(self) -> dict[str, Handler]:
        """What answers each call, by the method's name."""
        locked, saved = self._locked, self._then_saved
        answers: dict[str, Handler] = {
            "Exchange": locked(self._exchange),
            "Apply": locked(self._apply),
            "Snapshot": locked(self._snapshot),
            "FinishTraining": saved(locked(self._finish_training)),
            "SetLearningRate": locked(self._set_learning_rate),
            "LoadState": saved(locked(self._load_state)),
            "SetNeighbour": self._set_neighbour,
            "Persist": self._persist,
            "Replicate": self._neighbours.replicate,
            "ReadLog": self._neighbours.read_log,
            "Initialize": self._initialize,
            "Save": self._save,
            "ReadTable": self._read_table,
            "Export": self._export,
            "Move": self._moves.move,
            "Receive": self._moves.receive,
        }
        return {name: self._once_if_numbered(name, answer) for name, answer in answers.items()}

    def close(self) -> None:
        # Without the lock: an update may wait for another server, which this ends.
        if self._model is not None:
            self._model.peers.close()
            if self._model.replica is not None:
                self._model.replica.close()
        if self._writer is not None:
            self._writer.close()

    def _once_if_numbered(self, name: str, answer: Handler) -> Handler:
        if not PS_METHODS[name].is_numbered:
            return answer
        return lambda frame: self._once.do(frame.header.call, lambda: answer(frame))

    def _locked(self, function: Callable[[Frame[Any], Any], Frame[Any]]) -> Handler:
        def answer(frame: Frame[Any]) -> Frame[Any]:
            with self._lock:
                model = self._initialized()
                if model.replica is None:
                    return function(frame, model)
            return self._replicated(function, frame, model, model.replica)

        return answer

    def _replicated(
        self, function: Callable[[Frame[Any], Any], Frame[Any]], frame: Frame[Any], model: ServedModel, replica: Replica
    ) -> Frame[Any]:
        """Answers a call when the neighbour knows all changes that the answer may tell of: those of the call, and those
        that others have made before, such as the first try of this call."""
        before = after = 0
        try:
            with self._lock:
                before = replica.noted
                try:
                    return function(frame, model)
                finally:
                    after = replica.noted
        finally:
            replica.confirm(after)
            if after != before and replica.is_full:
                self.write_down()

    def _then_saved(self, method: Handler) -> Handler:
        """For what workers can't do again: it is in the recovery files before it is answered."""

        def answer(frame: Frame[Any]) -> Frame[Any]:
            response = method(frame)
            self.write_down(replaced=True)
            return response

        return answer

    def write_down(self, replaced: bool = False) -> None:
        """Writes recovery files now, if there are to be any; `replaced` as in `RecoveryWriter.write`."""
        if self._writer is not None:
            try:
                self._writer.write(replaced)
            except CheckpointError as error:
                logger.warning("%s", error)

    @property
    def ready(self) -> bool:
        """Whether it holds its part of the model, and serves it."""
        model = self._model
        return model is not None and not model.failure

    def _initialized(self) -> ServedModel:
        if self._model is None:
            raise ElasticCBError(
                "This parameter server holds no model yet; the master has to call Initialize first. It may "
                "have been restarted."
            )
        if self._model.failure:
            raise ElasticCBError(self._model.failure)
        return self._model

    # -------------------------------------------------------------- the model comes and goes

    def _initialize(self, frame: Frame[pb.InitializeRequest]) -> Frame[Any]:
        with self._initializing:  # another master may give a model, too
            return self._begin_with(frame)

    def _begin_with(self, frame: Frame[pb.InitializeRequest]) -> Frame[Any]:
        request = frame.header
        specs = [VariableSpec.from_message(variable) for variable in request.variables]
        if not 0 <= request.index < request.num_ps <= MOST_SERVERS:
            raise WireError(
                f"Initialize names server {request.index} of {request.num_ps}; there may be {MOST_SERVERS:,}."
            )
        buckets = BucketMap.from_bytes(request.num_ps, request.buckets, request.map_version)
        slices = partition(specs, request.num_ps, request.split)[request.index]
        part, log, saved = None, self._recovery_log(request), None
        continues = False  # the server goes on with the files of its recovery log
        answered: Answered[PushAnswer] = Answered()
        if request.recover:
            if self._writer is not None:  # another master has called this, too
                self._writer.close()
            saved, continues = self._recovered(log, request, specs, slices, buckets)
            part = saved.part
            answered.forget_up_to(saved.answered)
            values, version, tables = part.weights, part.version, part.tables
        elif request.checkpoint:
            part = parts.load_slices(request.checkpoint, specs, slices, request.index, buckets)
            values, version, tables = part.weights, max(part.version, request.version), part.tables
        else:
            values, version = values_of(frame.tensors, specs, slices, "Initialize"), request.version
            tables = tables_from(frame.tensors)
        limits = replace(self._limits)  # which knows of no tables yet
        place = (request.index, buckets)
        parameters = Parameters(specs, slices, self._make_optimizers, values, version, place, limits)
        parameters.tables.load(tables, max(version, request.version))
        if part is not None:
            parameters.restore_optimizers(part)
        else:
            state = from_tensors(frame.tensors, request.optimizers)
            parameters.check_state(state)
            parameters.load({}, state, version)
        model = self._model_of(request, specs, slices, buckets, parameters, answered)
        self.close()  # of the last model
        complete = False
        if log is not None and not continues:
            log.begin()
        if log is not None and self._replicas:
            replica = Replica(Origin(request.run, request.index), log, request.neighbour, self._access)
            noted = saved.noted if saved is not None and continues else None
            complete = noted is not None and replica.go_on(noted, lambda entry: self._replay(entry, model))
            model.replica = replica
        recovered = parameters.version
        parameters.version = max(parameters.version, request.version)
        with self._lock:
            self._model = model
        self._keep_files(model, log, saved if continues else None)
        logger.info(
            "Holds %d slices of %d variables, %d of %d servers, version %d",
            len(slices), len(specs), request.index, request.num_ps, parameters.version,
        )  # fmt: skip
        response = pb.InitializeResponse(version=parameters.version, learning_rate=parameters.learning_rate)
        response.complete = complete
        if part is not None:
            response.recovered_version = recovered if saved is not None else part.version
        return Frame(response, {})

    def _replay(self, entry: Entry, model: ServedModel) -> bool:
        """Makes a change of a lost server again, which its neighbour has kept; whether that is possible."""
        if entry.method == "Exchange":
            verdict = self._push(pb.ExchangeRequest.FromString(entry.header), entry.tensors, model)
            return verdict.status == pb.ACCEPTED
        if entry.method == "SetLearningRate":
            model.parameters.set_learning_rate(pb.SetLearningRateRequest.FromString(entry.header).learning_rate)
            return True
        return False

    def _set_neighbour(self, frame: Frame[pb.SetNeighbourRequest]) -> Frame[Any]:
        with self._lock:
            replica = self._initialized().replica
        if replica is not None and self._writer is not None:
            replica.follow(frame.header.address)
            self._writer.wake()  # begins a log, and writes what it builds on
        return Frame(pb.SetNeighbourResponse(), {})

    def _persist(self, frame: Frame[pb.PersistRequest]) -> Frame[Any]:
        writer = self._writer
        if writer is not None:
            writer.write_soon()
        return Frame(pb.PersistResponse(), {})

    def _model_of(
        self,
        request: pb.InitializeRequest,
        specs: Sequence[VariableSpec],
        slices: Sequence[Slice],
        buckets: BucketMap,
        parameters: Parameters,
        answered: Answered[PushAnswer],
    ) -> ServedModel:
        forget_kernels()  # of models that are gone
        training = self._training
        use_peers = request.index == 0 and not training.use_async
        if use_peers and len(request.ps_addresses) != request.num_ps:
            if request.num_ps > 1:
                raise WireError(
                    f"Initialize of the first of {request.num_ps} servers names {len(request.ps_addresses)} "
                    "addresses; in synchronous mode it needs all of them, to pass updates on."
                )
            use_peers = False
        return ServedModel(
            specs=specs,
            slices=slices,
            index=request.index,
            num_ps=request.num_ps,
            buckets=buckets,
            parameters=parameters,
            reader=PushReader(specs, slices, parameters.tables.check_ids),
            peers=Peers(list(request.ps_addresses)[1:] if use_peers else [], self._access, self._patience),
            policy=policy_of(training),
            staged={},
            answered=answered,
            snapshots={},
            held={},
        )

    def _empty_model(
        self,
        request: pb.InitializeRequest,
        specs: Sequence[VariableSpec],
        slices: Sequence[Slice],
        buckets: BucketMap,
    ) -> ServedModel:
        """What a move fills."""
        if not self._training.use_async:
            raise ElasticCBError("The number of parameter servers can't change in synchronous mode.")
        zeros = {part.variable: np.zeros(part.shape(specs[part.variable]), _dtype(specs, part)) for part in slices}
        place, limits = (request.index, buckets), replace(self._limits)
        parameters = Parameters(specs, slices, self._make_optimizers, zeros, 0, place, limits)
        return self._model_of(request, specs, slices, buckets, parameters, Answered())

    def _serve(self, model: ServedModel, request: pb.InitializeRequest) -> None:
        """Serves what a move has made. The lock is held."""
        if self._writer is not None:
            self._writer.stop()
            self._writer = None
        self._model = model
        log = self._recovery_log(request)
        if log is not None:
            log.begin()
        self._keep_files(model, log, None)

    def _keep_files(self, model: ServedModel, log: RecoveryLog | None, held: Saved | None) -> None:
        """Writes recovery files from now on.

        Args:
            held: what the log's files hold, which go on; None: it begins anew.
        """
        if log is None or self._recovery is None:
            return
        take = functools.partial(self._saved, model)
        self._writer = RecoveryWriter(log, take, self._recovery[1], self._warn, model.replica)
        if held is not None:
            self._writer.continue_from(held.part.version, held.noted)
        elif model.replica is not None:
            self.write_down()  # on which the log builds
        self._writer.start()

    def _recovery_log(self, request: pb.InitializeRequest) -> RecoveryLog | None:
        if self._recovery is None or not request.run:
            return None
        return RecoveryLog(log_folder(self._recovery[0], request.index, request.map_version), request.run)

    def forget_older(self, map_version: int) -> None:
        """Removes recovery files by older maps."""
        if self._recovery is not None:
            forget_older(self._recovery[0], map_version)

    def _recovered(
        self,
        log: RecoveryLog | None,
        request: pb.InitializeRequest,
        specs: Sequence[VariableSpec],
        slices: Sequence[Slice],
        buckets: BucketMap,
    ) -> tuple[Saved, bool]:
        """What the recovery files hold, and whether they are those of this server and map."""
        if log is None or self._recovery is None:
            raise CheckpointError("This server keeps no recovery files.")
        try:
            saved = log.take_over()
        except CheckpointError as error:
            if not request.map_version:
                raise
            logger.info("%s What was written before the last move is used.", error)
            place = (request.index, slices)
            found = read_by_older_map(self._recovery[0], request.run, specs, request.split, place, buckets)
            return found, False
        shapes = {index: weights.shape for index, weights in saved.part.weights.items()}
        missing = [part.variable for part in slices if shapes.get(part.variable) != part.shape(specs[part.variable])]
        if missing:
            raise CheckpointError(f"The recovery files lack variables {missing}: they are of another model.")
        return saved, True

    def _saved(self, model: ServedModel, since: int | None) -> Saved:
        with self._lock:
            if model is not self._model:
                raise CheckpointError("Another map counts by now.")
            noted = 0 if model.replica is None else model.replica.noted
            return Saved(model.parameters.hold(self._lock, since), model.answered.last(), noted)

    def _save(self, frame: Frame[pb.SaveRequest]) -> Frame[Any]:
        directory = frame.header.directory
        with self._lock:
            model = self._initialized()
            if frame.header.hold:
                model.peers.call("Save", frame.header)
                model.release_held()
                model.held = {directory: model.parameters.hold(self._lock)}
                return Frame(pb.SaveResponse(version=model.parameters.version), {})
            held = model.held.pop(directory, None)
            part = model.parameters.hold(self._lock) if held is None else held
        try:  # others go on while the file is written
            saved = parts.save_part(directory, part, model.slices, model.index, model.num_ps)
        finally:
            part.release()
        response = pb.SaveResponse(file=saved.name, bytes=saved.bytes, sha256=saved.sha256, version=part.version)
        return Frame(response, {})

    def _export(self, frame: Frame[pb.ExportRequest]) -> Frame[Any]:
        request = frame.header
        with self._lock:
            model = self._initialized()
            parameters = model.parameters
            if model.exported is not None and (request.release or not request.id or model.exported.id != request.id):
                model.exported.part.release()
                model.exported = None
            if request.release:
                if not request.id:
                    model.release_held()
                return Frame(pb.ExportResponse(version=parameters.version), {})
            if request.hold:
                model.peers.call("Export", request)
            if model.exported is None:
                model.exported = Exported(request.id, parameters.hold(self._lock), parameters.snapshot())
            part, dense = model.exported.part, model.exported.dense
        response = pb.ExportResponse(version=part.version)
        if request.hold:
            return Frame(response, {})
        tensors = named(WEIGHTS, dense.weights) | named(STATE, dense.state)
        response.optimizers.extend(name for name in part.optimizer.split(", ") if name)
        response.rows.update({number: len(table) for number, table in part.held.items()})
        return Frame(response, tensors | to_tensors(OptimizerState(part.slots, part.extras, part.shared)))

    def _load_state(self, frame: Frame[pb.LoadStateRequest], model: ServedModel) -> Frame[Any]:
        request = frame.header
        if request.id == model.loaded[0]:  # a retry of what was done
            return Frame(pb.LoadStateResponse(version=model.loaded[1]), {})
        parameters = model.parameters
        if request.version:
            change = model.change
            if change is None or change.id != request.id or request.version != parameters.version + 1:
                raise ElasticCBError(
                    f"Server {model.index} can't follow the first server to version {request.version}: it is at "
                    f"version {parameters.version}, and has {'another' if change else 'no'} state to set. It may "
                    "have been restarted; start the job again from its last checkpoint."
                )
            self._set(change, model)
            return Frame(pb.LoadStateResponse(version=parameters.version), {})
        change = self._read_change(frame, model)
        if model.policy.first_decides and model.index > 0:
            model.change = change
            return Frame(pb.LoadStateResponse(version=parameters.version), {})
        with model.all_or_none(parameters.version + 1):
            model.peers.call("LoadState", pb.LoadStateRequest(id=request.id, version=parameters.version + 1))
            self._set(change, model)
        return Frame(pb.LoadStateResponse(version=parameters.version), {})

    @staticmethod
    def _read_change(frame: Frame[pb.LoadStateRequest], model: ServedModel) -> Change:
        values: dict[int, Array] = {}
        if only(frame.tensors, WEIGHTS, STATE):
            values = values_of(frame.tensors, model.specs, model.slices, "LoadState")
        state = from_tensors(frame.tensors, frame.header.optimizers)
        model.parameters.check_state(state)
        return Change(frame.header.id, values, state, tables_from(frame.tensors))

    @staticmethod
    def _set(change: Change, model: ServedModel) -> None:
        version = model.parameters.version + 1
        model.parameters.load(change.values, change.optimizers, version, change.tables)
        model.change, model.loaded = None, (change.id, version)
        model.drop_stale()
        if model.replica is not None:
            model.replica.note("LoadState", pb.LoadStateRequest(), {})  # the files hold it before it is answered

    def _read_table(self, frame: Frame[pb.ReadTableRequest]) -> Frame[Any]:
        request = frame.header
        number, start = request.variable, max(0, request.start)
        with self._lock:
            model = self._initialized()
            table, exported = model.parameters.tables[number], model.exported
            if not request.export_id:
                total, state = len(table), TableState(*table.rows(start, request.count))
        if request.export_id:
            if exported is None or exported.id != request.export_id:
                raise ElasticCBError("This export is over, or the server was restarted.")
            held = exported.part.held[number]
            total, state = len(held), held.read(start)
        return Frame(pb.ReadTableResponse(total=total), tables_to({number: state}))

    # -------------------------------------------------------------- training

    def _exchange(self, frame: Frame[pb.ExchangeRequest], model: ServedModel) -> Frame[Any]:
        request = frame.header
        if request.map_version != model.buckets.version:
            return Frame(pb.ExchangeResponse(status=pb.MOVED, map_version=model.buckets.version), {})
        if model.gate is not None and not model.gate.admits(request.worker_id, request.sequence, request.create_rows):
            return Frame(pb.ExchangeResponse(status=pb.MOVING), {})
        pushed = without(frame.tensors, WANTED)
        verdict = PushAnswer(pb.NO_PUSH)
        if request.sequence:
            if request.worker_id in self._lost_workers:
                raise ElasticCBError(
                    f"The gradients of worker {request.worker_id} are refused: the master gave it up, and its tasks to "
                    "others."
                )
            verdict = self._push(request, pushed, model)
        elif pushed:
            raise WireError("A push needs a sequence number above 0; this one has none.")
        parameters = model.parameters
        response = pb.ExchangeResponse(
            status=verdict.status,  # type: ignore[arg-type]
            reason=verdict.reason,
            version=parameters.version,
            state_version=parameters.state_version,
            learning_rate=parameters.learning_rate,
            base_learning_rate_version=model.rate_version,
        )
        snapshot = model.snapshot_of(request.snapshot) if request.snapshot else None
        if snapshot is not None:
            response.version, response.state_version = snapshot.version, snapshot.state_version
        ids = by_index(WANTED, frame.tensors)
        tensors = named(TABLE, parameters.tables.lookup(ids, request.create_rows, snapshot and snapshot.tables))
        if not request.pull:
            return Frame(response, tensors)
        pulled = snapshot or parameters.snapshot()
        # Not "older than known": a server that was restored may stand at a lower version.
        if pulled.version != request.known_version:
            tensors |= named(WEIGHTS, pulled.weights)
        if pulled.state_version != request.known_state_version:
            tensors |= named(STATE, pulled.state)
        return Frame(response, tensors)

    def _push(self, request: pb.ExchangeRequest, tensors: Mapping[str, Array], model: ServedModel) -> PushAnswer:
        name = PushName(request.worker_id, request.sequence)
        verdict = model.answered.find(name)
        if verdict is not None:
            return verdict
        if model.answered.forgotten(name):
            return PushAnswer(pb.ACCEPTED, "this push was answered long ago")
        push = model.reader.read(Push.decode(request, tensors))
        model.parameters.check_learning_rate(push)
        verdict = self._judge(name, request, push, model)
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
                f"{model.policy.name} mode. Only in synchronous "
                "mode, and only to servers other than the first, pushes are staged."
            )
        present = model.parameters.version
        if follows:
            # Whether it is used, and when, the first server decides.
            model.staged[name] = Staged(push.copied(), request.version)
            return PushAnswer(pb.ACCEPTED, "staged")
        decision = model.policy.decide(name, request.version, present)
        if decision.action is Action.STALE:
            return PushAnswer(pb.STALE, decision.reason)
        applied_now = decision.action is Action.APPLY
        model.staged[name] = Staged(push if applied_now else push.copied(), request.version)
        if decision.action is Action.APPLY:
            self._update(decision.pushes, model)
        return PushAnswer(pb.ACCEPTED, decision.reason)

    def _update(self, names: Sequence[PushName], model: ServedModel) -> None:
        """Applies the mean of staged pushes, on all servers when this is the first of several."""
        push = model.reader.mean([model.staged.pop(name).push for name in names])
        version = model.parameters.version + 1
        with model.all_or_none(version):
            pushes = [pb.PushName(worker_id=name.worker, sequence=name.sequence) for name in names]
            model.peers.call("Apply", pb.ApplyRequest(pushes=pushes, version=version))
            model.parameters.apply(push)

    def _apply(self, frame: Frame[pb.ApplyRequest], model: ServedModel) -> Frame[Any]:
        request = frame.header
        parameters = model.parameters
        if request.version > parameters.version:  # else it is a retry of what was done
            names = [PushName(push.worker_id, push.sequence) for push in request.pushes]
            missing = [name for name in names if name not in model.staged]
            if missing or request.version != parameters.version + 1:
                raise ElasticCBError(
                    f"Server {model.index} can't follow the first server to version {request.version}: it is "
                    f"at version {parameters.version}, without {len(missing)} of {len(names)} pushes. It may "
                    "have been restarted; start the job again from its last checkpoint."
                )
            parameters.apply(model.reader.mean([model.staged.pop(name).push for name in names]))
            model.drop_stale()
        return Frame(pb.ApplyResponse(version=parameters.version), {})

    def _finish_training(self, frame: Frame[pb.FinishTrainingRequest], model: ServedModel) -> Frame[Any]:
        names = model.policy.flush().pushes
        if names:
            self._update(names, model)
        model.staged.clear()
        if frame.header.finalize:
            model.parameters.finalize()
            if model.replica is not None:
                model.replica.note("FinishTraining", frame.header, {})
        return Frame(pb.FinishTrainingResponse(version=model.parameters.version), {})

    def _set_learning_rate(self, frame: Frame[pb.SetLearningRateRequest], model: ServedModel) -> Frame[Any]:
        rate = frame.header.learning_rate
        if not math.isfinite(rate):
            raise WireError(f"The learning rate was to be set to {rate}; it must be finite.")
        model.parameters.set_learning_rate(rate)
        model.rate_version += 1
        if model.replica is not None:
            model.replica.note("SetLearningRate", frame.header, {})
        return Frame(pb.SetLearningRateResponse(), {})

    # -------------------------------------------------------------- evaluation

    def _snapshot(self, frame: Frame[pb.SnapshotRequest], model: ServedModel) -> Frame[Any]:
        evaluation_round = frame.header.evaluation_round
        if evaluation_round <= 0:
            raise WireError(f"Snapshot names the evaluation round {evaluation_round}; they count from 1.")
        if frame.header.release:
            released = model.snapshots.pop(evaluation_round, None)
            for table in (released.tables if released and released.tables else {}).values():
                table.release()
            return Frame(pb.SnapshotResponse(version=model.parameters.version), {})
        if frame.tensors:
            model.snapshots[evaluation_round] = model.given_snapshot(frame.tensors)._replace(
                tables=model.parameters.tables.snapshot()
            )
        elif evaluation_round not in model.snapshots:
            model.peers.call("Snapshot", frame.header)
            model.snapshots[evaluation_round] = model.parameters.kept_snapshot()
        return Frame(pb.SnapshotResponse(version=model.snapshots[evaluation_round].version), {})


def _dtype(specs: Sequence[VariableSpec], part: Slice) -> Any:
    return dtype_of(specs[part.variable].dtype)


def _non_finite(request: pb.ExchangeRequest, push: Push, model: ServedModel) -> str:
    """Why a push holds NaN or infinity; "" when it does not."""
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
    return (
        f"{what} holds NaN or infinity (loss {request.loss:g}, version {request.version}); a smaller "
        "learning rate, clipping of gradients or other inputs may help"
    )
