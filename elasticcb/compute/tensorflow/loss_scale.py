"""Loss scaling, on tensors of a traced step."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from elasticcb.compute.loss_scale import LossScale


class TensorFlowScale(LossScale):
    """For the arguments, see `LossScale`."""

    def unscale(self, gradients: dict[int, Any]) -> tuple[dict[int, Any], Any]:
        if not gradients:
            return {}, tf.constant(True)
        if not self.dynamic:
            factor = self.optimizer.loss_scale_factor
            if factor is None:
                return gradients, tf.constant(True)
            return {index: _divided(gradient, factor) for index, gradient in gradients.items()}, tf.constant(True)
        scale, counter = self.optimizer.dynamic_scale, self.optimizer.step_counter
        finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(_values(g))) for g in gradients.values()])
        old = tf.convert_to_tensor(scale.value)
        unscaled = {index: _divided(gradient, old) for index, gradient in gradients.items()}
        grows = tf.equal(counter.value, self.optimizer.dynamic_growth_steps - 1)
        scale.assign(tf.where(finite, tf.where(grows, old * 2.0, old), old * 0.5))
        counter.assign(tf.where(finite & ~grows, counter.value + 1, 0))
        return unscaled, finite


def plain_gradient(optimizer: keras.optimizers.Optimizer, gradient: Any) -> Any:
    """Converts a gradient of the loss scaled by `optimizer` to one of the plain loss."""
    dynamic = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    scale = tf.convert_to_tensor(optimizer.dynamic_scale.value) if dynamic else optimizer.loss_scale_factor
    return gradient if scale is None else _divided(gradient, scale)


def _values(gradient: Any) -> Any:
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else tf.convert_to_tensor(gradient)


def _divided(gradient: Any, scale: Any) -> Any:
    """At least in single precision, like Keras: a scale may exceed the range of float16."""
    values = keras.ops.divide(_values(gradient), scale)
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return values
