"""Will this ad be clicked? DeepFM (Guo et al., 2017): a factorization machine and a network, side by side."""

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


def custom_model(bins=10_000, embedding_units=8):
    """`bins`: rows of the embedding table for each of the 26 categorical columns."""
    inputs = make_inputs()
    numbers = numeric_features(inputs)
    indices = categorical_indices(inputs, bins)

    # First order: a weight for each value.
    weights = keras.layers.Embedding(table_rows(bins), 1, name="weights")(indices)
    linear = keras.ops.sum(weights, axis=1) + keras.layers.Dense(1)(numbers)

    # Second order: sum of the products of all pairs of embeddings, as half of (square of sum - sum of squares).
    embeddings = keras.layers.Embedding(table_rows(bins), embedding_units, name="embeddings")(indices)
    square_of_sum = keras.ops.square(keras.ops.sum(embeddings, axis=1))
    sum_of_squares = keras.ops.sum(keras.ops.square(embeddings), axis=1)
    pairs = 0.5 * keras.ops.sum(square_of_sum - sum_of_squares, axis=1, keepdims=True)

    x = keras.layers.Concatenate()([keras.layers.Flatten()(embeddings), numbers])
    for units in (64, 32):
        x = keras.layers.Dense(units, activation="relu")(x)
    score = linear + pairs + keras.layers.Dense(1)(x)
    probability = keras.layers.Activation("sigmoid", name="probability")(score)
    return keras.Model(inputs, probability, name="deepfm")


def optimizer():
    return keras.optimizers.Adam(1e-3)
