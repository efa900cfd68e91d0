"""Adagrad with one accumulator for each row: the least that an adaptive optimizer can remember of a table."""

# mypy: allow-subclassing-any, allow-untyped-calls

from __future__ import annotations

import math
from typing import Any

import keras
import tensorflow as tf

from elasticcb.errors import UsageError


@keras.saving.register_keras_serializable("elasticcb")
class RowWiseAdagrad(keras.optimizers.Optimizer):
    """Adagrad whose accumulator is one number for each row, rather than one for each element.

    A row is what one index of the first axis names. With a row's gradient g, it is

        accumulator += mean(g ** 2)
        row -= learning_rate * g / (sqrt(accumulator) + epsilon)

    as `EXACT_ROWWISE_ADAGRAD` of FBGEMM, which TorchRec trains its tables with, and `RowWiseSparseAdagrad` of DLRM
    (Naumov et al., 2019, "Deep Learning Recommendation Model for Personalization and Recommendation Systems",
    https://arxiv.org/abs/1906.00091). A row without a gradient does not change.

    The accumulator of a variable [rows, …] has the shape [rows, 1, …]: for 16 float32 values 4 bytes instead of 64.
    The rows of a variable of rank 0 or 1 are its elements, so that biases are trained by Adagrad. Dense layers are
    often better trained by another optimizer; `keras.optimizers.MultiOptimizer` gives each variable its own.

    Gradients of rows (`tf.IndexedSlices`) are added up by row first, and cost what the batch has, not the table.

    Args:
        learning_rate: a float, a schedule, or a function without arguments.
        initial_accumulator_value: of each row, at least 0.
        epsilon: keeps the divisor from being 0. FBGEMM's defaults are 1e-8, with accumulators that begin at 0; these
            are those of `keras.optimizers.Adagrad`.
        **kwargs: those of any Keras optimizer: `weight_decay`, `clipnorm`, `clipvalue`, `global_clipnorm`, `use_ema`, …

    Example:

        model.compile(elasticcb.optimizers.RowWiseAdagrad(0.05), "binary_crossentropy")
    """

    rowwise = True

    def __init__(
        self,
        learning_rate: Any = 0.001,
        initial_accumulator_value: float = 0.1,
        epsilon: float = 1e-7,
        name: str = "row_wise_adagrad",
        **kwargs: Any,
    ) -> None:
        for argument, value in (("initial_accumulator_value", initial_accumulator_value), ("epsilon", epsilon)):
            if not isinstance(value, (int, float)) or not 0 <= value < math.inf:
                raise UsageError(f"RowWiseAdagrad takes a number of at least 0 as {argument}. Received: {value!r}.")
        super().__init__(learning_rate=learning_rate, name=name, **kwargs)
        self.initial_accumulator_value = initial_accumulator_value
        self.epsilon = epsilon
        self._accumulators: list[keras.Variable] = []

    def build(self, variables: list[keras.Variable]) -> None:
        if self.built:
            return
        super().build(variables)
        self._accumulators = [
            self.add_variable(
                shape=(*variable.shape[:1], *(1 for _ in variable.shape[1:])),
                initializer=keras.initializers.Constant(self.initial_accumulator_value),
                dtype=variable.dtype,
                name=f"{variable.path.replace('/', '_')}_accumulator",
            )
            for variable in variables
        ]

    def update_step(self, gradient: Any, variable: keras.Variable, learning_rate: Any) -> None:
        accumulator = self._accumulators[self._get_variable_index(variable)]
        rate = keras.ops.cast(learning_rate, variable.dtype)
        gradient = keras.ops.cast(gradient, variable.dtype)
        axes = tuple(range(1, len(variable.shape)))
        if isinstance(gradient, tf.IndexedSlices):
            rows, values = _summed(gradient.indices, gradient.values)
            squares = keras.ops.mean(keras.ops.square(values), axes, keepdims=True)
            self.assign_add(accumulator, tf.IndexedSlices(squares, rows))
            divisor = keras.ops.sqrt(tf.gather(accumulator.value, rows)) + self.epsilon
            self.assign_sub(variable, tf.IndexedSlices(rate * values / divisor, rows))
        else:
            squares = keras.ops.square(gradient)
            self.assign_add(accumulator, keras.ops.mean(squares, axes, keepdims=True) if axes else squares)
            self.assign_sub(variable, rate * gradient / (keras.ops.sqrt(accumulator) + self.epsilon))

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "initial_accumulator_value": self.initial_accumulator_value,
            "epsilon": self.epsilon,
        }


def _summed(rows: tf.Tensor, values: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Gradients with those of equal rows added up: rows [n] and values [n, …], of which those left over are row 0 and
    zeros. XLA compiles it, as it does not compile `tf.unique`, whose result has a size of its own."""
    count = tf.size(rows)
    order = tf.argsort(rows)
    rows = tf.gather(rows, order)
    begins = tf.concat([tf.ones_like(rows[:1], tf.int32), tf.cast(rows[1:] != rows[:-1], tf.int32)], 0)
    places = tf.cumsum(begins) - 1
    sums = tf.math.unsorted_segment_sum(tf.gather(values, order), places, count)
    return tf.maximum(tf.math.unsorted_segment_max(rows, places, count), 0), sums
