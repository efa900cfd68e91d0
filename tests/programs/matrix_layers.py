"""The catalogue's models whose point is their layers, and what these are given."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from catalogue import BATCH, RECORDS, Given, case, compiled, integers, normal
from matrix_models import Plain


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


@case("Layers", "stateful RNN (each call starts with a fresh state)")
def stateful_rnn() -> Given:
    model = keras.Sequential([keras.Input((4, 2), batch_size=BATCH), layers.GRU(3, stateful=True), layers.Dense(1)])
    return Given(compiled(model), normal(4, 2), normal(1))


@case("Layers", "`Dropout` with a seed (first `fit`, one worker)")
def dropout() -> Given:
    model = keras.Sequential([keras.Input((6,)), layers.Dense(16), layers.Dropout(0.4, seed=7), layers.Dense(1)])
    return Given(compiled(model), normal(6), normal(1))


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


@case("Layers", "frozen layers and variables, also if frozen after creation")
def frozen() -> Given:
    model = Plain()
    model(np.zeros((1, 6), "float32"))
    model.hidden.trainable = False
    model.out.bias.trainable = False
    return Given(compiled(model), normal(6), normal(1))


@case("Layers", "weights without a gradient, non-trainable weights (also integers and booleans)")
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
