"""DeepFM (Guo et al., 2017): 26 id columns with 2,600,000 ids in all, 13 numbers, MLP 256-128, Adagrad.

Ids of column f lie in [f * 100000, (f + 1) * 100000) and follow zipf(1.2), whose tail beyond 100,000 is wrapped around.
"""

import numpy as np

ROWS = 65_536
COLUMNS = 26
UNITS = 16
NUMBERS = 13
VOCABULARY = 2_600_000


def model(keras, ops):
    ids = keras.Input((COLUMNS,), dtype="int64", name="ids")
    numbers = keras.Input((NUMBERS,), name="numbers")
    weights = keras.layers.Embedding(VOCABULARY, 1, name="weights")(ids)
    embeddings = keras.layers.Embedding(VOCABULARY, UNITS, name="embeddings")(ids)
    return head(keras, ops, ids, numbers, weights, embeddings)


def head(keras, ops, ids, numbers, weights, embeddings):
    """All but the embedding layers."""
    linear = ops.sum(weights, axis=1) + keras.layers.Dense(1)(numbers)
    # The products of all pairs of embeddings, as half of (square of sum - sum of squares).
    square_of_sum = ops.square(ops.sum(embeddings, axis=1))
    sum_of_squares = ops.sum(ops.square(embeddings), axis=1)
    pairs = 0.5 * ops.sum(square_of_sum - sum_of_squares, axis=1, keepdims=True)
    x = keras.layers.Concatenate()([keras.layers.Flatten()(embeddings), numbers])
    for units in (256, 128):
        x = keras.layers.Dense(units, activation="relu")(x)
    return keras.Model({"ids": ids, "numbers": numbers}, linear + pairs + keras.layers.Dense(1)(x))


def optimizer(keras):
    return keras.optimizers.Adagrad(0.05)


def loss(keras):
    return keras.losses.BinaryCrossentropy(from_logits=True)


def arrays(random, vocabulary=VOCABULARY):
    size = vocabulary // COLUMNS
    ids = (random.zipf(1.2, (ROWS, COLUMNS)) - 1) % size
    return {
        "ids": ids.astype("int64") + size * np.arange(COLUMNS),
        "numbers": random.random((ROWS, NUMBERS), "float32"),
        "labels": random.integers(0, 2, (ROWS, 1)).astype("float32"),
    }
