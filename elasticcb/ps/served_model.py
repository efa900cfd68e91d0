"""A server's state besides weights: pending pushes, answers, snapshots, and its place among the servers."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from elasticcb.checkpoint.shard_file import Part
from elasticcb.errors import ElasticCBError
from elasticcb.optimizers.state import OptimizerState
from elasticcb.proto import elasticcb_pb2 as pb
from elasticcb.ps.parameters import Parameters, Snapshot, flat
from elasticcb.ps.peers import Peers
from elasticcb.ps.push_reader import PushReader
from elasticcb.ps.replica import Replica
from elasticcb.ps.update_policy import Answered, PushName, UpdatePolicy
from elasticcb.rpc.tensors import Array, all_finite
from elasticcb.sharding.array_names import STATE, WEIGHTS, of_kind
from elasticcb.sharding.bucket_map import BucketMap
from elasticcb.sharding.partition import Slice, VariableSpec, check_blocks, layout
from elasticcb.sharding.partition import block_sizes as sizes_of
from elasticcb.sharding.push import Push
from elasticcb.sharding.table_state import TableState

logger = logging.getLogger(__name__)


class PushAnswer(NamedTuple):
    """The answer to a push and its retries."""

    status: int
    reason: str = ""


class Staged(NamedTuple):
    """A push that waits for the first server's decision."""

    push: Push
    version: int  # version of the weights it was computed on


class Change(NamedTuple):
    """A checked `LoadState` request."""

    id: int
    values: Mapping[int, Array]  # of all variables, or of none
    optimizers: OptimizerState
    tables: Mapping[int, TableState]


class Exported(NamedTuple):
    """State held for an `Export`."""

    id: int
    part: Part
    dense: Snapshot


class MoveGate:
    """Which calls a server accepts before it hands over its data.

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
class ServedModel:
    """The result of `Initialize`."""

    specs: Sequence[VariableSpec]
    slices: Sequence[Slice]
    index: int
    num_ps: int
    buckets: BucketMap
    parameters: Parameters
    reader: PushReader
    peers: Peers
    policy: UpdatePolicy
    answered: Answered[PushAnswer]
    staged: dict[PushName, Staged] = field(default_factory=dict)  # synchronous mode: pushes waiting for an update
    snapshots: dict[int, Snapshot] = field(default_factory=dict)  # by evaluation pass
    held: dict[str, Part] = field(default_factory=dict)  # by checkpoint folder, data to write there
    exported: Exported | None = None
    change: Change | None = None  # synchronous mode: a change that waits for the first server
    loaded: tuple[int, int] = (0, 0)  # id of the last change, and the version it made
    rate_version: int = 0  # increases when the master sets the base rate
    replica: Replica | None = None  # of this server, on its neighbour
    failure: str = ""  # an update that only some servers have applied
    gate: MoveGate | None = None  # while it hands over its data

    @contextlib.contextmanager
    def all_or_none(self, version: int) -> Iterator[None]:
        """Blocks everything after a change that not all servers have made."""
        try:
            yield
        except Exception as error:
            if self.peers:
                self.failure = (
                    f"The update to version {version} failed on some of the {self.num_ps} parameter servers: {error} "
                    "The others may have applied it, so training can't continue. Start again from the last checkpoint."
                )
            raise

    def update(self, names: Sequence[PushName]) -> None:
        """Applies staged pushes as one update; on all servers, if this is the first of several."""
        pushes = [self.staged.pop(name).push for name in names]
        if not pushes:
            return
        if pushes[0].batches is not None:
            self.parameters.merge(pushes)
            for name in names:
                self.answered.remember(name, PushAnswer(pb.ACCEPTED, "merged"))
            return
        push, version = self.reader.mean(pushes), self.parameters.version + 1
        with self.all_or_none(version):
            named = [pb.PushName(worker_id=name.worker, sequence=name.sequence) for name in names]
            self.peers.call("Apply", pb.ApplyRequest(pushes=named, version=version))
            self.parameters.apply(push)

    def flush(self) -> None:
        """Applies the pending pushes as an update."""
        names = self.policy.flush().pushes
        if names:
            self.update(names)

    def release_held(self) -> None:
        """Drops what was held for a checkpoint."""
        for part in self.held.values():
            part.release()
        self.held = {}

    def drop_stale(self) -> None:
        """Drops staged pushes that are too old: the first server will not use them, and updates of several pushes leave
        them out."""
        for name, staged in list(self.staged.items()):
            reason = self.policy.too_old(staged.version, self.parameters.version)
            if reason:
                if name in self.policy.waiting:
                    logger.warning("Dropped a waiting gradient: %s", reason)
                del self.staged[name]
        self.policy.keep(self.staged)

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
        values = values_of(tensors, self.specs, self.slices, "Snapshot")
        weights, state = (flat(values, self.specs, self.slices, trainable) for trainable in (True, False))
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
