"""Steps that update a variable several times, or read it after its update, train as in `fit` in every mode."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import elasticcb

X = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
Y = X.sum(1, keepdims=True)


class Gan(keras.Model):
    """The step of a DCGAN: the generator's loss goes through the updated discriminator, which is updated twice; a
    moving average follows the updated generator."""

    def __init__(self):
        super().__init__()
        self.generator, self.average = keras.layers.Dense(4), keras.layers.Dense(4, trainable=False)
        self.discriminator = keras.Sequential([keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1)])
        for layer in (self.generator, self.average, self.discriminator):
            layer.build((None, 4))

    def call(self, x):
        return self.discriminator(self.generator(x))

    def compile(self, first, second):
        super().compile(first)
        self.second = second

    def train_step(self, data):
        x, y = data
        for _ in range(2):
            with tf.GradientTape() as tape:
                judged = self.discriminator(x) - self.discriminator(self.generator(x))
                loss = tf.reduce_mean((judged - y) ** 2)
            weights = self.discriminator.trainable_weights
            gradients = tape.gradient(loss, weights)
            tf.cond(loss > 0, lambda: self.optimizer.apply(gradients, weights), lambda: None)  # noqa: B023
        with tf.GradientTape() as tape:
            fooled = tf.reduce_mean(self(x) ** 2)
        weights = self.generator.trainable_weights
        self.second.apply(tape.gradient(fooled, weights), weights)
        for own, followed in zip(self.average.weights, self.generator.weights, strict=True):
            own.assign(0.9 * own + 0.1 * followed)
        return {"loss": loss, "fooled": fooled}


def make():
    keras.utils.set_random_seed(1)
    model = Gan()
    model.compile(keras.optimizers.Adam(0.01), keras.optimizers.SGD(0.1, momentum=0.9))
    return model


@pytest.mark.parametrize("updates", ["local", "sync", "async"])
def test_the_step_of_a_gan_trains_as_in_fit(updates):
    reference, model = make(), make()
    reference.fit(X, Y, batch_size=16, epochs=2, shuffle=False, verbose=0)
    with elasticcb.Cluster(1, 1, kind="inprocess", updates=updates, log_level="ERROR") as cluster:
        cluster.fit(model, X, Y, batch_size=16, epochs=2, shuffle=False, verbose=0)
    for weight, own in zip(model.get_weights(), reference.get_weights(), strict=True):
        np.testing.assert_allclose(weight, own, rtol=1e-5, atol=1e-6)
