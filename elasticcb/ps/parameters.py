"""One server's part of the model: weights, optimizer slots and non-trainable variables.

Not thread-safe: the servicer lets one writer in at a time. What `weights`, `state` and `export` give
away is never written again, so readers need no lock.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, NamedTuple

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from elasticcb.blocks import moved_state
from elasticcb.buckets import BucketMap, even
from elasticcb.eager_tensors import array_of, tensor_of
from elasticcb.errors import ElasticCBError, ModelFileError, describe, user_traceback
from elasticcb.optimizer_state import OptimizerState
from elasticcb.optimizer_traits import may_update_rows
from elasticcb.part_file import Part
from elasticcb.ps.embedding_table import TableSnapshot
from elasticcb.ps.optimizer_set import MakeOptimizers, OptimizerSet
from elasticcb.ps.partition import Slice, VariableSpec, block_sizes, layout
from elasticcb.ps.push import Push, Rows
from elasticcb.ps.row_update import RowUpdate
from elasticcb.ps.table_limits import TableLimits
from elasticcb.ps.tables import Tables
from elasticcb.quick_call import quick_call
from elasticcb.table_state import TableState
from elasticcb.tensors import dtype_of

Array = npt.NDArray[Any]
logger = logging.getLogger(__name__)

# TensorFlow keeps what XLA has compiled for as long as the process lives, 0.9 MB for a small model: XLA is for models
# that are trained further than this. It is a version, not a number of calls: a server that takes the place of another
# one, or goes on from a checkpoint, updates to the bit as that one would have.
FIRST_VERSION_BY_XLA = 10


class Snapshot(NamedTuple):
    """The flat blocks, by dtype, as they were at one version. Read-only."""

    version: int
    state_version: int
    weights: Mapping[str, Array]
    state: Mapping[str, Array]
    tables: Mapping[int, TableSnapshot] | None = None  # None: as they are at present


class Parameters:
    """The part of the model that `slices` name.

    Args:
        specs: all variables of the model.
        slices: this server's part.
        make_optimizers: makes fresh optimizers; None where nothing is trained.
        values: the part's arrays, each of its slice's shape, by variable.
        version: of the model.
        place: the server's index, and which rows of embedding tables each server holds; None: there is one server.
        limits: of embedding tables.

    Attributes:
        tables: the embedding tables.
        version: how many updates the weights have taken.
        state_version: rises when a non-trainable variable changes.
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
        self._functions: dict[Any, Callable[..., Any]] = {}  # by kind of push
        self._row_updates: dict[int, RowUpdate] = {}
        with tf.device("/CPU:0"):
            self._variables = {
                part.variable: _variable(specs[part.variable], values[part.variable])
                for part in slices
                if specs[part.variable].trainable
            }
            self.optimizers = OptimizerSet(make_optimizers, specs, self._variables) if make_optimizers else None
            self.tables = Tables(specs, *(place or (0, even(1))), self.optimizers, limits or TableLimits())
        self._read = tf.function(self._flat_weights, autograph=False)

    # -------------------------------------------------------------- reading

    def weights(self) -> Mapping[str, Array]:
        """The trainable part, flat, by dtype; made once per version."""
        if self._blocks is None:
            self._keep_blocks(self._read() if self._variables else {})
        assert self._blocks is not None
        return self._blocks

    def _keep_blocks(self, tensors: Mapping[str, tf.Tensor]) -> None:
        self._blocks = {dtype: array_of(tensor) for dtype, tensor in tensors.items()}

    def _flat_weights(self) -> dict[str, tf.Tensor]:
        """In a graph: the present weights, flat, by dtype."""
        pieces: dict[str, list[tf.Tensor]] = {}
        for part, dtype, _ in layout(self.specs, self.slices, True):
            pieces.setdefault(dtype, []).append(tf.reshape(self._variables[part.variable].value, [-1]))
        return {dtype: tf.concat(flats, 0) for dtype, flats in pieces.items()}

    def state(self) -> Mapping[str, Array]:
        """The non-trainable part, flat, by dtype."""
        return self._state

    def snapshot(self) -> Snapshot:
        """Copies nothing: blocks are replaced, never written."""
        return Snapshot(self.version, self.state_version, self.weights(), self._state)

    def kept_snapshot(self) -> Snapshot:
        """One that outlives updates of embedding tables; release it."""
        return self.snapshot()._replace(tables=self.tables.snapshot())

    def _arrays(self) -> dict[int, Array]:
        blocks = self.weights()
        return {
            part.variable: blocks[dtype][offset : offset + part.elements].reshape(part.shape(self.specs[part.variable]))
            for part, dtype, offset in layout(self.specs, self.slices, True)
        }

    @property
    def learning_rate(self) -> float:
        """The base rate, or what the schedule says for the next update; 0 without an optimizer."""
        if self.optimizers is None:
            return 0.0
        if self._rate is None:
            self._rate = self.optimizers.learning_rate
        return self._rate

    # -------------------------------------------------------------- writing

    def set_learning_rate(self, learning_rate: float) -> None:
        """Sets the base rate. Raises `ElasticCBError` when a schedule decides on it."""
        self._need_optimizers().set_learning_rate(learning_rate)
        self._rate = None

    def check_learning_rate(self, push: Push) -> None:
        """Raises `ElasticCBError` when `push` asks for a rate that can't be set."""
        if push.learning_rate is not None and not self._need_optimizers().can_set_learning_rate:
            self._need_optimizers().set_learning_rate(push.learning_rate)

    def apply(self, push: Push) -> None:
        """Applies a checked push as one update; the version rises by one."""
        optimizers = self._need_optimizers()
        base = None
        self._blocks = None
        if push.learning_rate is not None and push.learning_rate != self.learning_rate:
            base = self.learning_rate
            optimizers.set_learning_rate(push.learning_rate)
        try:
            with tf.device("/CPU:0"):
                of_tables = {i: rows for i, rows in push.rows.items() if self.specs[i].table}
                # Before the iterations rise.
                self.tables.update(of_tables, self.version + 1)
                self._apply_gradients(
                    replace(push, rows={i: rows for i, rows in push.rows.items() if i not in of_tables})
                    if of_tables
                    else push
                )
        finally:
            if base is not None:
                optimizers.set_learning_rate(base)
        if any(shares.any() for shares in push.shares.values()):
            lag = max(0, self.version - push.state_base) if push.state_base >= 0 else 0
            new = {
                dtype: _frozen(moved_state(self._state[dtype], values, push.shares[dtype], lag))
                for dtype, values in push.state.items()
            }
            self._state = {**self._state, **new}
            self.state_version += 1
        self.version += 1
        if optimizers.has_schedule:
            self._rate = None

    def finalize(self) -> None:
        """Lets the optimizers set the final weights (their moving average); a version of its own."""
        if self.optimizers is not None and self.optimizers.finalize():
            self.version += 1
            self._blocks = None

    def check_state(self, state: OptimizerState) -> None:
        """Raises `ElasticCBError` unless the optimizers can hold `state`; without optimizers it is passed over."""
        if self.optimizers is not None:
            self.optimizers.check(state)

    def load(
        self,
        values: Mapping[int, Array],
        state: OptimizerState,
        version: int,
        tables: Mapping[int, TableState] | None = None,
    ) -> None:
        """Sets weights (all of them, or none), what a checked `state` holds, and the rows of tables."""
        self.tables.load(tables or {}, version)
        with tf.device("/CPU:0"):
            for index, variable in self._variables.items():
                if index in values:
                    variable.assign(values[index])
            if self.optimizers is not None:
                self.optimizers.load(state)
        if values:
            self._state = flat(values, self.specs, self.slices, trainable=False)
            self.state_version += 1
        self.version = version
        self._blocks = self._rate = None

    def _need_optimizers(self) -> OptimizerSet:
        if self.optimizers is None:
            raise ElasticCBError(
                "This parameter server was started without an optimizer, to evaluate or predict; it takes no gradients."
            )
        return self.optimizers

    def _apply_gradients(self, push: Push) -> None:
        updating = self._need_optimizers().updating(push.updated)
        by_xla = self.version >= FIRST_VERSION_BY_XLA
        key = (push.dense, tuple(push.rows), tuple(part.name for part in updating), by_xla)
        blocks = [tensor_of(block) for block in push.blocks.values()]
        rows = [(tf.convert_to_tensor(ids), tf.convert_to_tensor(values)) for ids, values in push.rows.values()]
        try:
            if key not in self._functions:
                self._functions[key], weights = self._first_call(push, blocks, rows, by_xla)
            else:
                weights = self._functions[key](blocks, rows)
            if weights:
                self._keep_blocks(weights)
        except Exception as error:
            raise ModelFileError(
                f"The optimizer {self._need_optimizers().kinds} failed on a parameter server: {describe(error)}",
                user_traceback(error),
            ) from error

    def _first_call(
        self, push: Push, blocks: list[tf.Tensor], rows: list[Any], by_xla: bool
    ) -> tuple[Callable[..., Any], Any]:
        """Applies the push with a function made for its kind; gives the function back, and what it returned."""
        # The first call compiles. XLA makes updates some three times as fast, but can't compile every
        # op that a user's optimizer may hold; it fails before anything is changed.
        if by_xla:
            function = self._make_function(push, jit_compile=True)
            try:
                return function, function(blocks, rows)
            except tf.errors.OpError as error:
                kinds = self._need_optimizers().kinds
                logger.warning("The optimizer %s runs without XLA, slower: %s", kinds, error.message)
        function = self._make_function(push, jit_compile=False)
        return function, function(blocks, rows)

    def _make_function(self, push: Push, jit_compile: bool) -> Callable[..., Any]:
        """The update as one compiled function of (flat gradients by dtype, [(ids, values)]), which returns the weights
        after it, flat, by dtype, when it has them at hand."""
        places = list(layout(self.specs, self.slices, True, push.dense))
        order = {dtype: place for place, dtype in enumerate(push.blocks)}
        by_rows = [index for index in push.rows if self._updates_rows(index)]
        made_dense = [index for index in push.rows if index not in by_rows]
        updates = {index: self._row_update(index) for index in by_rows}
        targets = [place.slice.variable for place in places] + made_dense
        updating = self._need_optimizers().updating(push.updated)
        # Those that no dense gradient advances: by a clone that updates rows, or by a step of no effect.
        others = [part for part in updating if part.updates.isdisjoint(targets)]
        by_clone = [next(iter(sorted(part.updates & updates.keys())), None) for part in others]
        idle = [part for part, index in zip(others, by_clone, strict=True) if index is None]

        def dense_update(blocks: list[tf.Tensor], whole: list[tf.Tensor]) -> dict[str, tf.Tensor]:
            if not jit_compile:
                # A variable that a gradient is assigned to would keep the memory of the push, which lasts as long
                # as the call. What XLA compiles has memory of its own.
                blocks = [tf.raw_ops.DeepCopy(x=block) for block in blocks]
            gradients = [
                tf.reshape(
                    blocks[order[dtype]][offset : offset + part.elements],
                    part.shape(self.specs[part.variable]),
                )
                for part, dtype, offset in places
            ]
            gradients += whole
            for part in updating:
                own = [place for place, index in enumerate(targets) if index in part.updates]
                if own:
                    part.optimizer.apply(
                        [gradients[place] for place in own], [self._variables[targets[place]] for place in own]
                    )
            for part in idle:
                part.advance()
            return self._flat_weights()

        blocks_signature = [tf.TensorSpec(block.shape, block.dtype) for block in push.blocks.values()]
        if not push.rows:
            dense = quick_call(lambda *blocks: dense_update(list(blocks), []), blocks_signature, jit_compile)
            return lambda blocks, rows: dense(blocks)
        compiled = tf.function(dense_update, jit_compile=jit_compile, autograph=False)

        def update(blocks: list[tf.Tensor], rows: list[tuple[tf.Tensor, tf.Tensor]]) -> None:
            given = dict(zip(push.rows, rows, strict=True))
            # All clones start from the iterations and the rate before this update.
            for row_update in updates.values():
                row_update.clone.copy_shared()
            done: list[tf.Tensor] = []
            if targets or idle:
                whole = [
                    tf.scatter_nd(given[index][0][:, None], given[index][1], self._variables[index].shape)
                    for index in made_dense
                ]
                done = list(compiled(blocks, whole).values())
            # Rows only after it: when XLA can't compile it, nothing has changed.
            with tf.control_dependencies(done):
                for index, row_update in updates.items():
                    row_update.run(*given[index])
                for clone in by_clone:
                    if clone is not None:
                        updates[clone].clone.copy_shared_back()

        rows_signature = [_rows_signature(rows) for rows in push.rows.values()]
        function: Callable[..., Any] = tf.function(
            update, input_signature=[blocks_signature, rows_signature], autograph=False
        )
        return function

    def _updates_rows(self, index: int) -> bool:
        # A constraint is a function of the whole variable.
        return may_update_rows(self._need_optimizers().of(index).optimizer) and not self.specs[index].constraint

    def _row_update(self, index: int) -> RowUpdate:
        if index not in self._row_updates:
            optimizer = self._need_optimizers().of(index)
            self._row_updates[index] = RowUpdate(optimizer, index, self._variables[index])
        return self._row_updates[index]

    # -------------------------------------------------------------- checkpoints

    def export(self, since: int | None = None) -> Part:
        """Everything that a checkpoint holds of this server, as arrays that are never written again.

        Args:
            since: of embedding tables, only the rows that were trained after this version.
        """
        return replace(self._dense(), tables=self.tables.export(since))

    def hold(self, lock: AbstractContextManager[Any], since: int | None = None) -> Part:
        """The same, of which tables are read in pieces while training goes on. Release it after use.

        Args:
            lock: that is held at each call of this object; it must not be when the tables are read.
            since: as of `export`.
        """
        return replace(self._dense(), held=self.tables.hold(lock, since))

    def _dense(self) -> Part:
        weights = self._arrays()
        for place in layout(self.specs, self.slices, False):
            block = self._state[place.dtype][place.offset : place.offset + place.slice.elements]
            weights[place.slice.variable] = block.reshape(place.slice.shape(self.specs[place.slice.variable]))
        part = Part(version=self.version, weights=weights)
        if self.optimizers is not None:
            state = self.optimizers.state()
            part.optimizer = ", ".join(state.optimizers)
            part.slots, part.extras, part.shared = state.slots, state.extras, state.shared
        return part

    def restore_optimizers(self, part: Part) -> None:
        """Sets what a checkpoint holds of them; the weights are set when this is made.

        Raises `CheckpointError` when they are other optimizers.
        """
        if self.optimizers is not None:
            self.optimizers.restore(part)
            self._rate = None


def _variable(spec: VariableSpec, value: Array) -> keras.Variable:
    *scopes, name = spec.path.split("/")
    constraint = None
    if spec.constraint:
        try:
            # The user's own code runs here anyway; a lambda needs no leave.
            constraint = keras.saving.deserialize_keras_object(json.loads(spec.constraint), safe_mode=False)
        except Exception as error:
            raise ModelFileError(
                f"The constraint of {spec.path!r} can't be made on a parameter server: {error} Register its "
                "class or function with keras.saving.register_keras_serializable."
            ) from error
    variable = keras.Variable(value, dtype=spec.dtype, trainable=True, name=name)
    variable.constraint = constraint
    # Optimizers look at names and paths (exclude_from_weight_decay, Muon); they are the model's.
    variable._path = "/".join([*scopes, name])
    return variable


def _rows_signature(rows: Rows) -> tuple[tf.TensorSpec, tf.TensorSpec]:
    return (
        tf.TensorSpec([None], tf.int64),
        tf.TensorSpec([None, *rows.values.shape[1:]], tf.as_dtype(rows.values.dtype)),
    )


def flat(
    arrays: Mapping[int, Array], specs: Sequence[VariableSpec], slices: Sequence[Slice], trainable: bool
) -> dict[str, Array]:
    """Slices' arrays as flat blocks, by dtype, which are never written again."""
    sizes = block_sizes(specs, slices, trainable)
    blocks = {dtype: np.empty(size, dtype_of(dtype)) for dtype, size in sizes.items()}
    for part, dtype, offset in layout(specs, slices, trainable):
        blocks[dtype][offset : offset + part.elements] = arrays[part.variable].reshape(-1)
    return {dtype: _frozen(block) for dtype, block in blocks.items()}


def _frozen(array: Array) -> Array:
    array.flags.writeable = False
    return array
