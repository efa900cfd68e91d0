"""The job of chaos.py: ratings of items by users, with a reader that keeps a ledger of what was read."""

import os
import time

import keras
import numpy as np
import tensorflow as tf

from elasticcb.data.reader import Reader, Source
from elasticcb.layers import Embedding


class LedgerReader(Reader):
    """Rows (user, item, rating) of a .npy file; each range that is read is a line of $LEDGER."""

    def __init__(self, path):
        self._path = path
        self._rows = np.load(path, mmap_mode="r")

    def sources(self):
        return [Source(self._path, len(self._rows))]

    def read(self, name, start, end):
        raise AssertionError("rows are read in chunks")

    @property
    def element_spec(self):
        return tf.TensorSpec((3,), tf.int64)

    def read_chunks(self, name, start, end, size=256):
        # Small, so that little more is noted than is trained.
        for first in range(start, end, size):
            last = min(first + size, end)
            line = f"{time.time():.3f} {os.getpid()} {os.path.basename(name)} {first} {last}\n"
            ledger = os.open(os.environ["LEDGER"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            os.write(ledger, line.encode())
            os.close(ledger)
            yield np.asarray(self._rows[first:last])


def custom_data_reader(data_origin):
    return LedgerReader(data_origin)


def custom_model(units=16):
    user, item = (keras.Input((), dtype="int64", name=name) for name in ("user", "item"))
    vectors = [Embedding(units, embeddings_initializer="normal")(ids) for ids in (user, item)]
    x = keras.layers.Concatenate()([*vectors, keras.layers.Multiply()(vectors)])
    x = keras.layers.Dense(32, activation="relu")(x)
    share = keras.layers.Dense(1, activation="sigmoid")(x)
    return keras.Model({"user": user, "item": item}, keras.layers.Rescaling(4.0, offset=1.0)(share))


def loss(labels, predictions):
    return keras.losses.mean_squared_error(labels, predictions)


def optimizer():
    return keras.optimizers.Adagrad(0.1)


def feed_batch(rows, mode, metadata):
    return {"user": rows[:, 0], "item": rows[:, 1]}, tf.cast(rows[:, 2:3], tf.float32)


class Rows(keras.metrics.Sum):
    """Counts records."""

    def update_state(self, labels, predictions, sample_weight=None):
        super().update_state(keras.ops.ones_like(labels))


def eval_metrics_fn():
    return {"rmse": keras.metrics.RootMeanSquaredError(), "rows": Rows(name="rows")}
