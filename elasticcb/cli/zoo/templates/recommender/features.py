"""Lines of data/*.csv as the features of both models."""

import keras
import tensorflow as tf

from elasticcb.layers import Embedding

MAX_GENRES = 6  # of an item; others are ignored
LIKED = 4.0  # from this rating on, a user liked an item


def parse(lines):
    """Lines of user, item, genres, hour, item_share, rating. Returns features and the last two."""
    fields = tf.io.decode_csv(lines, [""] * 3 + [0] + [0.0] * 2)
    user, item, genres, hour, share, rating = fields
    return {"user": user, "item": item, "genres": split_genres(genres), "hour": hour}, share, rating


def rating_of(line):
    """The rating in a line."""
    return tf.io.decode_csv(line, [0.0], select_cols=[5])[0]


def split_genres(genres):
    """Each `"Comedy|War"` as strings [MAX_GENRES], with empty ones at the end."""
    return tf.strings.split(genres, "|").to_tensor("", shape=[None, MAX_GENRES])


def make_inputs():
    """The inputs of both models: a user and an item, as strings with an unbounded vocabulary."""
    return {
        "user": keras.Input((), name="user", dtype="string"),
        "item": keras.Input((), name="item", dtype="string"),
        "genres": keras.Input((MAX_GENRES,), name="genres", dtype="string"),
    }


def embed(inputs, units):
    """A vector [units] for each of user, item and genres: the mean of these. No vocabulary is needed."""
    return {
        "user": Embedding(units, name="users")(inputs["user"]),
        "item": Embedding(units, name="items")(inputs["item"]),
        "genres": Embedding(units, combiner="mean", mask_zero=True, name="genre_vectors")(inputs["genres"]),
    }
