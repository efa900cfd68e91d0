"""Will this ad be clicked? DCN-v2 (Wang et al., 2021): layers that cross features, then a network."""

import keras
from features import (  # next to this file
    categorical_indices,
    eval_metrics_fn,  # noqa: F401 - found by its name, as are `feed_batch` and `loss`
    feed_batch,  # noqa: F401
    loss,  # noqa: F401
    make_inputs,
    numeric_features,
    table_rows,
)


class Cross(keras.layers.Layer):
    """`x0 * (W x + b) + x`, with W of low rank: each such layer raises the order of the crosses by one."""

    def __init__(self, rank, **kwargs):
        super().__init__(**kwargs)
        self.rank = rank

    def build(self, shapes):
        units = shapes[0][-1]
        self.down = keras.layers.Dense(self.rank, use_bias=False)
        self.up = keras.layers.Dense(units)
        self.down.build((None, units))
        self.up.build((None, self.rank))

    def call(self, inputs):
        x0, x = inputs
        return x0 * self.up(self.down(x)) + x

    def get_config(self):
        return {**super().get_config(), "rank": self.rank}


def custom_model(bins=10_000, embedding_units=8, cross_layers=2, rank=32):
    """`bins`: rows of the embedding table for each of the 26 categorical columns."""
    inputs = make_inputs()
    indices = categorical_indices(inputs, bins)
    embeddings = keras.layers.Embedding(table_rows(bins), embedding_units, name="embeddings")(indices)
    x0 = keras.layers.Concatenate()([keras.layers.Flatten()(embeddings), numeric_features(inputs)])

    x = x0
    for _ in range(cross_layers):
        x = Cross(rank)([x0, x])
    for units in (64, 32):
        x = keras.layers.Dense(units, activation="relu")(x)
    probability = keras.layers.Dense(1, activation="sigmoid", name="probability")(x)
    return keras.Model(inputs, probability, name="dcn")


def optimizer():
    return keras.optimizers.Adam(1e-3)
