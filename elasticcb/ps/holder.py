"""The model of a parameter server: how it gets it, saves it for a replacement, and releases it."""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elasticcb.checkpoint import parts
from elasticcb.errors import CheckpointError, ElasticCBError, WireError
from elasticcb.optimizers.state import Optimizers
from elasticcb.optimizers.state_messages import from_tensors
from elasticcb.proto import elasticcb_pb2 as pb
from elasticcb.ps.parameters import Parameters
from elasticcb.ps.push_reader import PushReader
from elasticcb.ps.recovery import RecoveryLog, RecoveryWriter, Saved, forget_older, log_folder, read_by_older_map
from elasticcb.ps.served_model import ServedModel, values_of
from elasticcb.ps.table_limits import TableLimits
from elasticcb.ps.update_policy import policy_of
from elasticcb.rpc.tensors import Frame
from elasticcb.security.credentials import Access
from elasticcb.settings import TrainingSettings
from elasticcb.sharding.partition import MOST_SERVERS, Slice, VariableSpec, partition
from elasticcb.sharding.shard_map import ShardMap
from elasticcb.sharding.table_state import from_tensors as tables_from

if TYPE_CHECKING:
    from elasticcb.ps.row_optimizer import MakeOptimizers

logger = logging.getLogger(__name__)

_MODELS_WITH_KERNELS = 20  # creating the kernels of a model again takes longer than the rest of a small job's start


@dataclass(frozen=True)
class ServerOptions:
    """Options of a job for each of its parameter servers.

    Attributes:
        training: how movements are merged.
        recovery: folder for the recovery files of all servers; None: no files are written.
        lost_workers: ids of workers whose pushes are refused; may grow.
    """

    training: TrainingSettings
    make_optimizers: MakeOptimizers | None
    access: Access
    limits: TableLimits
    recovery: Path | None
    lost_workers: Collection[int]


class Holder:
    """Holds the model of one server.

    Attributes:
        model: None until the master has called `Initialize`.
        is_moving: whether it reads another model in place of the one that it held.
    """

    def __init__(self, options: ServerOptions) -> None:
        self._options = options
        self._writer: RecoveryWriter | None = None
        self._initializing = threading.Lock()
        self._models = 0  # that it has held
        self.lock = threading.Lock()
        self.model: ServedModel | None = None
        self.is_moving = False

    @property
    def ready(self) -> bool:
        """Whether it holds and serves its part of the model."""
        return self.model is not None

    def present(self) -> ServedModel:
        """The model. Raises `ElasticCBError` when there is none yet."""
        if self.model is None:
            raise ElasticCBError(
                "This parameter server has no model yet; the master must call Initialize first. The server may have "
                "been restarted."
            )
        return self.model

    def initialize(self, frame: Frame[pb.InitializeRequest]) -> Frame[Any]:
        """Handles `Initialize`: serves the model in the request, or the one it refers to."""
        with self._initializing:  # another master may also send a model
            return self._begin_with(frame)

    def _begin_with(self, frame: Frame[pb.InitializeRequest]) -> Frame[Any]:
        request = frame.header
        if not 0 <= request.index < request.num_ps <= MOST_SERVERS:
            raise WireError(
                f"Initialize has server {request.index} of {request.num_ps}; at most {MOST_SERVERS:,} are allowed."
            )
        specs, slices, shard_map, optimizers = _part_of(request)
        part, log, saved = None, self._recovery_log(request), None
        continues = False  # whether the server continues the files of its recovery log
        taken: dict[int, int] = {}
        if request.recover:
            if self._writer is not None:  # another master has also called this, or the number of servers changes
                self._writer.close()
            if self.model is not None and self.model.gate is not None:
                self._drop()
            saved, continues = self._recovered(log, request, specs, slices, shard_map)
            part = saved.part
            taken.update(saved.answered)
            values, version, tables = part.weights, part.version, part.tables
        elif request.checkpoint:
            part = parts.load_slices(request.checkpoint, specs, slices, request.index, shard_map)
            values, version, tables = part.weights, max(part.version, request.version), part.tables
        else:
            values, version = values_of(frame.tensors, specs, slices, "Initialize"), request.version
            tables = tables_from(frame.tensors)
        limits = replace(self._options.limits)  # which has no tables yet
        place = (request.index, shard_map)
        make_optimizers = self._options.make_optimizers
        parameters = Parameters(specs, slices, make_optimizers, values, version, place, limits, optimizers)
        parameters.tables.load(tables, max(version, request.version))
        if part is not None:
            parameters.restore_optimizers(part)
            parameters.tables.restore_ages(part.ages, version, stood_still=request.recover)
        else:
            state = from_tensors(frame.tensors)
            parameters.check_state(state)
            parameters.load({}, state, version)
        model = self._model_of(request, shard_map, parameters, taken)
        self.close()  # of the previous model
        recovered = parameters.version
        parameters.version = max(parameters.version, request.version)
        with self.lock:
            self.model, self.is_moving = model, False
        self._keep_files(model, log, saved if continues else None)
        logger.info(
            "Holds %d slices of %d variables, %d of %d servers, version %d",
            len(slices), len(specs), request.index, request.num_ps, parameters.version,
        )  # fmt: skip
        response = pb.InitializeResponse(version=parameters.version, learning_rate=parameters.learning_rate)
        response.complete = saved is not None and saved.final
        if part is not None:
            response.recovered_version = recovered if saved is not None else part.version
        return Frame(response, {})

    def persist(self, frame: Frame[pb.PersistRequest]) -> Frame[Any]:
        """Handles `Persist`."""
        with self._initializing:  # which gives it another model, with another writer
            model, writer = self.present(), self._writer
        if writer is not None:
            writer.write()
        if frame.header.forget_older and self._options.recovery is not None:
            forget_older(self._options.recovery, model.shard_map.version)
        return Frame(pb.PersistResponse(), {})

    def close(self) -> None:
        """Releases what the model needs, and stops writing recovery files."""
        self._hang_up()
        if self._writer is not None:
            self._writer.close()

    def _drop(self) -> None:
        """Frees the memory of the model, which is in the recovery files."""
        with self.lock:
            self._hang_up()
            self.is_moving, self.model = self.is_moving or self.model is not None, None

    def _hang_up(self) -> None:
        """Lets workers wait no more."""
        if self.model is not None:
            self.model.is_closed = True

    def _model_of(
        self, request: pb.InitializeRequest, shard_map: ShardMap, parameters: Parameters, taken: dict[int, int]
    ) -> ServedModel:
        self._models += 1
        if parameters.tables.numbers and self._models % _MODELS_WITH_KERNELS == 0:
            from elasticcb.tf.convert import forget_kernels

            forget_kernels()  # of models that no longer exist
        policy = policy_of(self._options.training, time.monotonic)
        for worker in request.members:
            policy.join(worker)
        return ServedModel(
            specs=parameters.specs,
            slices=parameters.slices,
            index=request.index,
            num_ps=request.num_ps,
            shard_map=shard_map,
            parameters=parameters,
            reader=PushReader(parameters.specs, parameters.slices, parameters.tables.check_ids),
            policy=policy,
            merged=threading.Condition(self.lock),
            taken=taken,
        )

    def write_down(self, replaced: bool = False, final: bool = False) -> None:
        """Writes recovery files now, if enabled; arguments as in `RecoveryWriter.write`."""
        writer = self._writer
        if writer is not None:
            try:
                writer.write(replaced, final)
            except ElasticCBError as error:
                logger.warning("%s", error)

    def _keep_files(self, model: ServedModel, log: RecoveryLog | None, held: Saved | None) -> None:
        """Recovery files are written from now on.

        Args:
            held: content of the log's files, which are continued; None: the log starts over.
        """
        if log is not None:
            self._writer = RecoveryWriter(log, functools.partial(self._saved, model))
            if held is not None:
                self._writer.continue_from(held.part.version)

    def _recovery_log(self, request: pb.InitializeRequest) -> RecoveryLog | None:
        if self._options.recovery is None or not request.run:
            return None
        return RecoveryLog(log_folder(self._options.recovery, request.index, request.map_version), request.run)

    def _recovered(
        self,
        log: RecoveryLog | None,
        request: pb.InitializeRequest,
        specs: Sequence[VariableSpec],
        slices: Sequence[Slice],
        shard_map: ShardMap,
    ) -> tuple[Saved, bool]:
        """Content of the recovery files, and whether they belong to this server and map."""
        if log is None or self._options.recovery is None:
            raise CheckpointError("This server writes no recovery files.")
        try:
            saved = log.take_over()
        except CheckpointError as error:
            if not request.map_version:
                raise
            logger.info("%s Using the files written before the last move.", error)
            root, run, split = self._options.recovery, request.run, request.split
            return read_by_older_map(root, run, specs, split, slices, request.index, shard_map), False
        shapes = {index: weights.shape for index, weights in saved.part.weights.items()}
        missing = [part.variable for part in slices if shapes.get(part.variable) != part.shape(specs[part.variable])]
        if missing:
            raise CheckpointError(f"The recovery files lack variables {missing}: they belong to another model.")
        return saved, True

    def _saved(self, model: ServedModel, since: int | None) -> Saved:
        with self.lock:
            if model is not self.model:
                raise ElasticCBError("Another shard map is in use now.")  # its own files are written
            return Saved(model.parameters.hold(self.lock, since), dict(model.taken))


def _part_of(request: pb.InitializeRequest) -> tuple[list[VariableSpec], list[Slice], ShardMap, Optimizers]:
    """The variables of the model, the server's slices of them, which rows of tables are its own, and the optimizers."""
    specs = [VariableSpec.from_message(variable) for variable in request.variables]
    shard_map = ShardMap(request.num_ps, request.map_version)
    slices = partition(specs, request.num_ps, request.split)[request.index]
    rate = request.learning_rate if request.HasField("learning_rate") else None
    return specs, slices, shard_map, Optimizers(tuple(request.optimizers), dict(request.periods), rate)
