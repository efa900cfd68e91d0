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

from elasticcb.checkpoint.shard_file import Part
from elasticcb.errors import ElasticCBError, ModelFileError, describe, user_traceback
from elasticcb.optimizers.state import OptimizerState
from elasticcb.optimizers.traits import may_update_rows
from elasticcb.ps.embedding_table import TableSnapshot
from elasticcb.ps.joined import Piece, Run, add_run, assign, concatenated, parted
from elasticcb.ps.optimizer_set import MakeOptimizers, OptimizerSet
from elasticcb.ps.row_update import RowUpdate
from elasticcb.ps.table_limits import TableLimits
from elasticcb.ps.tables import Tables
from elasticcb.rpc.tensors import dtype_of
from elasticcb.sharding.bucket_map import BucketMap, even
from elasticcb.sharding.flat_blocks import moved_state
from elasticcb.sharding.partition import Slice, VariableSpec, block_sizes, layout
from elasticcb.sharding.push import Push, Rows
from elasticcb.sharding.table_state import TableState
from elasticcb.tf.concrete_call import quick_call
from elasticcb.tf.convert import array_of, tensor_of

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
        self._make_optimizers = make_optimizers
        self._build(values)
        with tf.device("/CPU:0"):
            self.tables = Tables(specs, *(place or (0, even(1))), self.optimizers, limits or TableLimits())

    def _build(self, values: Mapping[int, Array], groups: Sequence[Sequence[int]] | None = None) -> None:
        """Makes the variables and the optimizers, which begin afresh.

        Args:
            groups: of variables to update as one; None: whatever can be.
        """
        self._functions: dict[Any, Callable[..., Any]] = {}  # by kind of push
        self._row_updates: dict[int, RowUpdate] = {}
        self.optimizers: OptimizerSet | None = None
        with tf.device("/CPU:0"):
            self._variables: dict[int, keras.Variable | Piece] = {
                part.variable: _variable(self.specs[part.variable], values[part.variable])
                for part in self.slices
                if self.specs[part.variable].trainable
            }
            if self._make_optimizers is not None:
                self.optimizers = OptimizerSet(self._make_optimizers, self.specs, self._variables, groups)
                self._variables |= self.optimizers.variables
        self._read: Callable[[Sequence[tf.Tensor]], Mapping[str, tf.Tensor]] | None = None

    def _part_groups(self, push: Push) -> None:
        """Takes variables out of their groups that `push` does not update with the others of the group."""
        before = self._need_optimizers()
        groups = parted(before.groups, push.dense, [index for index in push.rows if index in self._variables])
        if groups != before.groups:
            values, state = self._arrays(), before.state()
            self._build(values, groups)
            optimizers = self._need_optimizers()
            with tf.device("/CPU:0"):
                optimizers.load(state)
                self.tables.train_by(optimizers)
            self._blocks = None

    # -------------------------------------------------------------- reading

    def weights(self) -> Mapping[str, Array]:
        """The trainable part, flat, by dtype; made once per version."""
        if self._blocks is None:
            if self._read is None:
                with tf.device("/CPU:0"):
                    self._read = quick_call(self._flat_weights, [])
            self._blocks = {dtype: array_of(tensor) for dtype, tensor in self._read([]).items()}
        return self._blocks

    def _flat_weights(self) -> dict[str, tf.Tensor]:
        """In a graph: the present weights, flat, by dtype."""
        runs: dict[str, list[Run]] = {}
        for part, dtype, _ in layout(self.specs, self.slices, True):
            variable = self._variables[part.variable]
            if isinstance(variable, Piece):
                run = Run(variable.whole.value, variable.offset, variable.end)
            else:
                run = Run(variable.value, 0, part.elements)
            add_run(runs.setdefault(dtype, []), run)
        return {dtype: concatenated(found) for dtype, found in runs.items()}

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
        if self._kind(push) not in self._functions:
            self._part_groups(push)
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
            assign([(variable, values[i]) for i, variable in self._variables.items() if i in values])
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

    @property
    def _by_xla(self) -> bool:
        return self.version >= FIRST_VERSION_BY_XLA

    def _kind(self, push: Push) -> Any:
        """Equal for pushes that are applied by the same function."""
        rows = tuple(index for index in push.rows if index in self._variables)
        updating = self._need_optimizers().updating(push.updated)
        return push.dense, rows, tuple(part.name for part in updating), self._by_xla

    def _apply_gradients(self, push: Push) -> None:
        key = self._kind(push)
        blocks = [tensor_of(block) for block in push.blocks.values()]
        rows = [(tf.convert_to_tensor(ids), tf.convert_to_tensor(values)) for ids, values in push.rows.values()]
        try:
            if key not in self._functions:
                self._functions[key] = self._first_call(push, blocks, rows, self._by_xla)
            else:
                self._functions[key](blocks, rows)
        except Exception as error:
            raise ModelFileError(
                f"The optimizer {self._need_optimizers().kinds} failed on a parameter server: {describe(error)}",
                user_traceback(error),
            ) from error

    def _first_call(self, push: Push, blocks: list[tf.Tensor], rows: list[Any], by_xla: bool) -> Callable[..., Any]:
        """Applies the push with a function made for its kind, which it returns."""
        # The first call compiles. XLA makes updates some three times as fast, but can't compile every
        # op that a user's optimizer may hold; it fails before anything is changed.
        if by_xla:
            function = self._make_function(push, jit_compile=True)
            try:
                function(blocks, rows)
                return function
            except tf.errors.OpError as error:
                kinds = self._need_optimizers().kinds
                logger.warning("The optimizer %s runs without XLA, slower: %s", kinds, error.message)
        function = self._make_function(push, jit_compile=False)
        function(blocks, rows)
        return function

    def _make_function(self, push: Push, jit_compile: bool) -> Callable[..., Any]:
        """The update as one compiled function of (flat gradients by dtype, [(ids, values)])."""
        places = {place.slice.variable: place for place in layout(self.specs, self.slices, True, push.dense)}
        order = {dtype: place for place, dtype in enumerate(push.blocks)}
        by_rows = [index for index in push.rows if self._updates_rows(index)]
        made_dense = [index for index in push.rows if index not in by_rows]
        updates = {index: self._row_update(index) for index in by_rows}
        targets = [*places, *made_dense]
        updating = self._need_optimizers().updating(push.updated)
        # Those that no dense gradient advances: by a clone that updates rows, or by a step of no effect.
        others = [part for part in updating if part.updates.isdisjoint(targets)]
        by_clone = [next(iter(sorted(part.updates & updates.keys())), None) for part in others]
        idle = [part for part, index in zip(others, by_clone, strict=True) if index is None]
        # Of each optimizer: what it updates, as (indices, one variable of them).
        known = [(part, part.grouped([index for index in targets if index in part.updates])) for part in updating]

        def runs_of(group: tuple[int, ...], blocks: Sequence[tf.Tensor]) -> list[Run]:
            runs: list[Run] = []
            for index in group:
                part, dtype, offset = places[index]
                add_run(runs, Run(blocks[order[dtype]], offset, offset + part.elements))
            return runs

        def gradients_of(blocks: Sequence[tf.Tensor], rows: Mapping[int, Any]) -> list[tf.Tensor]:
            return [
                tf.scatter_nd(rows[group[0]][0][:, None], rows[group[0]][1], variable.shape)
                if group[0] in made_dense
                else tf.reshape(concatenated(runs_of(group, blocks)), variable.shape)
                for _, groups in known
                for group, variable in groups
            ]

        def dense_update(gradients: list[tf.Tensor]) -> tf.Tensor:
            if not jit_compile:
                # A variable that a gradient is assigned to would keep the memory of the push, which lasts as long
                # as the call. What XLA compiles has memory of its own.
                gradients = [tf.raw_ops.DeepCopy(x=gradient) for gradient in gradients]
            given = iter(gradients)
            for part, groups in known:
                if groups:
                    part.optimizer.apply([next(given) for _ in groups], [variable for _, variable in groups])
            for part in idle:
                part.advance()
            return tf.zeros([])  # to wait for

        blocks_signature = [tf.TensorSpec(block.shape, block.dtype) for block in push.blocks.values()]
        # XLA makes of a `tf.concat` code that runs element by element where it has several threads: with two,
        # 4.8 instead of 0.8 ms for Adam on a small model. So what is put together is put together before.
        together = [group for _, groups in known for group, _ in groups if group[0] in places]
        if not push.rows and all(len(runs_of(group, blocks_signature)) == 1 for group in together):
            dense = quick_call(lambda *blocks: dense_update(gradients_of(blocks, {})), blocks_signature, jit_compile)
            return lambda blocks, rows: dense(blocks)
        compiled = tf.function(dense_update, jit_compile=jit_compile, autograph=False)

        def update(*tensors: tf.Tensor) -> None:
            blocks, pairs = tensors[: len(push.blocks)], iter(tensors[len(push.blocks) :])
            given = {index: (next(pairs), next(pairs)) for index in push.rows}
            # All clones start from the iterations and the rate before this update.
            for row_update in updates.values():
                row_update.clone.copy_shared()
            done = [compiled(gradients_of(blocks, given))] if targets or idle else []
            # Rows only after it: when XLA can't compile it, nothing has changed.
            with tf.control_dependencies(done):
                for index, row_update in updates.items():
                    row_update.run(*given[index])
                for clone in by_clone:
                    if clone is not None:
                        updates[clone].clone.copy_shared_back()

        rows_signature = [spec for rows in push.rows.values() for spec in _rows_signature(rows)]
        call = quick_call(update, [*blocks_signature, *rows_signature])
        return lambda blocks, rows: call([*blocks, *(tensor for pair in rows for tensor in pair)])

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
