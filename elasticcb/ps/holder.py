"""The model of a parameter server: how it gets it, saves it, and releases it; and its state besides weights: movements
that wait, snapshots, and its place among the servers.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import secrets
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from elasticcb.checkpoint import parts, shard_file
from elasticcb.checkpoint.manifest import MANIFEST, read_manifest
from elasticcb.checkpoint.remote import Files, writable
from elasticcb.checkpoint.shard_file import Part, SavedFile
from elasticcb.errors import CheckpointError, ElasticCBError, WireError
from elasticcb.optimizers.state import Optimizers, from_tensors
from elasticcb.proto import elasticcb_pb2 as pb
from elasticcb.ps.parameters import Parameters, Snapshot, flat
from elasticcb.ps.table_limits import TableLimits
from elasticcb.ps.update_policy import AtOnce, PushName, policy_of
from elasticcb.rpc.tensors import Array, Frame, all_finite
from elasticcb.security.credentials import Access
from elasticcb.settings import TrainingSettings
from elasticcb.sharding.array_names import AGES, STATE, WEIGHTS, by_index, of_kind
from elasticcb.sharding.partition import MOST_SERVERS, ShardMap, Slice, VariableSpec, check_blocks, layout, partition
from elasticcb.sharding.partition import block_sizes as sizes_of
from elasticcb.sharding.push import Push
from elasticcb.sharding.table_state import from_tensors as tables_from
from elasticcb.storage.durable import TEMPORARY

if TYPE_CHECKING:
    from elasticcb.ps.table_update import MakeOptimizers


class Exported(NamedTuple):
    """State held for an `Export`."""

    id: int
    part: Part
    dense: Snapshot


class Kept(NamedTuple):
    """The last file with the state of a server, from which another can continue. Compared by identity.

    Attributes:
        path: or URL; "": there is none, or the model was replaced since.
        version: of the model in it.
        taken: as `ModelShard.taken` when it was written.
        removed: how many rows had been removed from tables, of a file for serving.
    """

    path: str = ""
    version: int = -1
    taken: Mapping[int, int] = {}
    removed: int = 0

    @property
    def name(self) -> str:
        return os.path.basename(self.path)


class MoveGate:
    """Which calls a server accepts before the number of servers changes.

    Attributes:
        allowed: by worker, the sequence number up to which pushes are accepted.
    """

    def __init__(self) -> None:
        self.allowed: dict[int, int] = {}
        self._refused: dict[int, int] = {}

    def admits(self, worker: int, sequence: int, creates_rows: bool) -> bool:
        """Whether a call may proceed: it changes nothing, or is a push that other servers have applied."""
        if not sequence:
            return not creates_rows
        if sequence <= self.allowed.get(worker, 0):
            return True
        self._refused[worker] = sequence
        return False

    def missing(self, taken: Mapping[int, int]) -> list[PushName]:
        """Pushes still missing; `taken` has the last applied push of each worker.

        A worker makes one push at a time: a later one implies that it got all answers to the earlier ones.
        """
        return [
            PushName(worker, last)
            for worker, last in self.allowed.items()
            if taken.get(worker, 0) < last and self._refused.get(worker, 0) <= last
        ]


@dataclass
class ModelShard:
    """The result of `Initialize`.

    Attributes:
        merged: notified when movements were merged; of the lock.
        waiting: movements that are not merged yet.
        taken: by worker, the sequence number of its last push that is part of the model, as earlier ones are.
        snapshots: by evaluation pass.
        kept: the last file to which further ones are added.
        exported_files: those for serving: the last one that another was added to, and that one.
        rate_version, slots_version: increase when the master sets the base rate, or the optimizers' state.
        gate: while it waits for a change of the number of servers.
    """

    index: int
    shard_map: ShardMap
    parameters: Parameters
    policy: AtOnce
    merged: threading.Condition
    taken: dict[int, int] = field(default_factory=dict)
    waiting: dict[PushName, Push] = field(default_factory=dict)
    snapshots: dict[int, Snapshot] = field(default_factory=dict)
    exported: Exported | None = None
    kept: Kept = field(default_factory=Kept)
    exported_files: list[Kept] = field(default_factory=list)
    rate_version: int = 0
    slots_version: int = 0
    gate: MoveGate | None = None
    is_closed: bool = False

    def has(self, name: PushName) -> bool:
        """Whether the push has come before."""
        return name in self.waiting or name.sequence <= self.taken.get(name.worker, 0)

    def merge(self, names: Sequence[PushName], leave_out: Collection[int] = ()) -> None:
        """Merges movements that wait, except those of the workers to leave out."""
        pushes = {name: self.waiting.pop(name) for name in names}
        used = {name: push for name, push in pushes.items() if name.worker not in leave_out}
        if used:
            self.parameters.merge(list(used.values()), self.policy.workers)
            self.taken.update({name.worker: name.sequence for name in used})
        if pushes:
            self.merged.notify_all()

    def flush(self) -> None:
        """Merges all movements that wait."""
        self.merge(self.policy.flush())

    def keep_gone(self) -> None:
        """Remembers which rows are removed, for the next files."""
        versions = [kept.version for kept in (self.kept, *self.exported_files) if kept.name]
        self.parameters.tables.keep_gone(min(versions, default=self.parameters.version))

    def snapshot_of(self, evaluation_round: int) -> Snapshot:
        """Raises `ElasticCBError` when there is none."""
        snapshot = self.snapshots.get(evaluation_round)
        if snapshot is None:
            kept = ", ".join(map(str, self.snapshots)) or "none"
            raise ElasticCBError(
                f"There is no snapshot of evaluation pass {evaluation_round} (available: {kept}). The pass is over, "
                "or this server was restarted."
            )
        return snapshot

    def given_snapshot(self, tensors: Mapping[str, Array]) -> Snapshot:
        """Weights sent by the master, as a snapshot."""
        specs, slices = self.parameters.specs, self.parameters.slices
        values = values_of(tensors, specs, slices, "Snapshot")
        weights, state = (flat(values, specs, slices, trainable) for trainable in (True, False))
        return Snapshot(self.parameters.version, self.parameters.state_version, weights, state)


def values_of(
    tensors: Mapping[str, Array], specs: Sequence[VariableSpec], slices: Sequence[Slice], call: str
) -> dict[int, Array]:
    """The slices' arrays in the frame of a call."""
    values: dict[int, Array] = {}
    for kind, trainable in ((WEIGHTS, True), (STATE, False)):
        blocks = of_kind(kind, tensors)
        check_blocks(blocks, sizes_of(specs, slices, trainable), f"{call}, {kind}")
        for part, dtype, offset in layout(specs, slices, trainable):
            value = blocks[dtype][offset : offset + part.elements]
            if not all_finite(value):
                logger.warning("%s: the new value of %s holds NaN or infinity", call, specs[part.variable].path)
            values[part.variable] = value.reshape(part.shape(specs[part.variable]))
    return values


logger = logging.getLogger(__name__)

_RECOVERY_FILE = re.compile(rf"(?:{re.escape(TEMPORARY)})?ps-(\d+)-")
_MODELS_WITH_KERNELS = 20  # creating the kernels of a model again takes longer than the rest of a small job's start


@dataclass(frozen=True)
class ServerOptions:
    """Options of a job for each of its parameter servers.

    Attributes:
        training: how movements are merged.
        lost_workers: ids of workers whose pushes are refused; may grow.
        scratch: folder for files on their way from or to a URL; None: the system's.
    """

    training: TrainingSettings
    make_optimizers: MakeOptimizers | None
    access: Access
    limits: TableLimits
    lost_workers: Collection[int]
    scratch: Path | None = None


class Holder:
    """Holds the model of one server.

    Attributes:
        model: None until the master has called `Initialize`.
        is_moving: whether it reads another model in place of the one that it held.
    """

    def __init__(self, options: ServerOptions) -> None:
        self._options = options
        self._initializing = threading.Lock()
        self._models = 0  # that it has held
        self.lock = threading.Lock()
        self.model: ModelShard | None = None
        self.is_moving = False

    @property
    def ready(self) -> bool:
        """Whether it holds and serves its part of the model."""
        return self.model is not None

    def present(self) -> ModelShard:
        """The model. Raises `ElasticCBError` when there is none yet."""
        if self.model is None:
            raise ElasticCBError(
                "This parameter server has no model yet; the master must call Initialize first. The server may have "
                "been restarted."
            )
        return self.model

    @contextlib.contextmanager
    def locked_model(self) -> Iterator[ModelShard]:
        """The model, under its lock. Raises the errors of `present`."""
        with self.lock:
            yield self.present()

    def initialize(self, frame: Frame[pb.InitializeRequest]) -> Frame[Any]:
        """Handles `Initialize`: serves the model in the request, or the one it refers to."""
        # Another master may also send a model.
        with self._initializing, Files(frame.header.checkpoint, self._options.scratch) as files:
            return self._begin_with(frame, files)

    def _begin_with(self, frame: Frame[pb.InitializeRequest], files: Files) -> Frame[Any]:
        request = frame.header
        if not 0 <= request.index < request.num_ps <= MOST_SERVERS:
            raise WireError(
                f"Initialize has server {request.index} of {request.num_ps}; at most {MOST_SERVERS:,} are allowed."
            )
        specs, slices, shard_map, optimizers = _part_of(request)
        loaded: parts.Loaded | None = None
        if request.checkpoint:
            if request.manifest and self.model is not None and self.model.gate is not None:
                self._drop()  # the number of servers changes
            loaded = _loaded(request, files, specs, slices, shard_map)
            part = loaded.part
            values, tables = part.weights, part.tables
            version = part.version if request.manifest else max(part.version, request.version)
        else:
            values, version = values_of(frame.tensors, specs, slices, "Initialize"), request.version
            tables = tables_from(frame.tensors)
        limits = replace(self._options.limits)  # which has no tables yet
        place = (request.index, shard_map)
        make_optimizers = self._options.make_optimizers
        parameters = Parameters(specs, slices, make_optimizers, values, version, place, limits, optimizers)
        parameters.tables.load(tables, max(version, request.version))
        if loaded is not None:
            parameters.restore_optimizers(part)
            parameters.tables.restore_ages(part.ages, version, stood_still=bool(request.manifest))
        else:
            state = from_tensors(frame.tensors)
            parameters.optimizers.check(state)
            parameters.load({}, state, version)
            parameters.tables.restore_ages(by_index(AGES, frame.tensors), version)
        model = self._model_of(request, shard_map, parameters)
        if loaded is not None and request.manifest:
            model.taken.update(loaded.answered)
            if loaded.file is not None:
                model.kept = Kept(
                    os.path.join(request.checkpoint, loaded.file.name), loaded.file.version, loaded.answered
                )
                parameters.tables.keep_gone(loaded.file.version)
        self.close()  # of the previous model
        parameters.version = max(parameters.version, request.version)
        with self.lock:
            self.model, self.is_moving = model, False
        logger.info(
            "Holds %d slices of %d variables, %d of %d servers, version %d",
            len(slices), len(specs), request.index, request.num_ps, parameters.version,
        )  # fmt: skip
        response = pb.InitializeResponse(version=parameters.version, learning_rate=parameters.optimizers.learning_rate)
        if loaded is not None:
            response.recovered_version = part.version
            response.file = "" if loaded.file is None else loaded.file.name
        return Frame(response, {})

    def save(self, request: pb.SaveRequest) -> pb.SaveResponse:
        """Handles `Save`; training continues meanwhile. Raises `CheckpointError` if the file can't be written."""
        if request.serving:
            return self._export(request)
        path, after = request.path, request.after
        is_recovery_file = request.HasField("after")
        with self.lock:
            model = self._by_map_of(request)
            kept, version, taken = model.kept, model.parameters.version, dict(model.taken)
            since = kept.version if after and after == kept.name else None
            if since == version and taken == kept.taken:  # pushes of rows make no version
                return pb.SaveResponse(version=version, after=after)
            if is_recovery_file:
                model.keep_gone()
            part = model.parameters.hold(self.lock, since)
        try:
            if request.keep:
                _remove_unused(Path(path).parent, model, {*request.keep, kept.name})
            with writable(path, self._options.scratch) as here:
                saved = shard_file.write_part(here, part, taken)
        finally:
            part.release()
        with self.lock:
            if is_recovery_file and model.kept is kept:
                model.kept = Kept(path, part.version, taken)
        return _answer(saved, "" if since is None else after)

    def _by_map_of(self, request: pb.SaveRequest) -> ModelShard:
        model = self.present()
        if request.map_version != model.shard_map.version:
            raise ElasticCBError("This server does not save: another shard map is in use.")
        return model

    def _export(self, request: pb.SaveRequest) -> pb.SaveResponse:
        """Handles `Save` for serving."""
        with self.lock:
            model = self._by_map_of(request)
            version, tables = model.parameters.version, model.parameters.tables
            now = Kept(request.path, version, dict(model.taken), tables.removed)
            before = [each for each in model.exported_files if each.name == request.after]
            is_same = any(each[1:] == now[1:] for each in before)
            if is_same and not request.whole and not request.unchanged:
                return pb.SaveResponse(version=version, after=request.after)
            wanted = {request.path: before[0].version} if before else {}
            paths = wanted | ({request.whole: None} if request.whole else {})
            chain = model.exported_files = list(before)  # others are not asked for again
            model.keep_gone()
            held = {path: model.parameters.hold_for_serving(self.lock, since) for path, since in paths.items()}
        files: dict[str, SavedFile] = {}
        try:
            for path, part in held.items():
                with writable(path, self._options.scratch) as here:
                    files[path] = shard_file.write_part(here, part)
        finally:
            for part in held.values():
                part.release()
        with self.lock:
            if files and model.exported_files is chain:
                chain.append(now)
        whole = files.pop(request.whole, None)
        response = _answer(files[request.path], request.after) if files else pb.SaveResponse(version=version)
        if whole is not None:
            response.whole.CopyFrom(_answer(whole))
        return response

    def save_last(self) -> pb.SaveResponse | None:
        """Saves what has changed since the last file that others are added to, next to it; None: there is none, or that
        fails."""
        if self.model is None or not self.model.kept.name:
            return None
        folder, before = os.path.split(self.model.kept.path)
        path = os.path.join(folder, f"ps-{self.model.index}-last-{secrets.token_hex(4)}.safetensors")
        map_version = self.model.shard_map.version
        try:
            return self.save(pb.SaveRequest(path=path, after=before, map_version=map_version))
        except CheckpointError as error:
            logger.warning("%s", error)
            return None

    def close(self) -> None:
        """Lets workers wait no more."""
        if self.model is not None:
            self.model.is_closed = True

    def _drop(self) -> None:
        """Frees the memory of the model, which has been saved."""
        with self.lock:
            self.close()
            self.is_moving, self.model = self.is_moving or self.model is not None, None

    def _model_of(self, request: pb.InitializeRequest, shard_map: ShardMap, parameters: Parameters) -> ModelShard:
        self._models += 1
        if parameters.tables.numbers and self._models % _MODELS_WITH_KERNELS == 0:
            from elasticcb.tf.tensors import forget_kernels

            forget_kernels()  # of models that no longer exist
        policy = policy_of(self._options.training, time.monotonic)
        for worker in request.members:
            policy.join(worker)
        return ModelShard(
            index=request.index,
            shard_map=shard_map,
            parameters=parameters,
            policy=policy,
            merged=threading.Condition(self.lock),
        )


def _answer(saved: SavedFile, after: str = "") -> pb.SaveResponse:
    return pb.SaveResponse(file=saved.name, bytes=saved.bytes, sha256=saved.sha256, version=saved.version, after=after)


def _remove_unused(folder: Path, model: ModelShard, keep: Collection[str]) -> None:
    """Removes files of this server that are not in use any more, or that a killed process has not finished. The servers
    share those of servers that have left.
    """
    for path in folder.glob("*"):
        found = _RECOVERY_FILE.match(path.name)
        is_own = found is not None and int(found[1]) % model.shard_map.servers == model.index
        if is_own and path.name not in keep:
            with contextlib.suppress(OSError):
                path.unlink()


def _loaded(
    request: pb.InitializeRequest,
    files: Files,
    specs: Sequence[VariableSpec],
    slices: Sequence[Slice],
    shard_map: ShardMap,
) -> parts.Loaded:
    """The part of this server in the files that the request refers to."""
    folder = request.checkpoint
    try:
        manifest = json.loads(request.manifest) if request.manifest else read_manifest(files.path(MANIFEST).parent)
        loaded = parts.load(files, manifest, specs, slices, request.index, shard_map)
        if not request.manifest:
            loaded.part.version = int(manifest["version"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"The manifest of {folder} can't be read: {error!r}.") from error
    return loaded


def _part_of(request: pb.InitializeRequest) -> tuple[list[VariableSpec], list[Slice], ShardMap, Optimizers]:
    """The variables of the model, the server's slices of them, which rows of tables are its own, and the optimizers."""
    specs = [VariableSpec.from_message(variable) for variable in request.variables]
    shard_map = ShardMap(request.num_ps, request.map_version)
    slices = partition(specs, request.num_ps, request.split)[request.index]
    rate = request.learning_rate if request.HasField("learning_rate") else None
    return specs, slices, shard_map, Optimizers(tuple(request.optimizers), dict(request.periods), rate)
