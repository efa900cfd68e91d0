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


def fields() -> dict[str, np.ndarray]:
    return {name: ids(size) for name, size in FIELDS.items()}


def click_model(model: keras.Model) -> Given:
    model = compiled(model, loss="binary_crossentropy", metrics=["AUC"], optimizer=keras.optimizers.Adam(0.02))
    return Given(model, fields(), clicks())


def field_inputs() -> dict[str, keras.KerasTensor]:
    return {name: keras.Input((), dtype="int32", name=name) for name in FIELDS}


@recommender("DeepFM")
def deep_fm():
    class Interaction(layers.Layer):
        def call(self, x):
            return 0.5 * ops.sum(ops.sum(x, 1) ** 2 - ops.sum(x**2, 1), -1, keepdims=True)

    inputs = field_inputs()
    linear = layers.Add()([layers.Embedding(FIELDS[name], 1)(each) for name, each in inputs.items()])
    latent = [layers.Embedding(FIELDS[name], 4)(each) for name, each in inputs.items()]
    stacked = ops.stack(latent, axis=1)
    deep = layers.Dense(1)(layers.Dense(8, "relu")(layers.Flatten()(stacked)))
    return click_model(keras.Model(inputs, ops.sigmoid(linear + Interaction()(stacked) + deep)))


@recommender("DCN with low-rank crosses")
def cross_network():
    class Cross(layers.Layer):
        def __init__(self, rank):
            super().__init__()
            self.rank = rank

        def build(self, shape):
            size = shape[0][-1]
            self.down = self.add_weight((size, self.rank), "glorot_uniform", name="down")
            self.up = layers.Dense(size)
            self.up.build((None, self.rank))

        def call(self, inputs):
            first, x = inputs
            return first * self.up(x @ self.down) + x

    inputs = field_inputs()
    first = x = layers.Concatenate()([layers.Embedding(FIELDS[name], 3)(each) for name, each in inputs.items()])
    for rank in (2, 3):
        x = Cross(rank)([first, x])
    return click_model(keras.Model(inputs, layers.Dense(1, "sigmoid")(x)))


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


@recommender("ESMM: one output is the product of two")
def entire_space():
    inputs = field_inputs()
    x = layers.Concatenate()([layers.Embedding(FIELDS[name], 3)(each) for name, each in inputs.items()])
    click, order = (layers.Dense(1, "sigmoid", name=name)(layers.Dense(4, "tanh")(x)) for name in ("ctr", "cvr"))
    model = keras.Model(inputs, {"ctr": click, "ctcvr": layers.Multiply()([click, order])})
    model.compile("adam", {"ctr": "binary_crossentropy", "ctcvr": "binary_crossentropy"}, metrics={"ctr": "AUC"})
    y = {"ctr": clicks(), "ctcvr": clicks() * integers(2, 1, low=0)}
    return Given(model, fields(), y)


@recommender("matrix factorization with biases, as a subclass that slices one array of ids")
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


@recommender("AutoInt: attention over fields")
def field_attention():
    inputs = field_inputs()
    x = ops.stack([layers.Embedding(FIELDS[name], 4)(each) for name, each in inputs.items()], 1)
    for _ in range(2):
        x = layers.ReLU()(layers.MultiHeadAttention(2, 2)(x, x) + layers.Dense(4, use_bias=False)(x))
    model = keras.Model(inputs, layers.Dense(1, "sigmoid")(layers.Flatten()(x)))
    return Given(compiled(model, loss="binary_crossentropy", optimizer="sgd"), fields(), clicks())


@recommender("gated residual and variable selection networks")
def variable_selection():
    class Gated(layers.Layer):
        def __init__(self, units):
            super().__init__()
            self.elu, self.linear = layers.Dense(units, "elu"), layers.Dense(units)
            self.gate, self.norm = layers.Dense(units, "sigmoid"), layers.LayerNormalization()
            self.units = units

        def build(self, shape):
            self.project = layers.Dense(self.units) if shape[-1] != self.units else None
            super().build(shape)

        def call(self, x):
            inner = self.linear(self.elu(x))
            return self.norm((x if self.project is None else self.project(x)) + inner * self.gate(inner))

    class Selection(layers.Layer):
        def __init__(self, count, units):
            super().__init__()
            self.parts = [Gated(units) for _ in range(count)]
            self.weighting, self.softmax = Gated(count), layers.Dense(count, "softmax")

        def call(self, inputs):
            weights = self.softmax(self.weighting(ops.concatenate(inputs, -1)))[..., None]
            return ops.sum(weights * ops.stack([part(x) for part, x in zip(self.parts, inputs, strict=True)], 1), 1)

    inputs = {"a": keras.Input((2,), name="a"), "b": keras.Input((3,), name="b")}
    model = keras.Model(inputs, layers.Dense(1, "sigmoid")(Selection(2, 4)(list(inputs.values()))))
    return Given(
        compiled(model, loss="binary_crossentropy", optimizer="sgd"), {"a": normal(2), "b": normal(3)}, clicks()
    )


@recommender("neural decision trees over a random choice of features")
def decision_forest():
    class Tree(keras.Model):
        def __init__(self, depth, features, used, classes):
            super().__init__()
            self.depth, self.leaves = depth, 2**depth
            chosen = np.random.choice(features, int(features * used), replace=False)
            self.mask = np.eye(features, dtype="float32")[chosen]
            self.decide = layers.Dense(self.leaves, "sigmoid")
            self.pi = self.add_weight((self.leaves, classes), "random_normal", name="pi")

        def call(self, x):
            right = self.decide(ops.matmul(x, self.mask.T))[..., None]
            decisions, mu, first = ops.concatenate([right, 1 - right], 2), None, 1
            for level in range(self.depth):
                here = ops.reshape(decisions[:, first : first + 2**level], (-1, 2 ** (level + 1)))
                mu = here if mu is None else ops.repeat(mu, 2, axis=1) * here
                first += 2**level
            return ops.matmul(mu, ops.softmax(self.pi))

    class Forest(keras.Model):
        def __init__(self, trees):
            super().__init__()
            self.ensemble = [Tree(2, 6, 0.7, 3) for _ in range(trees)]

        def call(self, x):
            return sum(tree(x) for tree in self.ensemble) / len(self.ensemble)

    loss = keras.losses.SparseCategoricalCrossentropy()
    return Given(compiled(Forest(3), loss=loss, metrics=["sparse_categorical_accuracy"]), normal(6), integers(3))


@case("Recommenders and tabular models", "SASRec: a causal transformer whose logits use the table of items")
def sequential_recommender():
    class Recommender(keras.Model):
        def __init__(self, items, length, size):
            super().__init__()
            self.items = layers.Embedding(items + 1, size)
            self.places = self.add_weight((length, size), "uniform", name="places")
            self.norms = [layers.LayerNormalization() for _ in range(2)]
            self.attention = layers.MultiHeadAttention(2, size // 2)
            self.forward = keras.Sequential([layers.Dense(2 * size, "gelu"), layers.Dense(size)])

        def call(self, inputs, training=False):
            mask = ops.cast(ops.not_equal(inputs, 0), "float32")[..., None]
            x = (self.items(inputs) + self.places) * mask
            norm = self.norms[0](x)
            x = x + self.attention(norm, x, use_causal_mask=True, training=training)
            x = (x + self.forward(self.norms[1](x))) * mask
            return ops.matmul(x, ops.transpose(self.items.embeddings))

    x = integers(12, 6)
    y = np.roll(x, -1, 1)
    model = compiled(
        Recommender(11, 6, 4),
        optimizer="sgd",
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=0),
        metrics=["sparse_categorical_accuracy"],
    )
    return Given(model, x, y, (y != 0).astype("float32"))


@case("Recommenders and tabular models", "a transformer over categorical columns, with numeric ones (TabTransformer)")
def tab_transformer():
    inputs = {**field_inputs(), "numbers": keras.Input((3,), name="numbers")}
    x = ops.stack([layers.Embedding(FIELDS[name], 4)(inputs[name]) for name in FIELDS], 1)
    x = x + layers.Embedding(3, 4, name="columns")(ops.arange(3))
    for _ in range(2):
        attended = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 2)(x, x))
        x = layers.LayerNormalization()(attended + layers.Dense(4)(layers.Dense(8, keras.activations.gelu)(attended)))
    both = layers.Concatenate()([layers.Flatten()(x), layers.LayerNormalization()(inputs["numbers"])])
    model = keras.Model(inputs, layers.Dense(1, "sigmoid")(layers.Dense(4, "selu")(both)))
    model = compiled(model, loss="binary_crossentropy", optimizer="sgd", metrics=["AUC"])
    return Given(model, {**fields(), "numbers": normal(3)}, clicks())
