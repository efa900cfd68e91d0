"""Handwritten digits (MNIST): a convolutional network in Keras's functional API."""

import keras
import tensorflow as tf
from idx import custom_data_reader  # noqa: F401 - found by its name; idx.py is next to this file


def custom_model():
    image = keras.Input((28, 28, 1), name="image")
    x = keras.layers.Conv2D(32, 3, activation="relu")(image)
    x = keras.layers.MaxPooling2D()(x)
    x = keras.layers.Conv2D(64, 3, activation="relu")(x)
    x = keras.layers.BatchNormalization(momentum=0.9)(x)
    x = keras.layers.MaxPooling2D()(x)
    x = keras.layers.Dropout(0.25)(x)
    x = keras.layers.Flatten()(x)
    logits = keras.layers.Dense(10, name="logits")(x)
    return keras.Model({"image": image}, logits, name="mnist")


def loss(labels, predictions):
    return keras.losses.sparse_categorical_crossentropy(labels, predictions, from_logits=True)


def optimizer():
    return keras.optimizers.Adam(1e-3)


def feed_batch(records, mode, metadata):
    features = {"image": tf.cast(records["image"], tf.float32)[..., tf.newaxis] / 255.0}
    return features if mode == "prediction" else (features, records["label"])


def eval_metrics_fn():
    return {"accuracy": keras.metrics.SparseCategoricalAccuracy()}
