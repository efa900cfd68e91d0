"""Backends that trace a model's step: what they say of a model file that can't be traced."""

import keras
import pytest
import tensorflow as tf

from check_steps import hold
from compiled_models import batches, dense
from elasticcb.errors import ModelFileError

pytestmark = pytest.mark.skipif(keras.backend.backend() != "jax", reason="only JAX traces without TensorFlow")


def losing(loss, **compiled):
    model = dense()
    model.compile("adam", loss, **compiled)
    return model


def test_a_loss_in_tensorflow_is_told_what_to_use():
    with pytest.raises(ModelFileError, match=r"it calls TensorFlow on an array of JAX.*keras\.ops or jax\.numpy"):
        hold(losing(lambda y, p: tf.reduce_mean(tf.square(y - p))), next(batches()))


def test_a_loss_that_looks_at_values_is_told_to_be_untraceable():
    def loss(y, p):
        return keras.ops.mean(y - p) if p[0, 0] > 0 else keras.ops.mean(p - y)

    with pytest.raises(ModelFileError, match=r"it can't be traced by JAX.*run_eagerly=True"):
        hold(losing(loss), next(batches()))


def test_a_model_with_two_optimizers_is_refused():
    model = dense()
    model.second = keras.optimizers.SGD()
    with pytest.raises(ModelFileError, match=r"holds 2 optimizers .* KERAS_BACKEND=tensorflow"):
        hold(model, next(batches()))
