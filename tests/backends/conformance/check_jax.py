"""What differs on JAX: what only it refuses, in words, and variables of 64 bits, which it holds in 32."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import elasticcb
from check_steps import assert_same, hold, train
from check_tables import IDS, hold_tables, with_own_table
from compiled_models import BATCH, X, Y, batches, dense, fit
from deep_cases import deep_but
from elasticcb.callbacks import runs_on
from elasticcb.compute.registry import backend
from elasticcb.errors import ModelFileError
from elasticcb.settings import Mode


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
    hold(model, next(batches()))  # as in Keras, its own step does not use the second one
    model.train_step = lambda state, data: keras.Model.train_step(model, state, data)
    with pytest.raises(ModelFileError, match=r"has 2 optimizers .* KERAS_BACKEND=tensorflow"):
        hold(model, next(batches()))


def test_a_model_inside_that_was_never_compiled_has_no_optimizer():
    outer = keras.Sequential([keras.Sequential([keras.layers.Dense(1)])])
    outer.compile("sgd", "mse")
    outer.train_step = lambda state, data: keras.Model.train_step(outer, state, data)
    hold(outer, next(batches()))


def test_an_id_that_looks_like_padding_in_32_bits_is_refused():
    model = with_own_table(mask_zero=True)
    held, _ = hold_tables(model, (IDS[:BATCH], Y[:BATCH]))
    computation = backend().computation(held)
    with pytest.raises(ModelFileError, match=r"'table' has mask_zero=True .* 1099511627776, a multiple of 2\*\*32"):
        computation.prepare((np.array([[0, 1, 2**40]]), Y[:1]), Mode.EVALUATION)


def test_a_step_may_apply_its_optimizer_twice():
    class Twice(keras.Sequential):
        def train_step(self, state, data):
            _, state = super().train_step(state, data)
            return super().train_step(state, data)

    def make():
        keras.utils.set_random_seed(1)
        model = Twice([keras.Input((6,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.Adam(0.01), "mse")
        return model

    reference, model = make(), make()
    fit(reference)
    train(hold(model, next(batches())), batches())
    assert_same([each.numpy() for each in model.weights], [each.numpy() for each in reference.weights])


class Counter(keras.layers.Layer):
    """Counts its training steps."""

    def build(self, shape):
        self.steps = self.add_weight(shape=(), dtype="int64", initializer="zeros", trainable=False)

    def call(self, inputs, training=False):
        if training:
            self.steps.assign_add(1)
        return inputs


@runs_on("master")
class Reads(keras.callbacks.Callback):
    """Reads the model on the master, and changes nothing."""

    def on_train_batch_end(self, batch, logs=None):
        self.weights = self.model.get_weights()

    def on_epoch_end(self, epoch, logs=None):
        self.weights = self.model.get_weights()


@pytest.mark.filterwarnings("ignore:Explicitly requested dtype")
@pytest.mark.parametrize("updates", deep_but(["local", "sync"], "sync"))
def test_variables_of_64_bits_train_as_in_fit(updates, tmp_path):
    def wide():
        keras.utils.set_random_seed(1)
        layers = keras.layers.Dense(3, dtype="float64"), Counter(), keras.layers.Dense(1, dtype="float32")
        model = keras.Sequential([keras.Input((6,)), *layers])
        model.compile(keras.optimizers.Adam(0.01), "mse")
        return model

    reference, model, epochs = wide(), wide(), 3
    expected = fit(reference, epochs=epochs)
    with elasticcb.Cluster(1, 1, updates=updates, directory=tmp_path) as cluster:
        same = {"batch_size": BATCH, "shuffle": False, "verbose": 0}
        assert_same(cluster.fit(model, X, Y, epochs=epochs, callbacks=[Reads()], **same).history, expected)
    assert_same(model.get_weights(), reference.get_weights())
    assert int(model.optimizer.iterations) == int(reference.optimizer.iterations)  # nothing was sent to the servers
