"""The user's Keras optimizer on some rows of a table, at a cost independent of the table's size.

A fresh optimizer runs on a small variable with only the rows to update, which are given with their slots and returned.
Rows without a gradient stay unchanged, including momentum and weight decay ("lazy" updates); docs/parameter_servers.md
describes how that differs from a dense update.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import keras
import tensorflow as tf

from elasticcb.errors import ModelFileError, describe, user_traceback
from elasticcb.keras_private import set_decays, set_path_of
from elasticcb.optimizers.traits import multiply_learning_rate
from elasticcb.optimizers.variables import Leaf, leaves_of, optimizer_variables
from elasticcb.sharding.partition import VariableSpec
from elasticcb.tf.tensors import make_free_rows

# Creates fresh optimizers at each call, the model's first ones: at least as many as requested.
MakeOptimizers = Callable[[int], Sequence["keras.optimizers.Optimizer"]]

_ROWS = 2  # rows of the initial variable: not 1, which is also the shape of non-row state
_INDEX = 0  # of the only variable


class RowOptimizer:
    """A fresh optimizer on rows [row_shape].

    Its steps and rate are given with each update; without them, it starts from those of a fresh optimizer.

    Attributes:
        slots: initial row of each slot, [dim] or another width, by name.
        shared: its state of no single row, by key of `OptimizerState.shared`.
        has_extras: whether it has state of other shapes, which can't be updated by rows.

    Raises `ModelFileError` when the optimizer can't be built.
    """

    def __init__(
        self, leaf: Leaf, row_shape: tuple[int, ...], spec: VariableSpec, rate_multiplier: float = 1.0
    ) -> None:
        self._optimizer = optimizer = leaf.optimizer
        _prepare(optimizer)
        with tf.init_scope(), tf.device("/CPU:0"):
            zeros = tf.zeros([_ROWS, *row_shape], spec.dtype)
            name = spec.path.rpartition("/")[2]
            self._rows = keras.Variable(zeros, dtype=spec.dtype, trainable=True, name=name)
            # Optimizers look at names and paths (exclude_from_weight_decay, Muon), so these must be the model's.
            set_path_of(self._rows, spec.path)
            try:
                optimizer.build([self._rows])
            except Exception as error:
                raise ModelFileError(
                    f"The optimizer {type(optimizer).__name__} can't be built for the embedding table {spec.path!r} on "
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
        self.has_extras = bool(found.extras)
        if rate_multiplier != 1:
            multiply_learning_rate(optimizer, rate_multiplier)
        self.shared = {leaf.prefix + name: value for name, value in found.shared.items()}
        self._fresh = {key: value.numpy() for key, value in self.shared.items()}

    def apply(
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
