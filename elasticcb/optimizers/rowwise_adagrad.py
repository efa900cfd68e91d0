"""Adagrad with one accumulator per row, the smallest state of an adaptive optimizer for a table."""

# mypy: allow-subclassing-any, allow-untyped-calls

from __future__ import annotations

import math
from typing import Any

import keras
import tensorflow as tf

from elasticcb.errors import UsageError


@keras.saving.register_keras_serializable("elasticcb")
class RowWiseAdagrad(keras.optimizers.Optimizer):
    """Adagrad with one accumulator per row instead of one per element.

    A row is the slice at one index of the first axis. For a row with gradient g:

        accumulator += mean(g ** 2)
        row -= learning_rate * g / (sqrt(accumulator) + epsilon)

    This is the same as `EXACT_ROWWISE_ADAGRAD` of FBGEMM, which TorchRec uses, and `RowWiseSparseAdagrad` of DLRM
    (Naumov et al., 2019, "Deep Learning Recommendation Model for Personalization and Recommendation Systems",
    https://arxiv.org/abs/1906.00091). A row without a gradient does not change.

    The accumulator of a variable [rows, …] has the shape [rows, 1, …]: 4 bytes instead of 64 for 16 float32 values. The
    rows of a variable of rank 0 or 1 are its elements, so biases are trained by plain Adagrad. For dense layers, other
    optimizers are often better; use `keras.optimizers.MultiOptimizer` to choose one per variable.

    Gradients of rows (`tf.IndexedSlices`) are summed by row first; the cost depends on the batch, not on the table.

    Args:
        learning_rate: a float, a schedule, or a function without arguments.
        initial_accumulator_value: initial value of each accumulator, at least 0.
        epsilon: avoids division by 0. The defaults are those of `keras.optimizers.Adagrad`; FBGEMM's are 1e-8 and
            accumulators that start at 0.
        **kwargs: arguments of any Keras optimizer: `weight_decay`, `clipnorm`, `clipvalue`, `global_clipnorm`,
            `use_ema`, …

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
            self.assign_sub(variable, tf.IndexedSlices(keras.ops.divide_no_nan(rate * values, divisor), rows))
        else:
            squares = keras.ops.square(gradient)
            self.assign_add(accumulator, keras.ops.mean(squares, axes, keepdims=True) if axes else squares)
            divisor = keras.ops.sqrt(accumulator) + self.epsilon
            self.assign_sub(variable, keras.ops.divide_no_nan(rate * gradient, divisor))

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "initial_accumulator_value": self.initial_accumulator_value,
            "epsilon": self.epsilon,
        }


def _summed(rows: tf.Tensor, values: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Sums gradients of equal rows: returns rows [n] and values [n, …], padded with row 0 and zeros. Unlike
    `tf.unique`, whose result has a dynamic size, XLA can compile it."""
    count = tf.size(rows)
    order = tf.argsort(rows)
    rows = tf.gather(rows, order)
    begins = tf.concat([tf.ones_like(rows[:1], tf.int32), tf.cast(rows[1:] != rows[:-1], tf.int32)], 0)
    places = tf.cumsum(begins) - 1
    sums = tf.math.unsorted_segment_sum(tf.gather(values, order), places, count)
    return tf.maximum(tf.math.unsorted_segment_max(rows, places, count), 0), sums
