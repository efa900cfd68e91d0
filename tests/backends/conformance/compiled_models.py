"""Models for the checks, with data, and what Keras's own `fit` makes of them."""

from __future__ import annotations

import operator

import keras
import numpy as np

BATCH = 16
RECORDS = 4 * BATCH + 6  # the last batch is smaller
X = np.random.default_rng(0).normal(size=(RECORDS, 6)).astype("float32")
Y = (X.sum(1, keepdims=True) > 0).astype("float32")


def dense(optimizer=None, metrics=()):
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(8, activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(1, activation="sigmoid"),
        ]
    )
    model.compile(optimizer or keras.optimizers.Adam(0.01), "binary_crossentropy", metrics=["accuracy", *metrics])
    return model


class Subclass(keras.Model):
    """Whose layers are built by its first batch, and whose features are a dict."""

    def __init__(self):
        super().__init__()
        self.hidden, self.out = keras.layers.Dense(5, activation="tanh"), keras.layers.Dense(1)

    def call(self, inputs):
        return self.out(self.hidden(keras.ops.concatenate([inputs["left"], inputs["right"]], -1)))


def subclass():
    keras.utils.set_random_seed(1)
    model = Subclass()
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse", weighted_metrics=["mae"])
    return model


def halves(x):
    return {"left": x[:, :3], "right": x[:, 3:]}


def batches(x=X, y=Y, *more):
    """(features, labels, …) of each batch, as NumPy arrays."""
    for start in range(0, RECORDS, BATCH):
        take = operator.itemgetter(slice(start, start + BATCH))
        yield tuple(keras.tree.map_structure(take, each) for each in (x, y, *more))


def fit(model, x=X, y=Y, epochs=1, **more):
    return model.fit(x, y, batch_size=BATCH, epochs=epochs, shuffle=False, verbose=0, **more).history
