"""The calls of `keras.Model` that tests also make of a cluster: models, data, and Keras with a cluster's methods."""

import keras
import numpy as np
import tensorflow as tf

X = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
Y = X.sum(1, keepdims=True)
LABELS = (Y[:, 0] > 0).astype("int32")


class Keras:
    """`keras.Model` with the methods of a cluster."""

    def fit(self, model, *args, **kwargs):
        return model.fit(*args, **kwargs)

    def evaluate(self, model, *args, **kwargs):
        return model.evaluate(*args, **kwargs)

    def predict(self, model, *args, **kwargs):
        return model.predict(*args, **kwargs)


def make(outputs=1, loss="mse", metrics=("mae",), compiled=True, **options):
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.layers.Dense(8, "relu"), keras.layers.Dense(outputs)])
    if compiled:
        model.compile("adam", loss, metrics=list(metrics), **options)
    return model


def classifier():
    return make(2, keras.losses.SparseCategoricalCrossentropy(from_logits=True), ["accuracy"])


def dataset():
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(16)


def generator():
    for start in range(0, 64, 16):
        yield X[start : start + 16], Y[start : start + 16]


class Sequence(keras.utils.PyDataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return X[index * 16 : index * 16 + 16], Y[index * 16 : index * 16 + 16]
