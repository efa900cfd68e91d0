"""The worker's loss scale goes the way of Keras's own."""

import keras
import numpy as np
import tensorflow as tf

from elasticcb.compute.tensorflow.loss_scale import TensorFlowScale


def make(growth):
    return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0), 8.0, dynamic_growth_steps=growth)


def test_dynamic_scale_follows_that_of_keras():
    keras_own, ours = make(2), make(2)
    weight, scale = keras.Variable([0.0, 0.0]), TensorFlowScale(ours)
    for value in (1.0, 2.0, np.inf, 3.0, np.nan, np.nan, 1.0, 1.0, 1.0, 1.0):
        gradient = tf.constant([value, 1.0])
        keras_own.apply([gradient], [weight])
        before = ours.dynamic_scale.numpy()
        unscaled, usable = scale.unscale({0: gradient})
        assert bool(usable) == np.isfinite(value)
        np.testing.assert_allclose(unscaled[0], [value / before, 1.0 / before])
        assert ours.dynamic_scale.numpy() == keras_own.dynamic_scale.numpy()
        assert ours.step_counter.numpy() == keras_own.step_counter.numpy()
    assert ours.scale_loss(2.0).numpy() == 2.0 * scale.value


def test_rows_are_unscaled_and_looked_at_too():
    scale = TensorFlowScale(make(10))
    rows = tf.IndexedSlices(tf.constant([[16.0], [8.0]]), tf.constant([3, 5]), tf.constant([9, 1]))
    unscaled, usable = scale.unscale({4: rows})
    assert bool(usable)
    assert unscaled[4].values.numpy().tolist() == [[2.0], [1.0]]
    assert unscaled[4].indices.numpy().tolist() == [3, 5]


def test_scale_above_what_float16_holds_does_not_lose_its_gradients():
    optimizer = make(10)
    scale = TensorFlowScale(optimizer)
    optimizer.dynamic_scale.assign(2.0**18)
    unscaled, usable = scale.unscale({0: tf.constant([2.0], tf.float16)})
    assert bool(usable)
    np.testing.assert_allclose(unscaled[0], [2.0**-17])
