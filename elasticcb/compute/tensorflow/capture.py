"""Captures the gradients that a model's `train_step` passes to its optimizers, while TensorFlow traces or runs it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from elasticcb.compute.capture import OptimizerCapture
from elasticcb.compute.priming import unchanged
from elasticcb.errors import ModelFileError
from elasticcb.optimizers.traits import is_own_class
from elasticcb.optimizers.variables import StepVariables

# Row gradients of variables up to this size in bytes are made dense: for gradients of rows, Keras's optimizers also
# read the whole variable, with conditions that TensorFlow runs slowly.
_SMALL_BYTES = 2 << 20


class TensorFlowCapture(OptimizerCapture):
    """For the arguments, see `OptimizerCapture`."""

    def _plain(self, optimizer: keras.optimizers.Optimizer, gradient: Any) -> Any:
        dynamic = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
        scale = tf.convert_to_tensor(optimizer.dynamic_scale.value) if dynamic else optimizer.loss_scale_factor
        if scale is None:
            return gradient
        # At least in single precision, like Keras: a scale may exceed the range of float16.
        if isinstance(gradient, tf.IndexedSlices):
            values = keras.ops.divide(gradient.values, scale)
            return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
        return keras.ops.divide(tf.convert_to_tensor(gradient), scale)

    def _applied(self, optimizer: keras.optimizers.Optimizer, gradient: Any, variable: Any) -> Any:
        if is_own_class(optimizer):  # which may update only the rows given
            return gradient
        return _made_dense(gradient, variable.shape, variable.dtype)

    def _place(self) -> Any:
        return _graph()

    def _check_place(self, optimizer: int, place: Any) -> None:
        if place is not _graph():
            raise ModelFileError(
                f"The optimizer {self.named(optimizer)} is applied inside a tf.cond, a loop or a separate function "
                "(@tf.function, keras.ops.cond), where gradients of rows of an embedding table can't be captured. Call "
                "it directly in train_step: remove the decorator (the whole step is compiled anyway), and instead of a "
                "condition multiply the gradients by 0 or 1. Or use keras.layers.Embedding."
            )


def rows_gradient(gradient: Any, rows: Any) -> Any:
    """The gradient of each of the rows [n, dim] of a table that were given to a step."""
    if isinstance(gradient, tf.IndexedSlices):
        places = tf.reshape(gradient.indices, [-1])
        gradient = tf.math.unsorted_segment_sum(gradient.values, places, tf.shape(rows)[0])
    return tf.cast(gradient, rows.dtype)


def _made_dense(gradient: Any, shape: Sequence[int], dtype: Any) -> Any:
    """The dense gradient of a small variable, if `gradient` is one of rows; those of equal rows are summed. Any other
    gradient is returned as it is."""
    kind = tf.as_dtype(dtype)
    if not isinstance(gradient, tf.IndexedSlices) or math.prod(shape) * kind.size > _SMALL_BYTES:
        return gradient
    rows = tf.reshape(gradient.indices, [-1])
    return tf.math.unsorted_segment_sum(tf.cast(gradient.values, kind), rows, shape[0])


def step_variables(model: keras.Model, batch: Any) -> StepVariables:
    """Which variables `train_step` gives to optimizers.

    The step is traced, not run; code run by `run_eagerly` leaves the model unchanged.
    """
    capture = TensorFlowCapture(model)
    try:
        if model.run_eagerly:
            with unchanged(model.variables):
                capture.train_step(batch)
        else:
            tf.function(lambda data: capture.train_step(data)[0], autograph=False).get_concrete_function(batch)
    finally:
        capture.release()
    return capture.variables


def _graph() -> Any:
    """The graph being traced; None if there is none."""
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
