"""Handwritten digits (MNIST): a `keras.Model` subclass, named by `--model_def` itself."""

import keras
import tensorflow as tf
from idx import custom_data_reader  # noqa: F401 - found by its name; idx.py is next to this file


class MnistModel(keras.Model):
    """Takes images of shape (batch, 28, 28, 1) with values from 0 to 1, returns 10 logits for each."""

    def __init__(self, filters=32):
        super().__init__(name="mnist")
        self.convolutions = [
            keras.layers.Conv2D(filters, 3, activation="relu"),
            keras.layers.Conv2D(2 * filters, 3, activation="relu"),
        ]
        self.pooling = keras.layers.MaxPooling2D()
        self.normalization = keras.layers.BatchNormalization(momentum=0.9)
        self.dropout = keras.layers.Dropout(0.25)
        self.flatten = keras.layers.Flatten()
        self.logits = keras.layers.Dense(10)

    def call(self, images, training=False):
        x = images
        for convolution in self.convolutions:
            x = self.pooling(convolution(x))
        x = self.normalization(x, training=training)
        return self.logits(self.flatten(self.dropout(x, training=training)))


def loss(labels, predictions):
    return keras.losses.sparse_categorical_crossentropy(labels, predictions, from_logits=True)


def optimizer():
    return keras.optimizers.Adam(1e-3)


def feed_batch(records, mode, metadata):
    images = tf.cast(records["image"], tf.float32)[..., tf.newaxis] / 255.0
    return images if mode == "prediction" else (images, records["label"])


def eval_metrics_fn():
    return {"accuracy": keras.metrics.SparseCategoricalAccuracy()}
