"""Handwritten digits, 8x8 pixels, that come with scikit-learn: a model file that needs no download.

The smallest complete example: a model, its loss and optimizer, where records come from, how they
become features and labels, what is measured, and a callback.
"""

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from elasticcb.callbacks import LearningRateScheduler
from elasticcb.data import Metadata, Reader, Source


def custom_model():
    image = keras.Input((8, 8), name="image")
    x = keras.layers.Reshape((8, 8, 1))(image)
    x = keras.layers.Conv2D(32, 3, padding="same", activation="relu")(x)
    x = keras.layers.Conv2D(64, 3, padding="same", activation="relu")(x)
    x = keras.layers.MaxPooling2D()(x)
    x = keras.layers.Flatten()(x)
    x = keras.layers.Dropout(0.3)(x)
    x = keras.layers.Dense(64, activation="relu")(x)
    return keras.Model({"image": image}, keras.layers.Dense(10, name="logits")(x))


def loss(labels, predictions):
    return keras.losses.sparse_categorical_crossentropy(labels, predictions, from_logits=True)


def optimizer():
    return keras.optimizers.Adam()


def feed_batch(records, mode, metadata):
    features = {"image": tf.cast(records["image"], tf.float32) / metadata.extra["brightest"]}
    return features if mode == "prediction" else (features, records["label"])


def eval_metrics_fn():
    return {"accuracy": keras.metrics.SparseCategoricalAccuracy()}


def callbacks():
    # By the model's version, which counts the gradients of all workers.
    return [LearningRateScheduler(lambda version: 1e-3 if version < 500 else 3e-4)]


def custom_data_reader(data_origin):
    return DigitsReader(data_origin)


class DigitsReader(Reader):
    """`--training_data=train` and `--validation_data=test`: 1437 and 360 images.

    Records are dicts: "image" (8x8 float32, 0 to 16) and "label" (int64).
    """

    def __init__(self, split):
        digits = load_digits()
        images = digits.images.astype(np.float32)
        labels = digits.target.astype(np.int64)
        parts = train_test_split(images, labels, test_size=360, random_state=0, stratify=labels)
        if split not in ("train", "test"):
            raise ValueError(f"The digits come as 'train' and 'test'; --training_data={split!r} is neither.")
        first = 0 if split == "train" else 1
        self._split = split
        self._images, self._labels = parts[first], parts[first + 2]

    def sources(self):
        return [Source(self._split, len(self._labels))]

    def read(self, name, start, end):
        for index in range(start, end):
            yield {"image": self._images[index], "label": self._labels[index]}

    def read_chunks(self, name, start, end, size=256):
        for index in range(start, end, size):
            chunk = slice(index, min(index + size, end))
            yield {"image": self._images[chunk], "label": self._labels[chunk]}

    @property
    def element_spec(self):
        return {"image": tf.TensorSpec((8, 8), tf.float32), "label": tf.TensorSpec((), tf.int64)}

    @property
    def metadata(self):
        return Metadata(column_names=("image", "label"), extra={"brightest": 16.0})
