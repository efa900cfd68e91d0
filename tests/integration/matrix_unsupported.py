"""What Keras models, optimizers and their options can do that jobs can't, for `test_matrix.py`."""

from __future__ import annotations

import threading

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


class Locked(Plain):
    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()


class Teacher(Plain):
    """Ends its step with the loss by the updated weights."""

    def train_step(self, data):
        logs = super().train_step(data)
        return {**logs, "after": keras.ops.mean((self(data[0]) - data[1]) ** 2)}


class Broken(Plain):
    def get_config(self):
        raise ValueError("no config of this one")


class Meter:
    def off(self, y, y_pred):
        return keras.ops.abs(y - y_pred)


def refers_to_itself():
    model = dense()
    model.compile("sgd", lambda y, y_pred: keras.ops.mean((y - y_pred) ** 2) * len(model.layers))
    return model


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
    "a learning rate that is a function": (
        lambda: dense(optimizer=keras.optimizers.SGD(lambda: 0.1)),
        UsageError,
        "Make it a keras.optimizers.schedules.LearningRateSchedule",
        "Keras can't serialize it",
    ),
    "a loss, metric or layer that refers to the model by a global variable or a closure": (
        refers_to_itself,
        UsageError,
        "refers to the model itself",
        "workers would get a second copy",
    ),
    "a bound method as a loss or metric": (
        lambda: dense(metrics=[Meter().off]),
        UsageError,
        "which can't be sent to workers without a second copy of the object",
        "workers would get a second copy",
    ),
    "attributes that belong to one process (locks, files, connections)": (
        lambda: compiled(Locked()),
        UsageError,
        "Remove objects that belong to this process only",
        "they can't be pickled",
    ),
    "a `get_config` that fails": (
        lambda: compiled(Broken()),
        UsageError,
        "Add a get_config\\(\\)",
        "its config is needed to send it",
    ),
}
