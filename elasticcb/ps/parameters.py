"""One server's part of the model: weights, optimizer slots and non-trainable variables.

Not thread-safe: the servicer serializes writers. Results of `weights`, `snapshot` and `dense` are never written again,
so readers need no lock.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from elasticcb.checkpoint.shard_file import Part
from elasticcb.optimizers.state import OptimizerState
from elasticcb.optimizers.state_messages import from_tensors
from elasticcb.ps.joined import assign
from elasticcb.ps.optimizer_set import MakeOptimizers, OptimizerSet
from elasticcb.ps.table_limits import TableLimits
from elasticcb.ps.table_snapshot import TableSnapshot
from elasticcb.ps.tables import Tables
from elasticcb.ps.trained_part import TrainedPart
from elasticcb.rpc.tensors import Array, dtype_of
from elasticcb.sharding.array_names import SHARED, of_kind
from elasticcb.sharding.bucket_map import BucketMap, even
from elasticcb.sharding.flat_blocks import moved_state
from elasticcb.sharding.partition import Slice, VariableSpec, block_sizes, layout
from elasticcb.sharding.push import Push
from elasticcb.sharding.table_source import TableSource

logger = logging.getLogger(__name__)


class Snapshot(NamedTuple):
    """The flat blocks, by dtype, at one version. Read-only."""

    version: int
    state_version: int
    weights: Mapping[str, Array]
    state: Mapping[str, Array]
    tables: Mapping[int, TableSnapshot] | None = None  # None: the current ones


class Parameters:
    """The part of the model given by `slices`.

    Args:
        place: the server's index, and the map of embedding rows to servers; None: there is one server.
        limits: limits of embedding tables.

    Attributes:
        state_version: increases when a non-trainable variable changes.
    """

    def __init__(
        self,
        specs: Sequence[VariableSpec],
        slices: Sequence[Slice],
        make_optimizers: MakeOptimizers | None,
        values: Mapping[int, Array],
        version: int = 0,
        place: tuple[int, BucketMap] | None = None,
        limits: TableLimits | None = None,
    ) -> None:
        self.specs, self.slices = specs, slices
        self.version = self.state_version = version
        self._blocks: dict[str, Array] | None = None
        self._state = flat(values, specs, slices, trainable=False)
        self._rate: float | None = None
        self._make_optimizers = make_optimizers
        self._trained = TrainedPart(specs, slices, make_optimizers, values)
        with tf.device("/CPU:0"):
            self.tables = Tables(specs, *(place or (0, even(1))), self.optimizers, limits or TableLimits())

    @property
    def optimizers(self) -> OptimizerSet | None:
        """None if nothing is trained."""
        return self._trained.optimizers

    # -------------------------------------------------------------- reading

    def weights(self) -> Mapping[str, Array]:
        """The trainable part, flat, by dtype; created once per version."""
        if self._blocks is None:
            self._blocks = self._trained.weights()
        return self._blocks

    def snapshot(self) -> Snapshot:
        """No copy: blocks are replaced, never modified."""
        return Snapshot(self.version, self.state_version, self.weights(), self._state)

    def kept_snapshot(self) -> Snapshot:
        """A snapshot that survives updates of embedding tables; release it."""
        return self.snapshot()._replace(tables=self.tables.snapshot())

    def _arrays(self) -> dict[int, Array]:
        blocks = self.weights()
        return {
            part.variable: blocks[dtype][offset : offset + part.elements].reshape(part.shape(self.specs[part.variable]))
            for part, dtype, offset in layout(self.specs, self.slices, True)
        }

    @property
    def learning_rate(self) -> float:
        """The base rate, or the schedule's rate for the next update; 0 without an optimizer."""
        if self.optimizers is None:
            return 0.0
        if self._rate is None:
            self._rate = self.optimizers.learning_rate
        return self._rate

    # -------------------------------------------------------------- writing

    def set_learning_rate(self, learning_rate: float) -> None:
        """Sets the base rate. Raises `ElasticCBError` when a schedule sets it."""
        self._trained.need_optimizers().set_learning_rate(learning_rate)
        self._rate = None

    def merge(self, pushes: Sequence[Push], workers: int = 1) -> None:
        """Merges the local training of some workers into the model; increases the version by their batches.

        Movements that started at the current version are weighted by their batches, so that the weights become the mean
        over the workers, as in local SGD (Stich 2019). Older ones are weighted less the more batches have been merged
        since, as in asynchronous federated optimization (Xie et al. 2019).

        Args:
            workers: each movement counts at most as one of this number.
        """
        optimizers = self._trained.need_optimizers()
        for push in pushes:
            with tf.device("/CPU:0"):
                self.tables.update(push.rows, self.version + 1, of_kind(SHARED, push.optimizers))
        moving = [(push, push.batches, self._batches_since(push)) for push in pushes if push.batches]
        if not moving:
            return
        total, done = sum(batches for _, batches, _ in moving), 0
        self._blocks = None  # TensorFlow copies variables before a change while previously read values are in use
        self._trained.move(
            [(push.moved, batches / max(total + since, workers * batches)) for push, batches, since in moving]
        )
        for push, batches, since in moving:  # sequentially, which also yields means
            others = done + since
            with tf.device("/CPU:0"):
                optimizers.merge(from_tensors(push.optimizers), batches, others)
            self._move_state(push, others / batches)
            done += batches
        self.version += total
        if optimizers.has_schedule:
            self._rate = None

    def _batches_since(self, push: Push) -> int:
        """Versions since the one that a push is based on, as far as known."""
        return max(0, self.version - push.base) if push.base >= 0 else 0

    def _move_state(self, push: Push, lag: float) -> None:
        if any(shares.any() for shares in push.shares.values()):
            new = {
                dtype: _frozen(moved_state(self._state[dtype], values, push.shares[dtype], lag))
                for dtype, values in push.state.items()
            }
            self._state = {**self._state, **new}
            self.state_version += 1

    def optimizer_state(self, with_slots: bool) -> OptimizerState:
        """Optimizer state except that of embedding tables, or only shared state. The arrays do not change."""
        if self.optimizers is None:
            return OptimizerState()
        return self.optimizers.state() if with_slots else self.optimizers.shared_state()

    def finalize(self) -> None:
        """Lets the optimizers set the final weights (moving averages); this is one more version."""
        if self.optimizers is not None and self.optimizers.finalize():
            self.version += 1
            self._blocks = None

    def check_state(self, state: OptimizerState) -> None:
        """Raises `ElasticCBError` if the optimizers can't hold `state`; without optimizers it is ignored."""
        if self.optimizers is not None:
            self.optimizers.check(state)

    def load(
        self,
        values: Mapping[int, Array],
        state: OptimizerState,
        version: int,
        tables: Mapping[int, TableSource] | None = None,
    ) -> None:
        """Sets weights (all or none), a checked `state`, and the rows of tables."""
        self.tables.load(tables or {}, version)
        with tf.device("/CPU:0"):
            assign([(variable, values[i]) for i, variable in self._trained.variables.items() if i in values])
            if self.optimizers is not None:
                self.optimizers.load(state)
        if values:
            self._state = flat(values, self.specs, self.slices, trainable=False)
            self.state_version += 1
        self.version = version
        self._blocks = self._rate = None

    # -------------------------------------------------------------- checkpoints

    def hold(self, lock: AbstractContextManager[Any], since: int | None = None) -> Part:
        """This server's part of a checkpoint, whose tables are read in pieces while training continues. Release it
        after use.

        Args:
            lock: must be held at each call of this object, but not while the tables are read.
            since: of embedding tables, only rows trained after this version.
        """
        return replace(self.dense(), held=self.tables.hold(lock, since))

    def dense(self) -> Part:
        """This server's part of a checkpoint without tables, as arrays that are never written again."""
        weights = self._arrays()
        for place in layout(self.specs, self.slices, False):
            block = self._state[place.dtype][place.offset : place.offset + place.slice.elements]
            weights[place.slice.variable] = block.reshape(place.slice.shape(self.specs[place.slice.variable]))
        part = Part(version=self.version, weights=weights, ages=self.tables.ages())
        if self.optimizers is not None:
            state = self.optimizers.state()
            part.optimizer = ", ".join(state.optimizers)
            part.slots, part.extras, part.shared = state.slots, state.extras, state.shared
        return part

    def restore_optimizers(self, part: Part) -> None:
        """Restores the optimizers from a checkpoint; the weights were set in the constructor.

        Raises `CheckpointError` when the state belongs to other optimizers.
        """
        if self.optimizers is not None:
            self.optimizers.restore(part.optimizers)
            self._rate = None


def flat(
    arrays: Mapping[int, Array], specs: Sequence[VariableSpec], slices: Sequence[Slice], trainable: bool
) -> dict[str, Array]:
    """The slices' arrays as flat blocks, by dtype; never written again."""
    sizes = block_sizes(specs, slices, trainable)
    blocks = {dtype: np.empty(size, dtype_of(dtype)) for dtype, size in sizes.items()}
    for part, dtype, offset in layout(specs, slices, trainable):
        blocks[dtype][offset : offset + part.elements] = arrays[part.variable].reshape(-1)
    return {dtype: _frozen(block) for dtype, block in blocks.items()}


def _frozen(array: Array) -> Array:
    array.flags.writeable = False
    return array
