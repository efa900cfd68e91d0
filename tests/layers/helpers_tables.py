"""Models with embedding layers of both kinds, and steps on served rows."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

from elasticcb.compute.backend import movable
from elasticcb.compute.tensorflow.backend import TensorFlowCapture, TensorFlowTables, problems_of
from elasticcb.layers import Embedding
from elasticcb.layers.table_layers import is_own

ROWS, DIM = 40, 3


def embedding(kind: str, name: str, **kwargs):
    """A layer with `ROWS` rows; of the project's own with each row its own initial value, as it is in a job."""
    if kind == "keras":
        return keras.layers.Embedding(ROWS, DIM, name=name, **kwargs)
    return Embedding(DIM, ROWS if kind == "own" else None, name=name, **kwargs)


def functional(kind: str):
    """One layer is called twice, the other one on strings."""
    first, second = keras.Input((4,), dtype="int64", name="first"), keras.Input((), dtype="int32", name="second")
    words = keras.Input((2,), dtype="string", name="words")
    shared = embedding(kind, "shared")
    hashed = embedding(kind, "hashed")(keras.layers.Hashing(ROWS)(words))
    parts = [shared(first), keras.layers.Reshape((1, DIM))(shared(second)), hashed]
    joined = keras.layers.Flatten()(keras.layers.Concatenate(1)(parts))
    inputs = {"first": first, "second": second, "words": words}
    return keras.Model(inputs, keras.layers.Dense(1)(keras.layers.BatchNormalization()(joined)))


def sequential(kind: str):
    return keras.Sequential(
        [
            keras.Input((5,), dtype="int32"),
            embedding(kind, "only", mask_zero=True),
            keras.layers.LSTM(4),
            keras.layers.Dropout(0.5, seed=1),
            keras.layers.Dense(1),
        ]
    )


class Subclass(keras.Model):
    """Layers in a list, one of them in a block of its own; its own train_step."""

    def __init__(self, kind: str):
        super().__init__()
        self.columns = [embedding(kind, f"column_{number}") for number in range(2)]
        self.inner = keras.Sequential(
            [keras.Input((2,), dtype="int64"), embedding(kind, "inner"), keras.layers.Flatten()]
        )
        self.head = keras.layers.Dense(1)

    def call(self, ids, training=False):
        parts = [layer(ids[:, number]) for number, layer in enumerate(self.columns)]
        return self.head(tf.concat([*parts, self.inner(ids)], 1))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x, training=True) - y) ** 2) + 0.1 * tf.reduce_mean(self(x[:, ::-1]) ** 2)
        gradients = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights, strict=True))
        return {"loss": loss}


def nested(kind: str):
    ids = keras.Input((3,), dtype="int64")
    vectors = keras.layers.GlobalAveragePooling1D()(embedding(kind, "deep")(ids))
    tower = keras.Model(ids, keras.layers.Dense(4)(vectors), name="tower")
    both = keras.Input((2, 3), dtype="int64")
    joined = keras.layers.Concatenate()([tower(both[:, 0]), tower(both[:, 1])])
    return keras.Model(both, keras.layers.Dense(1)(joined))


def ragged(kind: str):
    ids = keras.Input((None,), dtype="int64", ragged=True)
    vectors = embedding(kind, "ragged")(ids)
    return keras.Model(ids, keras.layers.Dense(1)(keras.layers.Lambda(_sums, output_shape=(DIM,))(vectors)))


def _sums(vectors):
    return tf.reduce_sum(vectors, 1)


def sparse(kind: str):
    ids = keras.Input((6,), dtype="int64", sparse=True)
    return keras.Model(ids, keras.layers.Dense(1)(keras.layers.Flatten()(embedding(kind, "sparse")(ids))))


def features(name: str, size: int, seed: int = 0):
    random = np.random.default_rng(seed)

    def ids(*shape, dtype=np.int64):
        return tf.constant(random.integers(0, ROWS // 4, (size, *shape)).astype(dtype))  # many of them repeated

    if name == "functional":
        words = random.choice(["ja", "nein", "vielleicht"], (size, 2))
        return {"first": ids(4), "second": ids(dtype=np.int32), "words": tf.constant(words)}
    if name == "sequential":
        return ids(5, dtype=np.int32)
    if name == "subclass":
        return ids(2)
    if name == "nested":
        return ids(2, 3)
    if name == "ragged":
        lengths = random.integers(0, 5, size)
        return tf.RaggedTensor.from_row_lengths(random.integers(0, 9, lengths.sum()), lengths)
    return tf.sparse.from_dense(random.integers(0, 3, (size, 6)))


MODELS = {
    "functional": functional,
    "sequential": sequential,
    "subclass": Subclass,
    "nested": nested,
    "ragged": ragged,
    "sparse": sparse,
}


def compiled(name: str, kind: str):
    """A built model, and a batch for it."""
    keras.utils.set_random_seed(7)
    model = MODELS[name](kind)
    model.compile("adam", "mse", metrics=["mae"])
    x = features(name, 8)
    batch = x, tf.constant(np.random.default_rng(1).normal(size=(8, 1)), tf.float32)
    model.test_step(batch)
    model.reset_metrics()
    return model, batch


def found_tables(model, step, batch, threshold_bytes=0, allowed=lambda index: True):
    """`movable`, on TensorFlow."""
    large = lambda index, size: size >= threshold_bytes and allowed(index)  # noqa: E731
    steps = [step] if step is model else [step, model.test_step]
    return movable(model, [(each, batch) for each in steps], large, problems_of)


def tables_of(model, batch):
    return found_tables(model, model.train_step, batch)


def all_rows(model, tables):
    """The rows of each table, by id."""
    result = {}
    for layer in model._flatten_layers():
        for index in tables:
            if getattr(layer, "_embeddings", None) is model.weights[index]:
                ids = tf.range(ROWS, dtype=tf.int64)
                result[index] = (
                    layer._initial_values()(ids) if is_own(layer) else tf.constant(layer._embeddings.numpy())
                )
    return result


class Served:
    """A model whose rows come from a dict, as they come from servers in a job."""

    def __init__(self, model, tables):
        self.model = model
        self.rows = all_rows(model, tables)
        self.tables = TensorFlowTables(model, tables)

    def run(self, step, batch):
        """`step(batch)`, compiled, on rows that were fetched before."""
        wanted = self.tables.lookups(step)(batch)
        fetched = {index: tf.gather(self.rows[index], ids) for index, (ids, _) in wanted.items()}

        def served(batch, rows, positions):
            with self.tables.serving(rows, positions):
                return step(batch)

        function = tf.function(served, autograph=False)
        return wanted, function(batch, fetched, {index: places for index, (_, places) in wanted.items()})


def gradients(model, run):
    """What `run(step)` gives for the training step: by variable, gradients as they are."""
    capture = TensorFlowCapture(model)
    try:
        return run(lambda batch: capture.train_step(batch)[1])
    finally:
        capture.release()


def dense(gradient, ids=None):
    """A gradient of rows as one of the whole table."""
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient.numpy()
    where = tf.cast(gradient.indices, tf.int64)
    return tf.math.unsorted_segment_sum(gradient.values, where if ids is None else tf.gather(ids, where), ROWS).numpy()
