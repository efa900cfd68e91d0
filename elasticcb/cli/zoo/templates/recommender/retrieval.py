"""Retrieval: two towers, whose vectors of a user and of an item the user likes point in the same direction.

After Yi et al., "Sampling-bias-corrected neural modeling for large corpus item recommendations" (2019). In a batch of
ratings, each user's own item has to be found among the items of all: a softmax over the batch.
"""

import keras
import tensorflow as tf
from features import LIKED, embed, make_inputs, parse, rating_of  # in this folder
from keras_rs.layers import RemoveAccidentalHits, SamplingProbabilityCorrection

TEMPERATURE = 0.1  # of the softmax: cosines, between -1 and 1, would be nearly equal without it
CORRECTION = SamplingProbabilityCorrection()  # popular items occur in more batches as negatives
ACCIDENTAL_HITS = RemoveAccidentalHits()  # an item that is in the batch twice is not a negative of itself


def custom_model(units=32, dropout=0.3):
    inputs = make_inputs()
    vectors = {name: keras.layers.Dropout(dropout)(vector) for name, vector in embed(inputs, units).items()}
    user = keras.layers.Dense(units, name="user_tower")(vectors["user"])
    item = keras.layers.Concatenate()([vectors["item"], vectors["genres"]])
    item = keras.layers.Dense(units, name="item_tower")(item)
    outputs = {
        "user": keras.layers.UnitNormalization(name="user_vector")(user),
        "item": keras.layers.UnitNormalization(name="item_vector")(item),
    }
    return keras.Model(inputs, outputs, name="retrieval")


def feed(dataset, mode, metadata):
    """Ratings of items that the user liked."""
    return dataset.filter(lambda line: rating_of(line) >= LIKED)


def feed_batch(lines, mode, metadata):
    """The labels hold what the loss needs to know about the items."""
    features, share, _ = parse(lines)
    features.pop("hour")
    item = tf.strings.to_hash_bucket_fast(features["item"], 2**31 - 1)
    return features if mode == "prediction" else (features, {"item": tf.cast(item, tf.int32), "share": share})


def _similarities(labels, predictions):
    """Logits [batch, batch] of each user with each item of the batch, and which of them are pairs."""
    logits = keras.ops.matmul(predictions["user"], keras.ops.transpose(predictions["item"])) / TEMPERATURE
    pairs = keras.ops.eye(keras.ops.shape(logits)[0])
    return ACCIDENTAL_HITS(logits, pairs, labels["item"]), pairs


def loss(labels, predictions):
    logits, pairs = _similarities(labels, predictions)
    logits = CORRECTION(logits, labels["share"])
    return keras.losses.categorical_crossentropy(pairs, logits, from_logits=True)


def optimizer():
    return keras.optimizers.Adam(2e-3)


def in_batch_recall_at_10(labels, predictions):
    """How many users have their item among the ten best of the batch; evaluate.py looks among all items."""
    logits, _ = _similarities(labels, predictions)
    return keras.ops.in_top_k(keras.ops.arange(keras.ops.shape(logits)[0]), logits, 10)


def eval_metrics_fn():
    return {"in_batch_recall_at_10": in_batch_recall_at_10}
