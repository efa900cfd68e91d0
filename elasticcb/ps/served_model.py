"""What a parameter server holds beside weights: pushes that wait, answers, snapshots, and its place among others."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
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
    """What is answered to a push, and again to its retry."""

    status: int
    reason: str = ""


class Staged(NamedTuple):
    """A push that waits to be named."""

    push: Push
    version: int  # of the weights that it was computed on


class Change(NamedTuple):
    """What a `LoadState` brings, checked."""

    id: int
    values: Mapping[int, Array]  # of all variables, or of none
    optimizers: OptimizerState
    tables: Mapping[int, TableState]


class Exported(NamedTuple):
    """What is held for an `Export`."""

    id: int
    part: Part
    dense: Snapshot


class MoveGate:
    """Which calls a server takes before it hands over what it holds.

    Attributes:
        allowed: by worker, the sequence number up to which pushes are taken.
    """

    def __init__(self) -> None:
        self.allowed: dict[int, int] = {}
        self._refused: dict[int, int] = {}

    def admits(self, worker: int, sequence: int, creates_rows: bool) -> bool:
        """Whether a call may go on: it changes nothing, or is a push that other servers have taken."""
        if not sequence:
            return not creates_rows
        if sequence <= self.allowed.get(worker, 0):
            return True
        self._refused[worker] = sequence
        return False

    def missing(self, taken: Mapping[int, int]) -> list[PushName]:
        """Pushes that are still to come, `taken` being by worker the last one that was taken.

        A worker makes one push after another: with a later one, it has had all answers to those before.
        """
        return [
            PushName(worker, last)
            for worker, last in self.allowed.items()
            if taken.get(worker, 0) < last and self._refused.get(worker, 0) <= last
        ]


@dataclass
class ServedModel:
    """What `Initialize` brings."""

    specs: Sequence[VariableSpec]
    slices: Sequence[Slice]
    index: int
    num_ps: int
    buckets: BucketMap
    parameters: Parameters
    reader: PushReader
    peers: Peers
    policy: UpdatePolicy
    staged: dict[PushName, Staged]  # synchronous mode: pushes that an update may name
    answered: Answered[PushAnswer]
    snapshots: dict[int, Snapshot]  # by evaluation round
    held: dict[str, Part]  # by a checkpoint's folder, what is to be written there
    exported: Exported | None = None
    change: Change | None = None  # synchronous mode: what waits for the first server's word
    loaded: tuple[int, int] = (0, 0)  # the last change's id, and the version that it made
    rate_version: int = 0  # rises when the master sets the base rate
    replica: Replica | None = None  # of this server, at its neighbour
    failure: str = ""  # of an update that only some of the servers have made
    gate: MoveGate | None = None  # while it hands over what it holds

    @contextlib.contextmanager
    def all_or_none(self, version: int) -> Iterator[None]:
        """Lets nothing come after a change that not all servers have made."""
        try:
            yield
        except Exception as error:
            if self.peers:
                self.failure = (
                    f"The update to version {version} failed on some of the {self.num_ps} parameter servers: {error} "
                    "The others may have made it, so training can't go on; start again from the last checkpoint."
                )
            raise

    def update(self, names: Sequence[PushName]) -> None:
        """Applies staged pushes as one update, on all servers when this is the first of several."""
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
        """Makes an update of the pushes that wait."""
        names = self.policy.flush().pushes
        if names:
            self.update(names)

    def release_held(self) -> None:
        """Forgets what was to be written for a checkpoint."""
        for part in self.held.values():
            part.release()
        self.held = {}

    def drop_stale(self) -> None:
        """Forgets staged pushes that are too old now: nobody will name them, and those that wait for an update of
        several are left out of it."""
        for name, staged in list(self.staged.items()):
            reason = self.policy.too_old(staged.version, self.parameters.version)
            if reason:
                if name in self.policy.waiting:
                    logger.warning("A gradient that waited for an update is dropped: %s", reason)
                del self.staged[name]
        self.policy.keep(self.staged)

    def snapshot_of(self, evaluation_round: int) -> Snapshot:
        """Raises `ElasticCBError` when none is kept."""
        snapshot = self.snapshots.get(evaluation_round)
        if snapshot is None:
            kept = ", ".join(map(str, self.snapshots)) or "none"
            raise ElasticCBError(
                f"There is no snapshot of evaluation round {evaluation_round} (kept are: {kept}). The round is "
                "over, or this server was restarted."
            )
        return snapshot

    def given_snapshot(self, tensors: Mapping[str, Array]) -> Snapshot:
        """Weights that the master brings, as if they were the present ones."""
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
