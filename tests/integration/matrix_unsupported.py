"""What Keras models, optimizers and their options can do that jobs can't, for `test_matrix.py`."""

from __future__ import annotations

import socket

import keras
import tensorflow as tf

from catalogue import compiled, dense
from elasticcb.errors import ElasticCBError, JobFailedError, UsageError
from matrix_models import Plain


class Twice(Plain):
    def train_step(self, data):
        x, y = data
        for _ in range(2):
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


class Sometimes(Plain):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        gradients, variables = tape.gradient(loss, self.trainable_variables), self.trainable_variables
        tf.cond(loss > 0, lambda: self.optimizer.apply(gradients, variables), lambda: None)
        return {"loss": loss}


class Connected(Plain):
    def __init__(self):
        super().__init__()
        self.client = socket.socket()


class Teacher(Plain):
    """Ends its step with the loss by the updated weights."""

    def train_step(self, data):
        logs = super().train_step(data)
        return {**logs, "after": keras.ops.mean((self(data[0]) - data[1]) ** 2)}


def clipped_and_accumulated():
    return dense(optimizer=keras.optimizers.SGD(0.1, global_clipnorm=1.0, gradient_accumulation_steps=2))


WITH_GRADIENTS = '`updates="sync"` and `"async"`:'
# What: (a model, the error, what it says, why).
UNSUPPORTED = {
    f"{WITH_GRADIENTS} a `train_step` that updates a variable twice": (
        lambda: compiled(Twice()),
        ElasticCBError,
        "a variable can be updated only once per step",
        "servers apply the gradients after the step",
    ),
    f"{WITH_GRADIENTS} a `train_step` that reads a variable after its update (the DCGAN step, MoCo, mean teacher)": (
        lambda: compiled(Teacher()),
        ElasticCBError,
        "after giving its gradient to the optimizer",
        "servers apply the gradients after the step",
    ),
    f"{WITH_GRADIENTS} an optimizer applied inside `tf.cond`, a loop or a separate `@tf.function`": (
        lambda: compiled(Sometimes()),
        ElasticCBError,
        "where its gradients can't be captured",
        "gradients leave the step as outputs",
    ),
    f"{WITH_GRADIENTS} `global_clipnorm` with `gradient_accumulation_steps` on several servers": (
        clipped_and_accumulated,
        JobFailedError,
        "Use one parameter server",
        "each server has only a part of the accumulated gradients",
    ),
    "attributes that belong to one process (files, connections, threads)": (
        lambda: compiled(Connected()),
        UsageError,
        "model.client: a socket can't be sent to workers",
        "they can't be pickled",
    ),
}
