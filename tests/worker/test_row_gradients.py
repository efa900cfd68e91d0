"""What becomes of gradients of rows before they are pushed."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from check_steps import hold, tensors
from elasticcb.compute.registry import backend
from elasticcb.settings import Mode

DIM = 4


class Total(keras.layers.Layer):
    def call(self, rows):
        return keras.ops.sum(rows, axis=(1, 2))[:, None]


def trained_beside_a_table(optimizer):
    """The gradient of a row 1 that a batch uses three times in a table, and what a small layer became by the same."""
    ids = keras.Input((3,), dtype="int64")
    on_servers = keras.layers.Embedding(50, DIM, embeddings_initializer="zeros", name="large")
    on_workers = keras.layers.Embedding(5, DIM, embeddings_initializer="zeros", name="small")
    model = keras.Model(ids, Total()(on_servers(ids)) + Total()(on_workers(ids)))
    model.compile(optimizer, "mse")
    batch = np.array([[1, 1, 1]]), np.array([1.0])
    held = hold(model, tensors(batch), threshold=10 * 4 * DIM)
    assert [bool(spec.table) for spec in held.specs] == [True, False]
    computation = backend().computation(held)
    prepared = computation.prepare(tensors(batch), Mode.TRAINING)
    result = computation.train(prepared, {0: np.zeros((1, DIM), "float32")})
    return result.rows[0][1], on_workers.embeddings.numpy()


def test_a_layer_beside_tables_that_the_worker_trains_takes_the_sum_of_the_gradients_of_a_row():
    pushed, rows = trained_beside_a_table(keras.optimizers.Adagrad(0.1))
    gradient = 3 * 2 * (0 - 1)  # three times that of the mean squared error of 0 to 1
    np.testing.assert_array_equal(pushed, np.full((1, DIM), gradient))
    expected = np.zeros((5, DIM), "float32")
    expected[1] = -0.1 * gradient / np.sqrt(0.1 + gradient**2 + 1e-7)
    np.testing.assert_allclose(rows, expected, rtol=1e-6)


class Decaying(keras.optimizers.SGD):
    """Halves the rows that have a gradient, and only these, and adds 1."""

    elementwise = True

    def update_step(self, gradient, variable, learning_rate):
        if isinstance(gradient, tf.IndexedSlices):
            rows = tf.gather(variable, gradient.indices)
            variable.scatter_update(tf.IndexedSlices(rows / 2 + 1, gradient.indices))
        else:
            variable.assign(variable / 2 + 1)


@pytest.mark.parametrize("scaled", [False, True])
def test_an_optimizer_of_the_users_own_class_gets_the_rows_of_such_a_layer(scaled):
    optimizer = Decaying(0.1)
    _, rows = trained_beside_a_table(keras.optimizers.LossScaleOptimizer(optimizer) if scaled else optimizer)
    np.testing.assert_array_equal(rows, [[0.0] * DIM, [1.0] * DIM, *[[0.0] * DIM] * 3])
