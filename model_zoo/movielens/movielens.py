"""MovieLens 100k: which rating, 1 to 5, does a user give a film? Two embeddings and a small network.

After He et al., "Neural Collaborative Filtering" (2017): the product of both embeddings, as in matrix
factorization, and the embeddings themselves go through dense layers.
"""

import keras
import tensorflow as tf

# Identifiers in the file count from 1; row 0 of each table stays unused.
USERS, ITEMS = 943, 1682
LOWEST, HIGHEST = 1.0, 5.0


def custom_model(embedding_units=16, dropout=0.3):
    user = keras.Input((), name="user", dtype="int64")
    item = keras.Input((), name="item", dtype="int64")
    user_embedding = keras.layers.Embedding(USERS + 1, embedding_units, name="user_embedding")(user)
    item_embedding = keras.layers.Embedding(ITEMS + 1, embedding_units, name="item_embedding")(item)
    product = keras.layers.Multiply()([user_embedding, item_embedding])
    x = keras.layers.Concatenate()([user_embedding, item_embedding, product])
    x = keras.layers.Dropout(dropout)(x)
    x = keras.layers.Dense(32, activation="relu")(x)
    x = keras.layers.Dropout(dropout)(x)
    share = keras.layers.Dense(1, activation="sigmoid")(x)
    rating = keras.layers.Rescaling(HIGHEST - LOWEST, offset=LOWEST, name="rating")(share)
    return keras.Model({"user": user, "item": item}, rating, name="movielens")


def loss(labels, predictions):
    return keras.losses.mean_squared_error(labels, predictions)


def optimizer():
    return keras.optimizers.Adam(2e-3)


def feed(dataset, mode, metadata):
    """Selects lines. One file serves both: a tenth of them, told by a hash, is kept for validation."""
    if mode == "prediction":
        return dataset
    return dataset.filter(lambda line: _is_held_out(line) == (mode == "evaluation"))


def feed_batch(lines, mode, metadata):
    """Lines of `u.data` hold user, item, rating and time, with tabs between."""
    numbers = tf.strings.to_number(tf.strings.split(lines, "\t").to_tensor(), tf.int64)
    features = {"user": numbers[:, 0], "item": numbers[:, 1]}
    if mode == "prediction":
        return features
    return features, tf.cast(numbers[:, 2:3], tf.float32)


def _is_held_out(line):
    return tf.strings.to_hash_bucket_fast(line, 10) == 0


def eval_metrics_fn():
    return {"rmse": keras.metrics.RootMeanSquaredError(), "mae": keras.metrics.MeanAbsoluteError()}
