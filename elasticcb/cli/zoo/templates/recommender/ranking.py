"""Ranking: the probability that this user likes this item at this hour.

After Wang et al., "DCN V2" (2021): a cross layer that multiplies features, then a dense network.
"""

import keras
from features import LIKED, embed, make_inputs, parse  # in this folder
from keras_rs.layers import FeatureCross


def custom_model(units=16):
    inputs = make_inputs()
    vectors = embed(inputs, units)
    inputs["hour"] = keras.Input((), name="hour", dtype="int32")
    hour = keras.layers.CategoryEncoding(24, output_mode="one_hot")(inputs["hour"][:, None])
    product = keras.layers.Multiply()([vectors["user"], vectors["item"]])
    product_with_genres = keras.layers.Multiply()([vectors["user"], vectors["genres"]])
    x = keras.layers.Concatenate()([*vectors.values(), product, product_with_genres, hour])
    x = FeatureCross()(x)
    x = keras.layers.Dense(32, activation="relu")(x)
    probability = keras.layers.Dense(1, activation="sigmoid", name="probability")(x)
    return keras.Model(inputs, probability, name="ranking")


def feed_batch(lines, mode, metadata):
    features, _, rating = parse(lines)
    liked = keras.ops.cast(rating >= LIKED, "float32")[:, None]
    return features if mode == "prediction" else (features, liked)


def loss(labels, predictions):
    return keras.losses.binary_crossentropy(labels, predictions)


def optimizer():
    return keras.optimizers.Adam(2e-3)


def eval_metrics_fn():
    return {"auc": keras.metrics.AUC(), "accuracy": keras.metrics.BinaryAccuracy()}
