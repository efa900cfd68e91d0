"""One server's part of the model: weights, non-trainable variables and the state of the optimizers, as arrays.

Not thread-safe: the servicer serializes writers. Arrays are replaced, never written again, so readers need no lock.
Only embedding tables, and constraints, need Keras and the user's program.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from elasticcb.checkpoint.shard_file import Part
from elasticcb.errors import ElasticCBError, ModelFileError
from elasticcb.optimizers.state import Optimizers, OptimizerState
from elasticcb.optimizers.state_messages import from_tensors
from elasticcb.ps.held_optimizers import HeldOptimizers
from elasticcb.ps.table_limits import TableLimits
from elasticcb.ps.table_snapshot import TableSnapshot
from elasticcb.ps.tables import Tables
from elasticcb.rpc.tensors import Array, dtype_of
from elasticcb.sharding.array_names import SHARED, of_kind
from elasticcb.sharding.flat_blocks import moved_state
from elasticcb.sharding.partition import Slice, VariableSpec, block_sizes, layout
from elasticcb.sharding.push import Push
from elasticcb.sharding.shard_map import ShardMap
from elasticcb.sharding.table_source import TableSource

if TYPE_CHECKING:
    from elasticcb.ps.row_optimizer import MakeOptimizers

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
        make_optimizers: for the rows of embedding tables; None: nothing is trained.
        place: the server's index, and the map of embedding rows to servers; None: there is one server.
        limits: limits of embedding tables.
        optimizers: those with which workers train.

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
        place: tuple[int, ShardMap] | None = None,
        limits: TableLimits | None = None,
        optimizers: Optimizers | None = None,
    ) -> None:
        self.specs, self.slices = specs, slices
        self.version = self.state_version = version
        self._make_optimizers = make_optimizers
        self._weights, self._state = (flat(values, specs, slices, trainable) for trainable in (True, False))
        self._constraints = {} if make_optimizers is None else _constraints_of(specs, slices, make_optimizers)
        self._optimizers = HeldOptimizers(specs, slices, optimizers or Optimizers())
        self.tables = Tables(specs, *(place or (0, ShardMap(1))), make_optimizers, limits or TableLimits())

    # -------------------------------------------------------------- reading

    def weights(self) -> Mapping[str, Array]:
        """The trainable part, flat, by dtype."""
        return self._weights

    def snapshot(self) -> Snapshot:
        """No copy: blocks are replaced, never modified."""
        return Snapshot(self.version, self.state_version, self.weights(), self._state)

    def kept_snapshot(self) -> Snapshot:
        """A snapshot that survives updates of embedding tables; release it."""
        return self.snapshot()._replace(tables=self.tables.snapshot())

    def _arrays(self, trainable: bool) -> dict[int, Array]:
        blocks = self._weights if trainable else self._state
        return {
            part.variable: blocks[dtype][offset : offset + part.elements].reshape(part.shape(self.specs[part.variable]))
            for part, dtype, offset in layout(self.specs, self.slices, trainable)
        }

    @property
    def learning_rate(self) -> float:
        """The base rate; 0 if it can't be set."""
        return self._optimizers.learning_rate

    # -------------------------------------------------------------- writing

    def set_learning_rate(self, learning_rate: float) -> None:
        """Sets the base rate. Raises `ElasticCBError` when a schedule sets it."""
        self._optimizers.set_learning_rate(learning_rate)

    def merge(self, pushes: Sequence[Push], workers: int = 1) -> None:
        """Merges the local training of some workers into the model; increases the version by their batches.

        Movements that started at the current version are weighted by their batches, so that the weights become the mean
        over the workers, as in local SGD (Stich 2019). Older ones are weighted less the more batches have been merged
        since, as in asynchronous federated optimization (Xie et al. 2019).

        Args:
            workers: each movement counts at most as one of this number.
        """
        if self._make_optimizers is None:
            raise ElasticCBError("This parameter server accepts no updates, because the job does not train.")
        for push in pushes:
            self.tables.update(push.rows, self.version + 1, of_kind(SHARED, push.optimizers))
        moving = [(push, push.batches, self._batches_since(push)) for push in pushes if push.batches]
        if not moving:
            return
        total, done = sum(batches for _, batches, _ in moving), 0
        self._move([(push.moved, batches / max(total + since, workers * batches)) for push, batches, since in moving])
        for push, batches, since in moving:  # sequentially, which also yields means
            others = done + since
            self._optimizers.merge(from_tensors(push.optimizers), batches, others)
            self._move_state(push, others / batches)
            done += batches
        self.version += total

    def _move(self, movements: Sequence[tuple[Mapping[str, Array], float]]) -> None:
        """Adds flat movements, by dtype, with the weight of each. A mean of weights may leave their constraints."""
        self._weights = {dtype: _frozen(_moved(block, dtype, movements)) for dtype, block in self._weights.items()}
        if self._constraints and any(share < 1 for _, share in movements):
            import keras

            arrays = self._arrays(True)
            for index, constraint in self._constraints.items():
                value = constraint(keras.ops.convert_to_tensor(arrays[index]))
                arrays[index] = keras.ops.convert_to_numpy(value).astype(arrays[index].dtype)
            self._weights = flat(arrays, self.specs, self.slices, True)

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
        """Optimizer state except that of embedding tables, or only shared state."""
        return self._optimizers.state() if with_slots else self._optimizers.shared_state()

    def check_state(self, state: OptimizerState) -> None:
        """Raises `ElasticCBError` if `state` does not fit the optimizers."""
        self._optimizers.check(state)

    def load(
        self,
        values: Mapping[int, Array],
        state: OptimizerState,
        version: int,
        tables: Mapping[int, TableSource] | None = None,
    ) -> None:
        """Sets weights (all or none), a checked `state`, and the rows of tables."""
        self.tables.load(tables or {}, version)
        self._optimizers.load(state)
        if values:
            self._weights, self._state = (
                flat(values, self.specs, self.slices, trainable) for trainable in (True, False)
            )
            self.state_version += 1
        self.version = version

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
        state = self._optimizers.state()
        return Part(
            version=self.version,
            weights={**self._arrays(True), **self._arrays(False)},
            slots=state.slots,
            extras=state.extras,
            shared=state.shared,
            optimizer=", ".join(state.optimizers),
            ages=self.tables.ages(),
        )

    def restore_optimizers(self, part: Part) -> None:
        """Restores the optimizers from a checkpoint; the weights were set in the constructor.

        Raises `CheckpointError` when the state belongs to other optimizers.
        """
        if self._make_optimizers is not None:
            self._optimizers.restore(part.optimizers)


def _constraints_of(
    specs: Sequence[VariableSpec], slices: Sequence[Slice], make_optimizers: MakeOptimizers
) -> dict[int, Any]:
    """The constraints of trainable variables, by index."""
    constrained = [
        part.variable for part in slices if specs[part.variable].trainable and specs[part.variable].constraint
    ]
    if not constrained:
        return {}
    import keras

    make_optimizers(1)  # opens the user's program, which registers its classes
    made = {}
    for index in constrained:
        try:
            # The user's code runs here anyway, so lambdas need no extra permission.
            made[index] = keras.saving.deserialize_keras_object(json.loads(specs[index].constraint), safe_mode=False)
        except Exception as error:
            raise ModelFileError(
                f"The constraint of {specs[index].path!r} can't be created on a parameter server: {error} Register its "
                "class or function with keras.saving.register_keras_serializable."
            ) from error
    return made


def _moved(block: Array, dtype: str, movements: Sequence[tuple[Mapping[str, Array], float]]) -> Array:
    """The block with the weighted movements added; in float32 for half precision."""
    wide = np.dtype(np.float32) if block.dtype.itemsize == 2 else block.dtype
    total = block.astype(wide) if block.dtype != wide else block
    for moved, share in movements:
        step = moved[dtype].astype(wide, copy=False)
        total = total + (step if share == 1 else step * wide.type(share))
    return total.astype(block.dtype, copy=False)


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
