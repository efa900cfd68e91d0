"""Ways to write a model, as users have them."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from catalogue import RECORDS, Given, case, compiled, dense, integers, normal


@case("Ways to write a model", "`Sequential`")
def sequential() -> Given:
    return Given(dense(), normal(6), normal(1))


@case("Ways to write a model", "`Sequential` without `Input`, built by the first batch")
def sequential_without_input() -> Given:
    return Given(compiled(keras.Sequential([layers.Dense(8, "tanh"), layers.Dense(1)])), normal(6), normal(1))


@case("Ways to write a model", "functional; several inputs and outputs as dicts, `loss_weights`, `weighted_metrics`")
def functional() -> Given:
    inputs = {"a": keras.Input((3,), name="a"), "b": keras.Input((2,), name="b")}
    hidden = layers.Dense(5, "tanh")(layers.Concatenate()([inputs["a"], inputs["b"]]))
    outputs = {"u": layers.Dense(1, name="u")(hidden), "v": layers.Dense(3, "softmax", name="v")(hidden)}
    model = keras.Model(inputs, outputs)
    model.compile(
        keras.optimizers.Adam(0.01),
        {"u": "mse", "v": "sparse_categorical_crossentropy"},
        loss_weights={"u": 0.3, "v": 2.0},
        metrics={"u": ["mae"]},
        weighted_metrics={"v": ["accuracy"], "u": ["mse"]},
    )
    weights = np.random.default_rng(1).uniform(0, 2, RECORDS).astype("float32")
    x, y = {"a": normal(3), "b": normal(2)}, {"u": normal(1), "v": integers(3)}
    return Given(model, x, y, {"u": weights, "v": weights**2})


class Plain(keras.Model):
    def __init__(self):
        super().__init__()
        self.hidden = layers.Dense(8, "tanh")
        self.norm = layers.BatchNormalization()
        self.out = layers.Dense(1)

    def call(self, x, training=False):
        return self.out(self.norm(self.hidden(x), training=training))


@case("Ways to write a model", "subclass of `Model` without `**kwargs` or `get_config`")
def subclass() -> Given:
    return Given(compiled(Plain()), normal(6), normal(1))


@case("Ways to write a model", "subclass of `Model(inputs, outputs)` with a custom `train_step`")
def functional_subclass() -> Given:
    class Regularized(keras.Model):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                y_pred = self(x, training=True)
                loss = self.compute_loss(x, y, y_pred) + 0.1 * ops.mean(y_pred**2)
            variables = self.trainable_variables
            self.optimizer.apply(tape.gradient(loss, variables), variables)
            for metric in self.metrics:
                if metric.name == "loss":
                    metric.update_state(loss)
                else:
                    metric.update_state(y, y_pred)
            return {metric.name: metric.result() for metric in self.metrics}

    inputs = keras.Input((6,))
    return Given(compiled(Regularized(inputs, layers.Dense(1)(layers.Dense(4)(inputs)))), normal(6), normal(1))
