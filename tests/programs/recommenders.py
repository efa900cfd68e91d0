"""Recommenders and models of tables, in the style of DeepCTR, keras-rs and Kaggle."""

from __future__ import annotations

import functools

import keras
import numpy as np
from keras import layers, ops

from catalogue import BATCH, RECORDS, Given, case, compiled, integers, normal

recommender = functools.partial(case, "Recommenders and tabular models", everywhere=True)

# Each id once in a batch: a row that a batch uses twice is another matter (docs/parameter_servers.md).
FIELDS = {"user": 16, "item": 24, "city": 8}


def ids(size: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng([size, seed])
    return np.concatenate([rng.permutation(size)[:BATCH] for _ in range(RECORDS // BATCH)]).astype("int32")


def clicks() -> np.ndarray:
    return integers(2, 1).astype("float32")


@recommender("DeepFM")
def deep_fm():
    class Interaction(layers.Layer):
        def call(self, x):
            return 0.5 * ops.sum(ops.sum(x, 1) ** 2 - ops.sum(x**2, 1), -1, keepdims=True)

    inputs = {name: keras.Input((), dtype="int32", name=name) for name in FIELDS}
    linear = layers.Add()([layers.Embedding(FIELDS[name], 1)(each) for name, each in inputs.items()])
    latent = [layers.Embedding(FIELDS[name], 4)(each) for name, each in inputs.items()]
    stacked = ops.stack(latent, axis=1)
    deep = layers.Dense(1)(layers.Dense(8, "relu")(layers.Flatten()(stacked)))
    model = keras.Model(inputs, ops.sigmoid(linear + Interaction()(stacked) + deep))
    model = compiled(model, loss="binary_crossentropy", metrics=["AUC"], optimizer=keras.optimizers.Adam(0.02))
    return Given(model, {name: ids(size) for name, size in FIELDS.items()}, clicks())


@recommender("DIN: attention over a history with a mask")
def interest_network():
    class Interest(keras.Model):
        def __init__(self):
            super().__init__()
            self.items = layers.Embedding(64, 4, mask_zero=True)
            self.attention = keras.Sequential([layers.Dense(6, "sigmoid"), layers.Dense(1)])
            self.out = layers.Dense(1, "sigmoid")

        def call(self, inputs):
            history, candidate = self.items(inputs["history"]), self.items(inputs["candidate"])[:, None]
            both = ops.broadcast_to(candidate, ops.shape(history))
            scores = self.attention(ops.concatenate([history, both, history * both, history - both], -1))
            seen = ops.cast(self.items.compute_mask(inputs["history"]), scores.dtype)[..., None]
            pooled = ops.sum(ops.softmax(scores - 1e9 * (1 - seen), 1) * history, 1)
            return self.out(ops.concatenate([pooled, candidate[:, 0]], -1))

    history = np.stack([np.random.default_rng(i).permutation(40)[: BATCH * 4].reshape(BATCH, 4) for i in range(4)])
    history = (history.reshape(RECORDS, 4) + 1) * (np.arange(4) < integers(5, 1, low=1))
    x = {"history": history.astype("int32"), "candidate": ids(20) + 42}
    model = compiled(Interest(), optimizer="sgd", loss="binary_crossentropy", metrics=["accuracy"])
    return Given(model, x, clicks())


@recommender("two towers with in-batch softmax, by `compute_loss`")
def two_towers():
    class Towers(keras.Model):
        def __init__(self, temperature=0.5):
            super().__init__()
            self.query = keras.Sequential([layers.Embedding(16, 4), layers.Dense(3)])
            self.candidate = keras.Sequential([layers.Embedding(24, 4), layers.Dense(3)])
            self.temperature = temperature

        def call(self, inputs):
            return self.query(inputs["user"]), self.candidate(inputs["item"])

        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            query, candidate = y_pred
            logits = ops.matmul(query, ops.transpose(candidate)) / self.temperature
            labels = ops.arange(ops.shape(logits)[0])
            return ops.mean(keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True))

    model = Towers()
    model.compile(keras.optimizers.SGD(0.1))  # gradients of biases are zero but for rounding
    return Given(model, {name: ids(FIELDS[name]) for name in ("user", "item")})


@recommender("MMoE with a loss and a metric per task")
def mixture_of_experts():
    class Mixture(layers.Layer):
        def __init__(self, experts, tasks):
            super().__init__()
            self.experts = [layers.Dense(4, "relu", name=f"expert_{i}") for i in range(experts)]
            self.gates = {task: layers.Dense(experts, "softmax", name=f"gate_{task}") for task in tasks}

        def call(self, x):
            outputs = ops.stack([expert(x) for expert in self.experts], 1)
            return {task: ops.sum(gate(x)[..., None] * outputs, 1) for task, gate in self.gates.items()}

    inputs = keras.Input((6,))
    mixed = Mixture(3, ("click", "time"))(inputs)
    model = keras.Model(
        inputs,
        {"click": layers.Dense(1, "sigmoid", name="click")(mixed["click"]), "time": layers.Dense(1)(mixed["time"])},
    )
    model.compile(
        keras.optimizers.Adam(0.02),
        {"click": "binary_crossentropy", "time": keras.losses.Huber(0.5)},
        metrics={"click": ["AUC"], "time": ["mae"]},
        loss_weights={"click": 1.0, "time": 0.3},
    )
    return Given(model, normal(6), {"click": clicks(), "time": normal(1)})


@recommender("matrix factorization with biases, as a subclass")
def factorization():
    class Factors(keras.Model):
        def __init__(self, users, items, size, **kwargs):
            super().__init__(**kwargs)
            options = {"embeddings_initializer": "he_normal", "embeddings_regularizer": keras.regularizers.l2(1e-3)}
            self.users, self.items = layers.Embedding(users, size, **options), layers.Embedding(items, size, **options)
            self.user_bias, self.item_bias = layers.Embedding(users, 1), layers.Embedding(items, 1)

        def call(self, x):
            user, item = x[:, 0], x[:, 1]
            dot = ops.sum(self.users(user) * self.items(item), -1, keepdims=True)
            return ops.sigmoid(dot + self.user_bias(user) + self.item_bias(item))

    x = np.stack([ids(16), ids(24)], 1)
    return Given(compiled(Factors(16, 24, 4), loss="binary_crossentropy"), x, np.random.default_rng(0).random((32, 1)))
