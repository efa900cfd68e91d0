"""Updates rows of embedding tables with the user's Keras optimizer.

A fresh optimizer runs on a small variable with only the rows of one push ("lazy" updates: changes of rows without a
gradient, as from momentum and weight decay, are deferred until the row has one). It uses the step counter and learning
rate of the worker, so that Adam's bias correction counts the steps of the model, not those of a row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from elasticcb.errors import ModelFileError, describe, user_traceback
from elasticcb.keras_private import set_decays, set_path_of
from elasticcb.optimizers.traits import may_join, may_update_rows, multiply_learning_rate
from elasticcb.optimizers.variables import Leaf, leaves_of, optimizer_variables
from elasticcb.ps.embedding_table import EmbeddingTable, RowChange
from elasticcb.rpc.tensors import Array, aligned
from elasticcb.sharding.partition import VariableSpec
from elasticcb.tf.batch_signatures import quick_call
from elasticcb.tf.tensors import array_of, make_free_rows, tensor_of

# Creates fresh optimizers at each call, the model's first ones: at least as many as requested.
MakeOptimizers = Callable[[int], Sequence["keras.optimizers.Optimizer"]]

_ROWS = 2  # rows of the initial variable: not 1, which is also the shape of non-row state
_INDEX = 0  # of the only variable


def _prepare(optimizer: keras.optimizers.Optimizer) -> None:
    if optimizer.built:
        raise ModelFileError(
            f"The function that creates the optimizer returned one ({optimizer.name}) that is already in use. It must "
            "create a new one at each call."
        )
    optimizer.loss_scale_factor = None  # the worker has scaled the gradients back
    # A server is the only replica. Keras's reduction over replicas would leak every traced update: it defines a
    # gradient, which TensorFlow registers globally.
    object.__setattr__(optimizer, "_all_reduce_sum_gradients", list)


def fresh_leaves(make_optimizers: MakeOptimizers, specs: Sequence[VariableSpec]) -> list[Leaf]:
    """Fresh optimizers, with outlines of the variables of the whole model that they update.

    Raises `ModelFileError` when they are none of Keras, or too few.
    """
    needed = 1 + max((spec.optimizer for spec in specs if spec.trainable), default=0)
    made = list(make_optimizers(needed))[:needed]
    for optimizer in made:
        if not isinstance(optimizer, keras.optimizers.Optimizer):
            raise ModelFileError(
                f"The optimizer function returned {optimizer!r}; expected a keras.optimizers.Optimizer."
            )
    if len(made) < needed:
        raise ModelFileError(
            f"The model was first built with {needed} optimizers, but on a parameter server it has {len(made)}. Every "
            "process must build the same model."
        )
    return leaves_of(made, specs)


class TableUpdate:
    """A fresh optimizer of one table, or of several tables that are equal to it.

    Its steps and rate are given with each update; without them, it starts from those of a fresh optimizer.

    Attributes:
        kind: the optimizer's class name.
        slots: initial values of each slot, by name: of the rows, or elements, that are updated.
        is_joined: whether rows of any width are updated, as elements [1].
        row_shape: shape of the updated rows or elements.
        shared: state of the optimizer that belongs to no row, by key of `OptimizerState.shared`.
        signature: input signature of `run`, without `shared`.

    Raises `ModelFileError` for an optimizer that can't be built, or can't work on single rows.
    """

    def __init__(self, leaf: Leaf, spec: VariableSpec, rate_multiplier: float = 1.0) -> None:
        self._optimizer = optimizer = leaf.optimizer
        self.is_joined = may_join(optimizer)
        self.row_shape: tuple[int, ...] = (1,) if self.is_joined else tuple(spec.shape[1:])
        self.kind = type(optimizer).__name__
        if not may_update_rows(optimizer):
            raise _not_by_rows(self.kind, spec)
        _prepare(optimizer)
        with tf.init_scope(), tf.device("/CPU:0"):
            zeros = tf.zeros([_ROWS, *self.row_shape], spec.dtype)
            name = spec.path.rpartition("/")[2]
            self._rows = keras.Variable(zeros, dtype=spec.dtype, trainable=True, name=name)
            # Optimizers look at names and paths (exclude_from_weight_decay, Muon), so these must be the model's.
            set_path_of(self._rows, spec.path)
            try:
                optimizer.build([self._rows])
            except Exception as error:
                raise ModelFileError(
                    f"The optimizer {self.kind} can't be built for the embedding table {spec.path!r} on "
                    f"a parameter server: {describe(error)}",
                    user_traceback(error),
                ) from error
            # The master has resolved `exclude_from_weight_decay` on the original model's variables.
            set_decays(optimizer, [(self._rows, not spec.no_weight_decay)])
            found = optimizer_variables(optimizer, {_INDEX: self._rows})
            self.slots = {slot.name: slot.value.numpy()[0] for slot in found.slots}
            self._slots = [slot.value for slot in found.slots]
            for each in (self._rows, *self._slots):
                make_free_rows(each)
        if found.extras:  # state of other shapes
            raise _not_by_rows(self.kind, spec)
        if rate_multiplier != 1:
            multiply_learning_rate(optimizer, rate_multiplier)
        self.shared = {leaf.prefix + name: value for name, value in found.shared.items()}
        self._fresh = {key: value.numpy() for key, value in self.shared.items()}
        rows = [self.row_shape] * 2 + [row.shape for row in self.slots.values()]
        self.signature = [tf.TensorSpec([None, *shape], spec.dtype) for shape in rows]

    def run(
        self, shared: Mapping[str, tf.Tensor], gradients: tf.Tensor, rows: tf.Tensor, *slots: tf.Tensor
    ) -> list[tf.Tensor]:
        """New rows and slots, inside a compiled function: [n, …] each, slots in the order of `self.slots`."""
        for key, variable in self.shared.items():  # a schedule needs no copy: it is a function of the iterations
            variable.assign(shared.get(key, self._fresh[key]))
        self._rows.value.assign(rows)
        for slot, values in zip(self._slots, slots, strict=True):
            slot.value.assign(values)
        # The optimizer may store the gradient in a variable, but its memory belongs to the push.
        self._optimizer.apply([tf.raw_ops.DeepCopy(x=gradients)], [self._rows])
        return [tf.identity(variable.value) for variable in (self._rows, *self._slots)]

    def slots_of(self, dim: int) -> dict[str, Array]:
        """Initial values of each slot in a table of rows [dim], by name."""
        return {name: np.broadcast_to(row, dim) for name, row in self.slots.items()} if self.is_joined else self.slots


class TableUpdates:
    """The optimizers of all tables of a server; a push is one call of a compiled function, whichever tables it updates.

    Args:
        updates: by table; rows of tables with the same update are processed together.
    """

    def __init__(self, updates: Mapping[int, TableUpdate]) -> None:
        self._updates = updates
        self._compiled: dict[Any, _Compiled] = {}

    def __call__(
        self,
        tables: Mapping[int, EmbeddingTable],
        rows: Mapping[int, tuple[Array, Array]],
        version: int,
        shared: Mapping[str, Array] = MappingProxyType({}),
    ) -> None:
        """Updates rows of `tables` by gradients.

        Args:
            rows: by table, (ids int64 [n], gradients [n, dim]).
            version: version of the model after this update.
            shared: steps and rates to use (checked; as `OptimizerState.shared`).

        Raises the errors of `EmbeddingTable.prepare` and `TableUpdate`; in that case, no row has changed.
        """
        changes = {index: tables[index].prepare(*given) for index, given in rows.items()}
        changes = {index: change for index, change in changes.items() if len(change.ids)}
        groups: dict[TableUpdate, list[int]] = {}
        for index in changes:
            groups.setdefault(self._updates[index], []).append(index)
        key = tuple(groups), tuple(shared)
        if groups and key not in self._compiled:
            self._compiled[key] = _Compiled(*key)
        given = [_arrays(update, [changes[index] for index in group]) for update, group in groups.items()]
        results = self._compiled[key](given, shared) if groups else []
        for (update, group), arrays in zip(groups.items(), results, strict=True):
            first = 0
            for index in group:
                change = changes[index]
                end = first + change.rows.size // math.prod(update.row_shape)
                new, *updated = (array[first:end] for array in arrays)
                slots = {
                    name: slot.reshape(change.slots[name].shape)
                    for name, slot in zip(update.slots, updated, strict=True)
                }
                tables[index].commit(change, new.reshape(change.rows.shape), slots, version)
                first = end
        for index in rows.keys() - changes.keys():
            tables[index].advance(version)


def _arrays(update: TableUpdate, changes: Sequence[RowChange]) -> list[Array]:
    """Arguments of `update` for the rows of several tables."""
    parts = [[change.gradients, change.rows, *(change.slots[name] for name in update.slots)] for change in changes]
    shapes = [spec.shape[1:] for spec in update.signature]
    return [
        _joined([part.reshape(-1, *shape) for part in each])
        for each, shape in zip(zip(*parts, strict=True), shapes, strict=True)
    ]


def _joined(arrays: Sequence[Array]) -> Array:
    if len(arrays) == 1:
        return arrays[0]
    whole = aligned((sum(map(len, arrays)), *arrays[0].shape[1:]), arrays[0].dtype)
    return np.concatenate(arrays, out=whole)


class _Compiled:
    """Several updates as one compiled function; `shared` are the keys of the steps and rates that a call may give."""

    def __init__(self, updates: Sequence[TableUpdate], shared: Sequence[str]) -> None:
        self._updates = updates
        known = {key: variable for update in updates for key, variable in update.shared.items()}
        self._shared = {key: tf.TensorSpec(known[key].shape, known[key].dtype) for key in shared if key in known}
        self._call: Callable[[list[tf.Tensor]], Sequence[tf.Tensor]] | None = None

    def __call__(self, given: Sequence[Sequence[Array]], shared: Mapping[str, Array]) -> list[list[Array]]:
        """Of each update, from (gradients, rows, *slots) to (rows, *slots)."""
        try:
            with tf.device("/CPU:0"):
                tensors = [tensor_of(array) for arrays in given for array in arrays]
                # Frameworks other than TensorFlow count steps in 32 bits.
                tensors += [tf.constant(shared[key], spec.dtype) for key, spec in self._shared.items()]
                if self._call is None:
                    rows = [spec for update in self._updates for spec in update.signature]
                    self._call = quick_call(self._run, [*rows, *self._shared.values()])
                results = iter([array_of(tensor) for tensor in self._call(tensors)])
        except Exception as error:
            kinds = ", ".join(dict.fromkeys(update.kind for update in self._updates))
            raise ModelFileError(
                f"The optimizer {kinds} failed on rows of an embedding table: {describe(error)}", user_traceback(error)
            ) from error
        return [[next(results) for _ in range(1 + len(update.slots))] for update in self._updates]

    def _run(self, *tensors: tf.Tensor) -> list[tf.Tensor]:
        given = iter(tensors)
        rows = [[next(given) for _ in update.signature] for update in self._updates]
        shared = dict(zip(self._shared, given, strict=True))
        return [each for update, own in zip(self._updates, rows, strict=True) for each in update.run(shared, *own)]


def _not_by_rows(kind: str, spec: VariableSpec) -> ModelFileError:
    return ModelFileError(
        f"The optimizer {kind} can't train the embedding table {spec.path!r}, because each step updates only a few "
        "rows. Optimizers need all rows if they average weights (use_ema), accumulate gradients, or treat neither "
        "each element nor each row independently. Use another optimizer (SGD, Adagrad, Adam, Ftrl, RowWiseAdagrad, "
        "...). A custom class declares what its updates depend on by a class attribute: `elementwise = True` if the "
        "update of an element depends only on the element, its gradient and its slots; `rowwise = True` if the "
        "update of a row does, and all its slots have one entry per row, [rows, ...]."
    )
