"""The trainable variables of a server, and the optimizers that update them."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from elasticcb.errors import ElasticCBError, ModelFileError, describe, user_traceback
from elasticcb.keras_private import set_path_of
from elasticcb.optimizers.traits import may_update_rows
from elasticcb.ps.compiled_update import CompiledUpdate
from elasticcb.ps.joined import Piece, Run, add_run, concatenated, parted
from elasticcb.ps.optimizer_set import MakeOptimizers, OptimizerSet
from elasticcb.ps.row_update import RowUpdate
from elasticcb.rpc.tensors import Array
from elasticcb.sharding.partition import Slice, VariableSpec, block_sizes, layout
from elasticcb.sharding.push import Push
from elasticcb.tf.concrete_call import CompiledLater
from elasticcb.tf.convert import array_of, tensor_of

logger = logging.getLogger(__name__)

Movements = Sequence[tuple[Mapping[str, Array], float]]  # flat, by dtype, with the weight of each


class TrainedPart:
    """Trainable variables with fresh optimizers.

    Attributes:
        variables: trainable variables of the part, by index.
    """

    def __init__(
        self,
        specs: Sequence[VariableSpec],
        slices: Sequence[Slice],
        make_optimizers: MakeOptimizers | None,
        values: Mapping[int, Array],
        groups: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self._specs, self._slices = specs, slices
        self._updates: dict[Any, CompiledUpdate] = {}  # by kind of push
        self._row_updates: dict[int, RowUpdate] = {}
        self._read = CompiledLater(self._flat_weights)
        self._add: CompiledLater | None = None
        self.optimizers: OptimizerSet | None = None
        with tf.device("/CPU:0"):
            self.variables: dict[int, keras.Variable | Piece] = {
                part.variable: _variable(specs[part.variable], values[part.variable])
                for part in slices
                if specs[part.variable].trainable
            }
            if make_optimizers is not None:
                self.optimizers = OptimizerSet(make_optimizers, specs, self.variables, groups)
                self.variables |= self.optimizers.variables

    def need_optimizers(self) -> OptimizerSet:
        """Raises `ElasticCBError` if nothing is trained."""
        if self.optimizers is None:
            raise ElasticCBError(
                "This parameter server has no optimizer, because the job does not train; it accepts no gradients."
            )
        return self.optimizers

    def weights(self) -> dict[str, Array]:
        """The current weights, flat, by dtype."""
        with tf.device("/CPU:0"):
            return {dtype: array_of(tensor) for dtype, tensor in self._read().items()}

    def _flat_weights(self) -> dict[str, tf.Tensor]:
        """The weights, by dtype; may run in a graph."""
        runs: dict[str, list[Run]] = {}
        for part, dtype, _ in layout(self._specs, self._slices, True):
            variable = self.variables[part.variable]
            if isinstance(variable, Piece):
                run = Run(variable.whole.value, variable.offset, variable.end)
            else:
                run = Run(variable.value, 0, part.elements)
            add_run(runs.setdefault(dtype, []), run)
        return {dtype: concatenated(found) for dtype, found in runs.items()}

    def _add_flat(self, *blocks: tf.Tensor) -> None:
        """Adds flat blocks, by dtype, to all variables; may run in a graph."""
        given = dict(zip(block_sizes(self._specs, self._slices, True), blocks, strict=True))
        found: dict[int, tuple[keras.Variable, list[tuple[int, Run]]]] = {}
        for part, dtype, offset in layout(self._specs, self._slices, True):
            variable = self.variables[part.variable]
            whole, place = (variable.whole, variable.offset) if isinstance(variable, Piece) else (variable, 0)
            run = Run(given[dtype], offset, offset + part.elements)
            found.setdefault(id(whole), (whole, []))[1].append((place, run))
        for whole, placed in found.values():
            runs: list[Run] = []
            for _, run in sorted(placed, key=lambda each: each[0]):
                add_run(runs, run)
            movement = tf.reshape(concatenated(runs), whole.shape)
            if movement.dtype == whole.value.dtype:
                whole.value.assign_add(movement)
            else:
                whole.assign(tf.cast(whole.value, movement.dtype) + movement)

    def groups_for(self, push: Push, by_xla: bool) -> Sequence[Sequence[int]] | None:
        """New groups if `push` does not update all variables of the current ones; None: the current ones are right."""
        if self._kind(push, by_xla) in self._updates:
            return None
        groups = self.need_optimizers().groups
        wanted = parted(groups, push.dense, [index for index in push.rows if index in self.variables])
        return None if wanted == groups else wanted

    def _kind(self, push: Push, by_xla: bool) -> Any:
        """A key that is equal for pushes applied by the same function."""
        rows = tuple(index for index in push.rows if index in self.variables)
        updating = self.need_optimizers().updating(push.updated)
        return push.dense, rows, tuple(part.name for part in updating), by_xla

    def apply(self, push: Push, by_xla: bool) -> None:
        """Applies a push as one update. Raises `ModelFileError` when the optimizer fails."""
        key = self._kind(push, by_xla)
        blocks = [tensor_of(block) for block in push.blocks.values()]
        rows = [(tf.convert_to_tensor(ids), tf.convert_to_tensor(values)) for ids, values in push.rows.values()]
        try:
            if key not in self._updates:
                self._updates[key] = self._first_call(push, blocks, rows, by_xla)
            else:
                self._updates[key](blocks, rows)
        except Exception as error:
            raise ModelFileError(
                f"The optimizer {self.need_optimizers().kinds} failed on a parameter server: {describe(error)}",
                user_traceback(error),
            ) from error

    def move(self, movements: Movements) -> None:
        """Moves all variables. Constraints are applied afterwards."""
        blocks = {dtype: _total_movement(dtype, movements) for dtype in block_sizes(self._specs, self._slices, True)}
        with tf.device("/CPU:0"):
            if self._add is None:
                given = [tf.TensorSpec(block.shape, block.dtype) for block in blocks.values()]
                self._add = CompiledLater(self._add_flat, given)
            self._add([tensor_of(block) for block in blocks.values()])
            for variable in self.variables.values():
                if movements[0][1] < 1 and isinstance(variable, keras.Variable) and variable.constraint is not None:
                    variable.assign(variable.constraint(variable))

    def _first_call(self, push: Push, blocks: list[tf.Tensor], rows: list[Any], by_xla: bool) -> CompiledUpdate:
        """Applies the push with a new function for its kind, and returns that function."""
        # The first call compiles. XLA makes updates about three times as fast, but can't compile every op of a custom
        # optimizer; it then fails before anything changes.
        if by_xla:
            update = self._compiled(push, jit_compile=True)
            try:
                update(blocks, rows)
                return update
            except tf.errors.OpError as error:
                kinds = self.need_optimizers().kinds
                logger.warning("The optimizer %s runs without XLA, more slowly: %s", kinds, error.message)
        update = self._compiled(push, jit_compile=False)
        update(blocks, rows)
        return update

    def _compiled(self, push: Push, jit_compile: bool) -> CompiledUpdate:
        places = {place.slice.variable: place for place in layout(self._specs, self._slices, True, push.dense)}
        row_updates = {index: self._row_update(index) for index in push.rows if self._updates_rows(index)}
        return CompiledUpdate(push, places, self.need_optimizers(), row_updates, jit_compile)

    def _updates_rows(self, index: int) -> bool:
        # A constraint is a function of the whole variable.
        return may_update_rows(self.need_optimizers().of(index).optimizer) and not self._specs[index].constraint

    def _row_update(self, index: int) -> RowUpdate:
        if index not in self._row_updates:
            optimizer = self.need_optimizers().of(index)
            self._row_updates[index] = RowUpdate(optimizer, index, self.variables[index])
        return self._row_updates[index]


def _total_movement(dtype: str, movements: Movements) -> Array:
    """The weighted sum; in float32 for half precision."""
    (blocks, share), *others = movements
    total = _share(blocks[dtype], share)
    for blocks, share in others:
        total += _share(blocks[dtype], share)
    return total


def _share(block: Array, share: float) -> Array:
    wide = block.astype(np.float32) if block.dtype.itemsize == 2 else block
    return wide if share == 1 else wide * wide.dtype.type(share)


def _variable(spec: VariableSpec, value: Array) -> keras.Variable:
    *scopes, name = spec.path.split("/")
    constraint = None
    if spec.constraint:
        try:
            # The user's code runs here anyway, so lambdas need no extra permission.
            constraint = keras.saving.deserialize_keras_object(json.loads(spec.constraint), safe_mode=False)
        except Exception as error:
            raise ModelFileError(
                f"The constraint of {spec.path!r} can't be created on a parameter server: {error} Register its "
                "class or function with keras.saving.register_keras_serializable."
            ) from error
    variable = keras.Variable(value, dtype=spec.dtype, trainable=True, name=name)
    variable.constraint = constraint
    # Optimizers look at names and paths (exclude_from_weight_decay, Muon), so these must be the model's.
    set_path_of(variable, "/".join([*scopes, name]))
    return variable
