"""Text, time series and other sequences, in the style of keras.io."""

from __future__ import annotations

import functools

import keras
import numpy as np
from keras import layers, ops

from catalogue import BATCH, RECORDS, Given, case, compiled, integers, normal

sequence = functools.partial(case, "Text and time series", everywhere=True)


def rows(words: int, length: int) -> np.ndarray:
    """Ids of which no batch has one twice, from 1 on."""
    rng = np.random.default_rng(words)
    picked = [rng.permutation(words)[: BATCH * length].reshape(BATCH, length) for _ in range(RECORDS // BATCH)]
    return np.concatenate(picked).astype("int32") + 1


@case("Text and time series", "token and position embeddings with a mask, a transformer block")
def text_transformer():
    class Tokens(layers.Layer):
        def __init__(self, words, length, size):
            super().__init__()
            self.tokens, self.places = layers.Embedding(words, size, mask_zero=True), layers.Embedding(length, size)
            self.supports_masking = True

        def call(self, x):
            return self.tokens(x) + self.places(ops.arange(ops.shape(x)[-1]))

        def compute_mask(self, x, mask=None):
            return self.tokens.compute_mask(x)

    class Block(layers.Layer):
        def __init__(self, size, heads):
            super().__init__()
            self.attention = layers.MultiHeadAttention(heads, size // heads)
            self.forward = keras.Sequential([layers.Dense(2 * size, "relu"), layers.Dense(size)])
            self.first, self.second = layers.LayerNormalization(), layers.LayerNormalization()
            self.supports_masking = True

        def call(self, x, mask=None):
            allowed = None if mask is None else mask[:, None, :]
            x = self.first(x + self.attention(x, x, attention_mask=allowed))
            return self.second(x + self.forward(x))

    inputs = keras.Input((5,), dtype="int32")
    x = layers.GlobalAveragePooling1D()(Block(4, 2)(Tokens(60, 5, 4)(inputs)))
    model = keras.Model(inputs, layers.Dense(2, "softmax")(x))
    model = compiled(model, optimizer="sgd", loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    return Given(model, rows(50, 5) * (np.arange(5) < integers(6, 1, low=2)).astype("int32"), integers(2))


@sequence("a small GPT whose output layer shares the embedding")
def miniature_gpt():
    class Shared(layers.Layer):
        def __init__(self, table):
            super().__init__()
            self.table = table

        def call(self, x):
            return self.table(x, reverse=True)

    inputs, table = keras.Input((6,), dtype="int32"), layers.ReversibleEmbedding(14, 4)
    x = table(inputs)
    x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 2)(x, x, use_causal_mask=True))
    model = keras.Model(inputs, Shared(table)(x + layers.Dense(4, "gelu")(x)))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    x = integers(14, 6)
    return Given(compiled(model, optimizer="sgd", loss=loss, metrics=["accuracy"]), x, np.roll(x, -1, 1))


@sequence("an encoder and a decoder (seq2seq), with teacher forcing")
def seq2seq():
    source, target = keras.Input((None, 4), name="source"), keras.Input((None, 3), name="target")
    _, hidden, cell = layers.LSTM(5, return_state=True)(source)
    decoded, *_ = layers.LSTM(5, return_sequences=True, return_state=True)(target, initial_state=[hidden, cell])
    model = keras.Model([source, target], layers.Dense(3, "softmax")(decoded))
    y = np.eye(3, dtype="float32")[integers(3, 4)]
    x = [normal(6, 4), np.concatenate([np.zeros_like(y[:, :1]), y[:, :-1]], 1)]
    return Given(compiled(model, loss="categorical_crossentropy", metrics=["accuracy"]), x, y)


@sequence("`Bidirectional`, `TimeDistributed` and `Masking`, an `RNN` of cells of your own")
def own_cells():
    class Cell(layers.Layer):
        def __init__(self, units):
            super().__init__()
            self.units = self.state_size = units

        def build(self, shape):
            self.kernel = self.add_weight((shape[-1], self.units), "glorot_uniform", name="kernel")
            self.recurrent = self.add_weight((self.units, self.units), "orthogonal", name="recurrent")

        def call(self, x, states):
            output = ops.tanh(x @ self.kernel + states[0] @ self.recurrent)
            return output, [output]

    inputs = keras.Input((5, 3))
    x = layers.Masking()(inputs)
    x = layers.Bidirectional(layers.GRU(3, return_sequences=True), merge_mode="sum")(x)
    x = layers.TimeDistributed(layers.Dense(2))(x)
    model = keras.Model(inputs, layers.Dense(1)(layers.RNN([Cell(3), Cell(3)])(x)))
    return Given(compiled(model), normal(5, 3) * (np.arange(5) < integers(6, 1, low=1))[..., None], normal(1))
