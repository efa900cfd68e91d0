"""A server's state besides weights: movements that wait, snapshots, and its place among the servers."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from elasticcb.checkpoint.shard_file import Part
from elasticcb.errors import ElasticCBError
from elasticcb.ps.parameters import Parameters, Snapshot, flat
from elasticcb.ps.push_reader import PushReader
from elasticcb.ps.update_policy import AtOnce, PushName
from elasticcb.rpc.tensors import Array, all_finite
from elasticcb.sharding.array_names import STATE, WEIGHTS, of_kind
from elasticcb.sharding.partition import ShardMap, Slice, VariableSpec, check_blocks, layout
from elasticcb.sharding.partition import block_sizes as sizes_of
from elasticcb.sharding.push import Push

logger = logging.getLogger(__name__)


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
        taken: as `ServedModel.taken` when it was written.
    """

    path: str = ""
    version: int = -1
    taken: Mapping[int, int] = {}

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
class ServedModel:
    """The result of `Initialize`.

    Attributes:
        merged: notified when movements were merged; of the lock.
        waiting: movements that are not merged yet.
        taken: by worker, the sequence number of its last push that is part of the model, as earlier ones are.
        snapshots: by evaluation pass.
        kept: the last file to which further ones are added.
        rate_version, slots_version: increase when the master sets the base rate, or the optimizers' state.
        gate: while it waits for a change of the number of servers.
    """

    index: int
    shard_map: ShardMap
    parameters: Parameters
    reader: PushReader
    policy: AtOnce
    merged: threading.Condition
    taken: dict[int, int] = field(default_factory=dict)
    waiting: dict[PushName, Push] = field(default_factory=dict)
    snapshots: dict[int, Snapshot] = field(default_factory=dict)
    exported: Exported | None = None
    kept: Kept = field(default_factory=Kept)
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
