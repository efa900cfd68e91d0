"""A catalogue of small Keras models, as users write them; `test_matrix.py` trains each of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

RECORDS, BATCH = 32, 8


@dataclass
class Given:
    """What `fit` is called with."""

    model: keras.Model
    x: Any
    y: Any = None
    sample_weight: Any = None
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """One line of the table in docs/keras_support.md.

    Attributes:
        make: a new model, the same at each call, and its data.
        tolerance: how far weights and logs may be from those of `fit`, relative to the largest.
    """

    group: str
    what: str
    make: Callable[[], Given]
    tolerance: float


CASES: dict[str, Case] = {}


def case(group: str, what: str, tolerance: float = 1e-5) -> Callable[[Callable[[], Given]], Callable[[], Given]]:
    def add(make: Callable[[], Given]) -> Callable[[], Given]:
        @functools.wraps(make)
        def seeded() -> Given:
            keras.utils.clear_session(free_memory=False)
            keras.utils.set_random_seed(3)
            return make()

        CASES[make.__name__] = Case(group, what, seeded, tolerance)
        return seeded

    return add


def normal(*shape: int, seed: int = 5) -> Any:
    return np.random.default_rng([seed, *shape]).normal(size=(RECORDS, *shape)).astype("float32")


def integers(high: int, *shape: int, low: int = 0) -> Any:
    return np.random.default_rng([high, *shape]).integers(low, high, (RECORDS, *shape)).astype("int32")


def dense(*, dtype: Any = None, units: int = 1, **options: Any) -> keras.Model:
    model = keras.Sequential(
        [keras.Input((6,)), layers.Dense(8, "tanh", dtype=dtype), layers.Dense(units, dtype=dtype)]
    )
    model.compile(**{"optimizer": keras.optimizers.Adam(0.01), "loss": "mse", "metrics": ["mae"], **options})
    return model


def compiled(model: keras.Model, **options: Any) -> keras.Model:
    model.compile(**{"optimizer": keras.optimizers.Adam(0.01), "loss": "mse", "metrics": ["mae"], **options})
    return model


# ---------------------------------------------------------------- how models are written


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


@case("Ways to write a model", "functional; lists of inputs and outputs")
def functional_lists() -> Given:
    inputs = [keras.Input((3,)), keras.Input((2,))]
    hidden = layers.Dense(5, "tanh")(layers.Concatenate()(inputs))
    model = keras.Model(inputs, [layers.Dense(1)(hidden), layers.Dense(2)(hidden)])
    model.compile("rmsprop", ["mse", "mae"], loss_weights=[1.0, 0.5], metrics=[["mae"], ["mse"]])
    return Given(model, [normal(3), normal(2)], [normal(1), normal(2)])


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


@case("Ways to write a model", "subclass of `Model` with `get_config`")
def subclass_with_config() -> Given:
    class Configured(Plain):
        def __init__(self, factor, **kwargs):
            super().__init__()
            self.factor = factor

        def call(self, x, training=False):
            return self.factor * super().call(x, training)

        def get_config(self):
            return {"factor": self.factor}

    return Given(compiled(Configured(2.5)), normal(6), normal(1))


class Pair(keras.Model):
    """Takes its parts, as the examples of keras.io do."""

    def __init__(self, encoder, decoder, scale=1.0):
        super().__init__()
        self.encoder, self.decoder = encoder, decoder
        self.scale = scale

    def call(self, x):
        return self.scale * self.decoder(self.encoder(x))


@case("Ways to write a model", "subclass of `Model` that is given other models, without `get_config`")
def subclass_of_models() -> Given:
    encoder = keras.Sequential([keras.Input((6,)), layers.Dense(3, "tanh")])
    inputs = keras.Input((3,))
    decoder = keras.Model(inputs, layers.Dense(6)(inputs))
    x = normal(6)
    return Given(compiled(Pair(encoder, decoder, scale=0.7)), x, x)


@case("Ways to write a model", "subclass with attributes that are set, lists and dicts of layers")
def subclass_with_attributes() -> Given:
    class Blocks(keras.Model):
        def __init__(self, *units):
            super().__init__()
            self.blocks = [layers.Dense(size, "tanh") for size in units]
            self.heads = {"out": layers.Dense(1)}
            self.factor = 1.0

        def call(self, x):
            for block in self.blocks:
                x = block(x)
            return self.factor * self.heads["out"](x)

    model = Blocks(5, 4)
    model.factor = 0.3
    return Given(compiled(model), normal(6), normal(1))


@case("Ways to write a model", "subclass of `Model(inputs, outputs)` with a `train_step` of its own")
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


@case("Ways to write a model", "models within models, weights that are shared")
def nested() -> Given:
    shared = keras.Sequential([keras.Input((3,)), layers.Dense(4, "tanh"), layers.Dense(3)], name="shared")
    a, b = keras.Input((3,)), keras.Input((3,))
    inner = keras.Model([a, b], layers.Subtract()([shared(a), shared(b)]))
    model = keras.Model([a, b], layers.Dense(1)(layers.Concatenate()([inner([a, b]), shared(shared(a))])))
    return Given(compiled(model), [normal(3), normal(3, seed=6)], normal(1))


# ---------------------------------------------------------------- layers


def make_scale(power: int) -> type[layers.Layer]:
    """A class for each power, all of one name."""

    class Scale(layers.Layer):
        def build(self, shape):
            self.scale = self.add_weight((shape[-1],), "ones")

        def call(self, x):
            return x * self.scale**power

    return Scale


@case("Layers", "classes that are local, of the same name, with a closure; layers without `**kwargs`")
def local_layers() -> Given:
    class Shift(layers.Layer):
        def __init__(self, by):
            super().__init__()
            self.by = by

        def call(self, x):
            return x + self.by

    model = keras.Sequential([keras.Input((6,)), make_scale(1)(), Shift(0.5), make_scale(2)(), layers.Dense(1)])
    return Given(compiled(model), normal(6), normal(1))


@case("Layers", "`Lambda`, activations, initializers and regularizers that are functions, lambdas or closures")
def functions_in_layers() -> Given:
    def times(factor):
        def scaled(x):
            return ops.tanh(factor * x)

        return scaled

    def start(shape, dtype=None):
        return ops.full(shape, 0.1, dtype)

    class Squares(keras.regularizers.Regularizer):
        def __call__(self, x):
            return 0.01 * ops.sum(x**2)

    half = 0.5
    model = keras.Sequential(
        [
            keras.Input((6,)),
            layers.Lambda(lambda x: x * half + np.pi),
            layers.Dense(4, activation=times(0.3), kernel_initializer=start, kernel_regularizer=Squares()),
            layers.Dense(4, activation=times(3.0), bias_initializer=start),
            layers.Dense(4, activation=lambda x: ops.relu(x) + half * x),
            layers.Dense(1),
        ]
    )
    return Given(compiled(model), normal(6), normal(1))


@case("Layers", "`Conv2D`, `BatchNormalization` (a small ResNet)", tolerance=1e-4)
def resnet() -> Given:
    inputs = keras.Input((6, 6, 1))
    x = layers.BatchNormalization(momentum=0.9)(layers.Conv2D(3, 3, padding="same")(inputs))
    y = layers.BatchNormalization(momentum=0.9)(layers.Conv2D(3, 3, padding="same")(layers.ReLU()(x)))
    x = layers.GlobalAveragePooling2D()(layers.Add()([x, y]))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    # Not Adam, which makes steps of gradients that are zero but for rounding (of biases before a normalization).
    model = compiled(keras.Model(inputs, layers.Dense(3)(x)), optimizer="sgd", loss=loss, metrics=["accuracy"])
    return Given(model, normal(6, 6, 1), integers(3))


@case("Layers", "`Embedding` with `mask_zero`, `LSTM` (gradients of rows)")
def masked_lstm() -> Given:
    # Each row once per batch: of embeddings, see docs/parameter_servers.md.
    x = np.stack([np.random.default_rng(i).permutation(BATCH * 5).reshape(BATCH, 5) + 1 for i in range(4)])
    x = x.reshape(RECORDS, 5) * (np.arange(5)[None] < integers(5, 1, low=1))
    model = keras.Sequential(
        [keras.Input((5,), dtype="int32"), layers.Embedding(BATCH * 5 + 1, 3, mask_zero=True), layers.LSTM(3)]
    )
    model.add(layers.Dense(1))
    return Given(compiled(model, optimizer=keras.optimizers.SGD(0.1)), x.astype("int32"), normal(1))


@case("Layers", "`Bidirectional`, `TimeDistributed`, recurrent dropout off")
def wrapped_layers() -> Given:
    model = keras.Sequential(
        [
            keras.Input((4, 2)),
            layers.Bidirectional(layers.GRU(2, return_sequences=True)),
            layers.TimeDistributed(layers.Dense(2)),
            layers.Flatten(),
            layers.Dense(1),
        ]
    )
    return Given(compiled(model), normal(4, 2), normal(1))


@case("Layers", "stateful RNN (its state goes on from batch to batch on its worker; each call begins with a fresh one)")
def stateful_rnn() -> Given:
    model = keras.Sequential([keras.Input((4, 2), batch_size=BATCH), layers.GRU(3, stateful=True), layers.Dense(1)])
    return Given(compiled(model), normal(4, 2), normal(1))


@case("Layers", "`MultiHeadAttention`, `LayerNormalization`")
def attention() -> Given:
    inputs = keras.Input((4, 4))
    x = layers.LayerNormalization()(inputs + layers.MultiHeadAttention(2, 2)(inputs, inputs))
    model = compiled(keras.Model(inputs, layers.Dense(1)(layers.Flatten()(x))), optimizer="sgd")
    return Given(model, normal(4, 4), normal(1))


@case("Layers", "`Dropout` with a seed (first `fit`, one worker)")
def dropout() -> Given:
    model = keras.Sequential([keras.Input((6,)), layers.Dense(16), layers.Dropout(0.4, seed=7), layers.Dense(1)])
    return Given(compiled(model), normal(6), normal(1))


@case("Layers", "`Normalization`, `StringLookup`, `TextVectorization`, adapted")
def preprocessing() -> Given:
    text = np.array(["to be or not", "be", "that is", "the question is"] * (RECORDS // 4))
    kind = np.array((["a", "b", "c"] * RECORDS)[:RECORDS])
    numbers = normal(2) * 5
    vectorize, look_up = layers.TextVectorization(output_mode="multi_hot"), layers.StringLookup(output_mode="one_hot")
    normalize = layers.Normalization()
    for layer, data in ((vectorize, text), (look_up, kind), (normalize, numbers)):
        layer.adapt(data)
    inputs = {
        "text": keras.Input((), dtype="string", name="text"),
        "kind": keras.Input((), dtype="string", name="kind"),
        "n": keras.Input((2,), name="n"),
    }
    parts = [vectorize(inputs["text"]), look_up(inputs["kind"]), normalize(inputs["n"])]
    model = compiled(keras.Model(inputs, layers.Dense(1)(layers.Concatenate()(parts))))
    return Given(model, {"text": tf.constant(text), "kind": tf.constant(kind), "n": numbers}, normal(1))


@case("Layers", "ragged inputs")
def ragged() -> Given:
    class Words(keras.Model):
        def __init__(self):
            super().__init__()
            self.look_up = layers.StringLookup(vocabulary=["a", "b"], output_mode="multi_hot")
            self.out = layers.Dense(1)

        def call(self, words):
            return self.out(self.look_up(words.to_tensor("")))

    words = tf.ragged.constant([["a", "b"], ["b"], ["c", "a", "a"], ["b"]] * (RECORDS // 4))
    return Given(compiled(Words()), tf.data.Dataset.from_tensor_slices((words, normal(1))).batch(BATCH))


@case("Layers", "sparse inputs (gradients of rows: see [parameter_servers.md](parameter_servers.md#gradients-of-rows))")
def sparse() -> Given:
    model = keras.Sequential([keras.Input((6,), sparse=True), layers.Dense(4), layers.Dense(1)])
    x = normal(6) * (integers(3, 6) == 0)
    return Given(compiled(model, optimizer="sgd"), tf.sparse.from_dense(x), normal(1))


@case("Layers", "frozen layers and variables, also set after they were made")
def frozen() -> Given:
    model = Plain()
    model(np.zeros((1, 6), "float32"))
    model.hidden.trainable = False
    model.out.bias.trainable = False
    return Given(compiled(model), normal(6), normal(1))


@case("Layers", "weights that no gradient reaches, weights that are not trainable (also integers and booleans)")
def counters() -> Given:
    class Gate(layers.Layer):
        def build(self, shape):
            self.scale = self.add_weight((shape[-1],), "ones")
            self.unused = self.add_weight((2,), "ones")
            self.seen = self.add_weight((), "zeros", dtype="int32", trainable=False, name="seen")
            self.any = self.add_weight((), "zeros", dtype="bool", trainable=False, name="any")

        def call(self, x, training=False):
            if training:
                self.seen.assign_add(ops.shape(x)[0])
                self.any.assign(ops.any(x > 0))
            return x * self.scale

    return Given(compiled(keras.Sequential([keras.Input((6,)), Gate(), layers.Dense(1)])), normal(6), normal(1))
