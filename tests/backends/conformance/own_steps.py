"""A model with a `train_step` of its own, in the form of each backend; it logs a metric and a value."""

from __future__ import annotations

import keras


class _Base(keras.Model):
    def __init__(self):
        super().__init__(name="own_step")  # TensorFlow takes none that begins with _
        self.layer = keras.layers.Dense(1)
        self.error = keras.metrics.MeanAbsoluteError(name="error")

    def call(self, x, training=False):
        return self.layer(x)

    @property
    def metrics(self):
        return [self.error]

    def get_loss(self, y, predictions):
        return keras.ops.mean(keras.ops.square(y - predictions))


class _TensorFlow(_Base):
    def train_step(self, data):
        import tensorflow as tf

        x, y = data
        with tf.GradientTape() as tape:
            predictions = self(x, training=True)
            loss = self.get_loss(y, predictions)
        self.optimizer.apply(tape.gradient(loss, self.trainable_weights), self.trainable_weights)
        self.error.update_state(y, predictions)
        return {"loss": loss, "error": self.error.result()}


class _Torch(_Base):
    def train_step(self, data):
        import torch

        x, y = data
        self.zero_grad()
        predictions = self(x, training=True)
        loss = self.get_loss(y, predictions)
        loss.backward()
        gradients = [variable.value.grad for variable in self.trainable_weights]
        with torch.no_grad():
            self.optimizer.apply(gradients, self.trainable_weights)
        self.error.update_state(y, predictions)
        return {"loss": loss, "error": self.error.result()}


class _JAX(_Base):
    def train_step(self, state, data):
        import jax

        trainable, others, optimizer, metrics = state
        x, y = data

        def loss_of(trainable):
            predictions, updated = self.stateless_call(trainable, others, x, training=True)
            return self.get_loss(y, predictions), (predictions, updated)

        (loss, (predictions, others)), gradients = jax.value_and_grad(loss_of, has_aux=True)(trainable)
        trainable, optimizer = self.optimizer.stateless_apply(optimizer, gradients, trainable)
        metrics = self.error.stateless_update_state(metrics, y, predictions)
        logs = {"loss": loss, "error": self.error.stateless_result(metrics)}
        return logs, (trainable, others, optimizer, metrics)


_OF_BACKENDS = {"tensorflow": _TensorFlow, "torch": _Torch, "jax": _JAX}


def own_step(optimizer):
    keras.utils.set_random_seed(1)
    model = _OF_BACKENDS[keras.backend.backend()]()
    model.compile(optimizer)
    return model
