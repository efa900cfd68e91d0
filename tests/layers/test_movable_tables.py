"""Which embedding layers servers may hold, found out from the traced step; and rows given back."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers_tables import DIM, ROWS, embedding, found_tables, tables_of

from elasticcb.layers import Embedding
from elasticcb.layers.table_layers import NotServableError, held_ids, install
from elasticcb.sharding.table_state import TableSpec

IDS = tf.constant([[1, 2, 3], [1, 1, 0]])
BATCH = IDS, tf.constant([[1.0], [0.0]])


def build(layer, call=None, **compiling):
    """A model of `layer`, whose call is `call(model, ids, training)`."""

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.embedding = layer
            self.other = keras.layers.Embedding(ROWS, 1, name="other")
            self.head = keras.layers.Dense(1)

        def call(self, ids, training=False):
            if call is not None:
                return call(self, ids, training)
            return self.head(tf.reduce_mean(self.embedding(ids), 1))

    model = Model()
    model.compile("sgd", "mse", **compiling)
    model.head.build((None, DIM))
    model.embedding.build(None)
    model.other.build(None)
    model.test_step(BATCH)
    return model


def layers_of(model, **kwargs):
    """The names of the layers that may be moved."""
    tables = found_tables(model, model.train_step, BATCH, **kwargs)
    return {model.weights[index].path.split("/")[-2] for index in tables}


def plain():
    return embedding("keras", "plain")


def test_layers_of_keras_are_moved_from_a_size_on_where_it_is_allowed():
    size = ROWS * DIM * 4
    model = build(plain())
    assert layers_of(model, threshold_bytes=size) == {"plain"}
    assert layers_of(model, threshold_bytes=size + 1) == set()
    assert layers_of(model, threshold_bytes=size, allowed=lambda index: False) == set()
    own = build(Embedding(DIM, name="own"))
    assert layers_of(own, threshold_bytes=size) == {"own"}
    assert layers_of(own, threshold_bytes=size, allowed=lambda index: False) == {"own"}


def test_table_tells_what_its_rows_start_from():
    layer = Embedding(DIM, 50, embeddings_initializer="ones", seed=3)
    (own,) = (table for table in tables_of(build(layer), BATCH).values() if table.initializer)
    assert (own.input_dim, own.seed) == (50, 3)
    assert '"Ones"' in own.initializer
    assert TableSpec(ROWS) in tables_of(build(plain()), BATCH).values()


class Doubling(keras.layers.Embedding):
    def call(self, inputs):
        return 2 * super().call(inputs)


class Described(keras.layers.Embedding):
    """Does what Keras does."""


@pytest.mark.parametrize(
    "layer",
    [
        keras.layers.Embedding(ROWS, DIM, embeddings_regularizer="l2", name="plain"),
        keras.layers.Embedding(ROWS, DIM, embeddings_constraint="non_neg", name="plain"),
        keras.layers.Embedding(ROWS, DIM, lora_rank=2, name="plain"),
        keras.layers.Embedding(ROWS, DIM, trainable=False, name="plain"),
        Doubling(ROWS, DIM, name="plain"),
    ],
    ids=["regularizer", "constraint", "lora", "frozen", "call"],
)
def test_layer_that_needs_its_whole_variable_stays(layer):
    assert "plain" not in layers_of(build(layer))


def test_subclass_that_looks_rows_up_as_keras_does_is_moved():
    assert "plain" in layers_of(build(Described(ROWS, DIM, name="plain")))


def tied(model, ids, training):
    return tf.matmul(tf.reduce_mean(model.embedding(ids), 1), model.embedding.embeddings, transpose_b=True)[:, :1]


def ranking(model, ids, training):
    return model.head(tf.reduce_mean(model.embedding(ids), 1)) if training else tied(model, ids, training)


def by_rows(model, ids, training):
    found = tf.cast(tf.abs(model.other(ids)[..., 0]) * 10, tf.int64)
    return model.head(tf.reduce_mean(model.embedding(found), 1))


def by_weights(model, ids, training):
    best = tf.argmax(tf.squeeze(model.head.kernel, 1))
    return model.head(tf.reduce_mean(model.embedding(tf.cast(ids, tf.int64) + best), 1))


def drawn(model, ids, training):
    return model.head(tf.reduce_mean(model.embedding(tf.random.uniform([2, 3], 0, 5, tf.int64)), 1))


def in_python(model, ids, training):
    same = tf.numpy_function(lambda ids: ids, [ids], tf.int32)
    return model.head(tf.reduce_mean(model.embedding(tf.ensure_shape(same, [2, 3])), 1))


def in_function(model, ids, training):
    return model.head(tf.reduce_mean(tf.function(model.embedding)(ids), 1))


def eagerly(model, ids, training):
    return model.head(tf.reduce_mean(model.embedding(tf.constant(ids.numpy())), 1))


NOT_SERVABLE = [
    (eagerly, "the step can't be traced, which is needed"),
    (tied, "the step uses its variable in other ways"),
    (ranking, "the step uses its variable in other ways"),
    (by_rows, "its ids depend on rows of an embedding"),
    (by_weights, r"its ids depend on the weights '.*kernel'"),
    (drawn, "its ids depend on the operation RandomUniformInt"),
    (in_python, "its ids depend on the operation .*PyFunc"),
    (in_function, "it is called inside a loop, a condition or a function"),
]


@pytest.mark.parametrize(("call", "why"), NOT_SERVABLE, ids=lambda value: getattr(value, "__name__", ""))
def test_rows_that_can_not_be_known_beforehand_stay_or_are_refused(call, why):
    assert "plain" not in layers_of(build(plain(), call, run_eagerly=True))
    with pytest.raises(NotServableError, match=f"the embedding layer 'own': {why}"):
        layers_of(build(Embedding(DIM, ROWS, name="own"), call, run_eagerly=True))


def test_finding_tables_leaves_the_model_as_it_was():
    model = build(plain())
    before = [variable.numpy() for variable in model.variables]
    outputs = model(IDS)
    layers_of(model)
    np.testing.assert_array_equal(model(IDS), outputs)
    for variable, value in zip(model.variables, before, strict=True):
        np.testing.assert_array_equal(variable, value)
    assert "call" not in vars(model.embedding)


def test_installed_rows_are_those_of_the_native_layer():
    model = build(plain())
    index = next(i for i, v in enumerate(model.weights) if v is model.embedding._embeddings)
    rows = np.random.default_rng(0).normal(size=(ROWS, DIM)).astype("float32")
    install(model, index, np.arange(ROWS), rows)
    np.testing.assert_array_equal(model.embedding(IDS), rows[IDS.numpy()])
    install(model, index, np.array([2, 0]), rows[[2, 0]])
    assert model.embedding.embeddings.shape == (ROWS, DIM)
    np.testing.assert_array_equal(model.embedding.embeddings[0], rows[0])
    np.testing.assert_array_equal(model.embedding.embeddings[1], np.zeros(DIM))
    assert held_ids(model, index) is None
    model.train_step(BATCH)


def test_installed_rows_of_a_table_without_size_are_found_by_id():
    model = build(Embedding(DIM, name="own"))
    index = next(i for i, v in enumerate(model.weights) if v is model.embedding._embeddings)
    install(model, index, np.array([7, 3]), np.array([[7.0] * DIM, [3.0] * DIM], "float32"))
    np.testing.assert_array_equal(model.embedding(tf.constant([3, 7]))[:, 0], [3, 7])
    assert held_ids(model, index).tolist() == [3, 7]
