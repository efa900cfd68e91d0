"""What JAX alone refuses, in words: model files that can't be traced, several optimizers, `Cluster.place`."""

import keras
import pytest
import tensorflow as tf

from check_steps import hold
from compiled_models import batches, dense
from elasticcb.api.placed import PlacedWeights
from elasticcb.errors import ModelFileError, UsageError


def losing(loss, **compiled):
    model = dense()
    model.compile("adam", loss, **compiled)
    return model


def test_a_loss_in_tensorflow_is_told_what_to_use():
    with pytest.raises(ModelFileError, match=r"it calls TensorFlow with a JAX array.*keras\.ops or jax\.numpy"):
        hold(losing(lambda y, p: tf.reduce_mean(tf.square(y - p))), next(batches()))


def test_a_loss_that_looks_at_values_is_told_to_be_untraceable():
    def loss(y, p):
        return keras.ops.mean(y - p) if p[0, 0] > 0 else keras.ops.mean(p - y)

    with pytest.raises(ModelFileError, match=r"it can't be traced by JAX.*run_eagerly=True"):
        hold(losing(loss), next(batches()))


def test_a_model_with_two_optimizers_is_refused():
    model = dense()
    model.second = keras.optimizers.SGD()
    with pytest.raises(ModelFileError, match=r"has 2 optimizers .* KERAS_BACKEND=tensorflow"):
        hold(model, next(batches()))


def test_place_is_refused():
    with pytest.raises(UsageError, match=r"Cluster\.place needs Keras on"):
        PlacedWeights(dense())
