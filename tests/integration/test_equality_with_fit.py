"""Synchronous workers and Keras's own `fit`, fed the same batches, end at the same weights."""

import keras
import numpy as np
import pytest

import elasticcb
from comparison import assert_close
from deep_cases import deep_but
from matrix_optimizers import Signs

OPTIMIZERS = {
    "SGD": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
    "Adam": lambda: keras.optimizers.Adam(0.01),
    "AdamW": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.01),
    "Adagrad": lambda: keras.optimizers.Adagrad(0.05),
    "RMSprop": lambda: keras.optimizers.RMSprop(0.01),
    "Ftrl": lambda: keras.optimizers.Ftrl(0.05),
    "Lion": lambda: keras.optimizers.Lion(0.001),
    "a custom optimizer": lambda: Signs(0.001),
    "a schedule, clipped": lambda: keras.optimizers.SGD(
        keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.8), global_clipnorm=0.5
    ),
    "averages": lambda: keras.optimizers.Adam(0.01, use_ema=True, ema_momentum=0.9),
}
BATCHES, BATCH = 50, 16


@pytest.fixture(scope="module")
def cluster():
    with elasticcb.Cluster(1, 2, kind="inprocess", updates="sync", log_level="WARNING") as cluster:
        yield cluster


@pytest.mark.parametrize("name", deep_but(OPTIMIZERS, "Adam", "a custom optimizer"))
def test_weights_after_fifty_batches_equal_those_of_fit(cluster, name):
    generator = np.random.default_rng(5)
    x, y = (generator.normal(size=(BATCHES * BATCH, size)).astype("float32") for size in (6, 1))
    found = []
    for fit in (keras.Model.fit, cluster.fit):
        keras.utils.set_random_seed(3)
        hidden = keras.layers.Dense(8, activation="tanh", kernel_regularizer="l2")
        model = keras.Sequential([keras.Input((6,)), hidden, keras.layers.BatchNormalization(), keras.layers.Dense(1)])
        model.compile(OPTIMIZERS[name](), "mse")
        fit(model, x, y, batch_size=BATCH, shuffle=False, verbose=0)
        found.append(model.get_weights())
    assert_close(found[1], found[0], 1e-5)


def test_rounds_of_several_workers_are_the_steps_of_fit_on_the_joined_batch():
    """From the first batch of each epoch on, whatever the workers do between two epochs."""
    workers, rounds, size = 3, 4, 8
    generator = np.random.default_rng(5)
    x = generator.normal(size=(workers * rounds * size, 6)).astype("float32")
    y = x[:, :1] - x[:, 1:2]

    class Parts(keras.utils.PyDataset):
        def __len__(self):
            return workers * rounds

        def __getitem__(self, index):
            part = slice(index * size, (index + 1) * size)
            return x[part], y[part]

    def trained(fit, *data, **options):
        keras.utils.set_random_seed(3)
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(5, "tanh"), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True), "mse")
        falling = keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.05 / (1 + epoch))
        options |= {"epochs": 4, "shuffle": False, "verbose": 0, "callbacks": [falling]}
        history = fit(model, *data, validation_data=(x[:50], y[:50]), **options).history
        return model.get_weights(), history["val_loss"]

    expected, losses = trained(keras.Model.fit, x, y, batch_size=workers * size)
    with elasticcb.Cluster(workers, 2, updates="sync", log_level="WARNING") as cluster:
        weights, own_losses = trained(cluster.fit, Parts())
    for one, other in zip(weights, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(own_losses, losses, rtol=1e-5)
