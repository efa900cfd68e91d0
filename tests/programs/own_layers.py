"""Layers as users write them, that a process can't make again from their configs."""

from __future__ import annotations

import dataclasses
import enum
import functools
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from catalogue import Given, case, compiled, integers, normal

own = functools.partial(case, "Layers of your own", everywhere=True)
only_tensorflow = functools.partial(case, "Layers of your own")


def between(*parts: Any, size: int = 6) -> Given:
    """`parts` within a small model."""
    model = keras.Sequential([keras.Input((size,)), *parts, layers.Dense(1)])
    return Given(compiled(model), normal(size), normal(1))


@own("a `get_config` that forgets an argument")
def forgetful_config():
    class Scaled(layers.Layer):
        def __init__(self, factor=1.0, **kwargs):
            super().__init__(**kwargs)
            self.factor = factor

        def call(self, x):
            return x * self.factor

        def get_config(self):
            return super().get_config()

    return between(Scaled(3.0), layers.Dense(4, "tanh"))


@own("a `get_config` or `from_config` that fails")
def config_that_fails():
    class Broken(layers.Dense):
        def get_config(self):
            raise NotImplementedError("no config of this layer")

    class Forbidden(layers.Dense):
        @classmethod
        def from_config(cls, config):
            raise TypeError("make it yourself")

    return between(Broken(5, activation="tanh"), Forbidden(4, activation="relu"))


@own("random numbers that the constructor draws")
def random_projection():
    class Projection(layers.Layer):
        def __init__(self, units):
            super().__init__()
            self.matrix = np.random.normal(size=(6, units)).astype("float32")

        def call(self, x):
            return ops.cos(x @ self.matrix)

    return between(Projection(12))


@own("weight tying of an encoder and a decoder")
def tied_autoencoder():
    class Transposed(layers.Layer):
        def __init__(self, dense, **kwargs):
            super().__init__(**kwargs)
            self.dense = dense

        def build(self, shape):
            self.bias = self.add_weight((self.dense.kernel.shape[0],), "zeros", name="bias")

        def call(self, x):
            return ops.matmul(x, ops.transpose(self.dense.kernel)) + self.bias

    inputs, encoder = keras.Input((6,)), layers.Dense(3, "tanh")
    model = keras.Model(inputs, Transposed(encoder)(encoder(inputs)))
    return Given(compiled(model), normal(6), normal(6))


@own("a variable that one layer lends to another in `build`")
def lent_variable():
    class Inner(layers.Layer):
        def build(self, shape):
            self.kernel = self.add_weight((shape[-1], 4), "glorot_uniform", name="kernel")

        def call(self, x):
            return x @ self.kernel

    class Outer(layers.Layer):
        def __init__(self):
            super().__init__()
            self.inner = Inner()

        def build(self, shape):
            self.inner.build(shape)
            self.lent = self.inner.kernel

        def call(self, x):
            return ops.tanh(self.inner(x)) @ ops.transpose(self.lent)

    return between(Outer())


@own("layers that are made in `build`")
def made_in_build():
    class Gated(layers.Layer):
        def build(self, shape):
            self.value = layers.Dense(shape[-1], "tanh", name="value")
            self.gate = layers.Dense(shape[-1], "sigmoid", name="gate")
            self.value.build(shape)
            self.gate.build(shape)
            super().build(shape)

        def call(self, x):
            return self.value(x) * self.gate(x)

    return between(Gated(), Gated())


@own("layers and weights in nested lists, tuples and dicts")
def nested_containers():
    class Parts(layers.Layer):
        def __init__(self):
            super().__init__()
            self.towers = [[layers.Dense(4, "tanh"), layers.Dense(3)] for _ in range(2)]
            self.heads = {"a": (layers.Dense(2), 2.0), "b": (layers.Dense(2), 0.5)}

        def build(self, shape):
            self.scales = {name: self.add_weight((2,), "ones", name=f"scale_{name}") for name in self.heads}

        def call(self, x):
            for tower in self.towers:
                for layer in tower:
                    x = layer(x)
            return sum(factor * self.scales[name] * head(x) for name, (head, factor) in self.heads.items())

    return between(Parts())


class Widths(NamedTuple):
    hidden: int
    out: int


class Kind(enum.Enum):
    SUM = "sum"
    MEAN = "mean"


@dataclasses.dataclass
class Settings:
    widths: Widths
    kind: Kind = Kind.SUM
    rates: dict[str, float] = dataclasses.field(default_factory=lambda: {"skip": 0.1})


@own("settings in a dataclass, a named tuple and an enum")
def settings_in_a_dataclass():
    class Configured(keras.Model):
        def __init__(self, settings):
            super().__init__()
            self.settings = settings
            self.hidden = layers.Dense(settings.widths.hidden, "tanh")
            self.out = layers.Dense(settings.widths.out)

        def call(self, x):
            reduce = ops.sum if self.settings.kind is Kind.SUM else ops.mean
            skip = self.settings.rates["skip"] * reduce(x, -1, keepdims=True)
            return reduce(self.out(self.hidden(x)), -1, keepdims=True) + skip

    model = Configured(Settings(Widths(7, 4)))
    model.settings.kind = Kind.MEAN
    model.settings.rates["skip"] = 0.7
    return Given(compiled(model), normal(6), normal(1))


@own("`Lambda` and activations of library functions, partials, lambdas and closures")
def lambdas_and_partials():
    def times(factor):
        return lambda x: ops.tanh(factor * x)

    half = 0.5
    return between(
        layers.Lambda(lambda x: x * half + np.pi),
        layers.Lambda(ops.tanh),
        layers.Lambda(functools.partial(ops.clip, x_min=-0.5, x_max=0.4)),
        layers.Lambda(ops.multiply, arguments={"x2": 2.0}),
        layers.Dense(4, activation=functools.partial(keras.activations.leaky_relu, negative_slope=0.3)),
        layers.Dense(4, activation=times(0.3)),
        layers.Dense(4, activation=keras.ops.softsign),
    )


@only_tensorflow("`Lambda` of functions of TensorFlow")
def lambdas_of_tensorflow():
    return between(
        layers.Lambda(tf.math.l2_normalize, arguments={"axis": 1}),
        layers.Lambda(tf.nn.swish),
        layers.Lambda(lambda x: tf.concat([x, tf.math.cumsum(x, axis=1)], axis=1)),
    )


@own("a layer as an activation; regularizers, initializers and constraints without `get_config`")
def objects_without_config():
    class Leaky:
        def __init__(self, slope):
            self.slope = slope

        def __call__(self, x):
            return ops.maximum(x, self.slope * x)

    class Near(keras.regularizers.Regularizer):
        def __init__(self, center):
            self.center = center

        def __call__(self, w):
            return 0.1 * ops.sum((w - self.center) ** 2)

    class Grid(keras.initializers.Initializer):
        def __init__(self, low, high):
            self.ends = low, high

        def __call__(self, shape, dtype=None):
            return ops.reshape(ops.linspace(*self.ends, int(np.prod(shape)), dtype=dtype), shape)

    class Box(keras.constraints.Constraint):
        def __init__(self, size):
            self.size = size

        def __call__(self, w):
            return ops.clip(w, -self.size, self.size)

    return between(
        layers.Dense(4, Leaky(0.2), kernel_regularizer=Near(0.3), kernel_initializer=Grid(-1, 1)),
        layers.Dense(4, layers.PReLU(), kernel_constraint=Box(0.25)),
    )


@only_tensorflow("a `tf.Variable` and a `tf.function` as attributes")
def attributes_of_tensorflow():
    class Tempered(layers.Layer):
        def __init__(self):
            super().__init__()
            self.temperature = tf.Variable(0.5, trainable=False)
            self.squash = tf.function(self._squash)
            self.shift = tf.constant([0.1, 0.2, 0.3, 0.4, 0.5, 0.6])

        def _squash(self, x):
            if tf.reduce_sum(x) > 0.0:
                return tf.tanh(x)
            return tf.sin(x)

        def call(self, x):
            return self.squash(x / self.temperature) + self.shift

    layer = Tempered()
    layer.temperature.assign(2.0)
    return between(layer)


@own("wrappers: `SpectralNormalization`, and one of your own without `get_config`")
def wrappers():
    class Residual(layers.Wrapper):
        def __init__(self, layer, scale):
            super().__init__(layer)
            self.scale = scale

        def call(self, x):
            return x + self.scale * self.layer(x)

    return between(Residual(layers.Dense(6, "tanh"), 0.3), layers.SpectralNormalization(layers.Dense(4)))


@own("a layer with an `adapt` of its own")
def own_adapt():
    class Quantiles(layers.Layer):
        edges = None

        def adapt(self, data, bins=4):
            self.edges = np.quantile(data, np.linspace(0, 1, bins + 1)[1:-1]).astype("float32")

        def call(self, x):
            return ops.cast(ops.greater(ops.expand_dims(x, -1), self.edges), "float32")

    layer = Quantiles()
    layer.adapt(normal(6))
    return between(layer, layers.Flatten())


def make_attention(heads):
    class Attention(layers.Layer):
        def __init__(self, units):
            super().__init__()
            self.parts = {name: layers.Dense(units * heads, use_bias=False) for name in ("query", "key", "value")}

        def call(self, x):
            shape = (-1, x.shape[1], heads, self.parts["query"].units // heads)
            query, key, value = (ops.reshape(self.parts[name](x), shape) for name in ("query", "key", "value"))
            scores = ops.softmax(ops.einsum("bqhd,bkhd->bhqk", query, key) / shape[-1] ** 0.5)
            return ops.reshape(ops.einsum("bhqk,bkhd->bqhd", scores, value), (-1, x.shape[1], heads * shape[-1]))

    return Attention


@own("classes that a function makes, with closures over its arguments")
def classes_of_a_function():
    inputs = keras.Input((4, 3))
    x = make_attention(1)(2)(make_attention(2)(4)(inputs))
    return Given(compiled(keras.Model(inputs, layers.Dense(1)(layers.Flatten()(x)))), normal(4, 3), normal(1))


@own("one layer in two nested models")
def shared_between_models():
    inputs, shared = keras.Input((6,)), layers.Dense(6, "tanh")
    inner = keras.Model(inputs, shared(inputs), name="inner")
    outputs = layers.Dense(1)(shared(inner(inputs)) + inner(shared(inputs)))
    return Given(compiled(keras.Model(inputs, outputs)), normal(6), normal(1))


@own("LoRA: `enable_lora` after the layer was built")
def low_rank():
    model = keras.Sequential([keras.Input((6,)), layers.Dense(8, "tanh"), layers.Dense(1)])
    model.layers[0].enable_lora(2)
    return Given(compiled(model), normal(6), normal(1))


@own("adapted `Normalization` and `Rescaling`")
def normalized():
    class Inside(layers.Layer):
        def __init__(self):
            super().__init__()
            self.normalize = layers.Normalization()
            self.normalize.adapt(5 * normal(6) + 2)

        def call(self, x):
            return ops.tanh(self.normalize(x))

    layer = layers.Normalization(invert=True)
    layer.adapt(3 * normal(6))
    return between(Inside(), layer, layers.Rescaling(0.5, offset=-0.1))


@only_tensorflow("`TextVectorization` with tf-idf, `StringLookup`, `IntegerLookup`, `Hashing`, `Discretization`")
def lookups():
    words = np.array(["to be or not", "be", "that is it", "the question is", "or", "to be"])[integers(6)]
    kinds, numbers, codes = np.array(["a", "b", "c", "d"])[integers(4)], normal(1), integers(5, 1) * 7
    vectorize, integer = layers.TextVectorization(output_mode="tf_idf"), layers.IntegerLookup(output_mode="one_hot")
    cut, look_up = layers.Discretization(num_bins=3, output_mode="one_hot"), layers.StringLookup(num_oov_indices=2)
    for layer, data in ((vectorize, words), (integer, codes), (cut, numbers), (look_up, kinds[:20])):
        layer.adapt(data)
    inputs = {
        "words": keras.Input((), dtype="string", name="words"),
        "kinds": keras.Input((1,), dtype="string", name="kinds"),
        "numbers": keras.Input((1,), name="numbers"),
        "codes": keras.Input((1,), dtype="int32", name="codes"),
    }
    embedded = layers.Embedding(look_up.vocabulary_size(), 3)(look_up(inputs["kinds"]))
    hashed = layers.Hashing(5, salt=3, output_mode="one_hot")(inputs["kinds"])
    parts = [vectorize(inputs["words"]), layers.Flatten()(embedded), hashed, cut(inputs["numbers"])]
    outputs = layers.Dense(1)(layers.Concatenate()([*parts, integer(inputs["codes"])]))
    x = {"words": tf.constant(words), "kinds": tf.constant(kinds[:, None]), "numbers": numbers, "codes": codes}
    return Given(compiled(keras.Model(inputs, outputs), optimizer="sgd"), x, normal(1))


@only_tensorflow("`FeatureSpace` inside a model")
def feature_space():
    features = {
        "age": keras.utils.FeatureSpace.float_normalized(),
        "kind": keras.utils.FeatureSpace.string_categorical(num_oov_indices=1),
        "code": keras.utils.FeatureSpace.integer_categorical(num_oov_indices=1),
    }
    crosses = [keras.utils.FeatureSpace.cross(("kind", "code"), crossing_dim=8)]
    space = keras.utils.FeatureSpace(features, crosses=crosses, output_mode="concat")
    data = {
        "age": normal()[:, None] * 9,
        "kind": np.array(["a", "b", "c"])[integers(3)][:, None],
        "code": integers(4, 1),
    }
    space.adapt(tf.data.Dataset.from_tensor_slices(data).batch(8))
    encoded = space.get_encoded_features()
    model = keras.Model(space.get_inputs(), layers.Dense(1)(layers.Dense(4, "tanh")(encoded)))
    return Given(compiled(model), {**data, "kind": tf.constant(data["kind"])}, normal(1))


@only_tensorflow("a lookup table of TensorFlow in a layer")
def static_hash_table():
    class Lookup(layers.Layer):
        def __init__(self, words):
            super().__init__()
            pairs = tf.lookup.KeyValueTensorInitializer(words, list(range(1, len(words) + 1)))
            self.table = tf.lookup.StaticHashTable(pairs, 0)

        def call(self, words):
            return self.table.lookup(words)

        def compute_output_spec(self, words):
            return keras.KerasTensor(words.shape, "int32")

    inputs = keras.Input((2,), dtype="string")
    x = layers.Flatten()(layers.Embedding(4, 3)(Lookup(["a", "b", "c"])(inputs)))
    data = tf.constant(np.array(["a", "b", "c", "?"])[integers(4, 2)])
    return Given(compiled(keras.Model(inputs, layers.Dense(1)(x)), optimizer="sgd"), data, normal(1))
