"""Calls on a cluster that has run others: what a worker keeps from one call to the next does not change a result."""

from pathlib import Path

import keras
import numpy as np
import psutil
import pytest

import elasticcb

X = np.random.default_rng(0).random((48, 6), dtype=np.float32)
Y = X.sum(axis=1, keepdims=True)


class Scaled(keras.Model):
    def __init__(self, scale):
        super().__init__()
        self.inner, self.scale = keras.layers.Dense(1), scale

    def call(self, inputs):
        return self.inner(inputs) * self.scale


def sequential():
    layers = [keras.layers.Dense(4, use_bias=False), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
    return keras.Sequential([keras.Input((6,)), *layers])


def results(call, model):
    """Of one call after another; between them the program changes the model."""
    options = {"batch_size": 12, "verbose": 0}

    def fit(**others):
        return call("fit", X, Y, shuffle=False, **options, **others).history

    yield fit()
    yield fit(epochs=2)
    yield call("evaluate", X, Y, **options)
    model.optimizer.learning_rate = 0.001
    yield fit()
    model.set_weights([weight * 0.5 for weight in model.get_weights()])
    yield fit()
    if isinstance(model, Scaled):
        model.scale = 2.0
        model.compile(model.optimizer, "mse", metrics=["mae"])  # so that Keras compiles again
    else:
        model.layers[0].trainable = False
        model.compile("sgd", "mae")
    yield fit()
    yield call("predict", X[:5], verbose=0)
    yield call("predict", X, verbose=0)
    yield fit()
    yield model.get_weights()


@pytest.fixture(scope="module")
def cluster():
    with elasticcb.Cluster(log_level="ERROR") as cluster:
        yield cluster


@pytest.mark.parametrize("make", [sequential, lambda: Scaled(1.0)], ids=["sequential", "subclass"])
def test_later_calls_give_what_keras_gives(make, cluster):
    found = []
    for served in (False, True):
        keras.utils.set_random_seed(1)
        model = make()
        model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])

        def call(name, *data, model=model, served=served, **options):
            return getattr(cluster, name)(model, *data, **options) if served else getattr(model, name)(*data, **options)

        found.append(list(results(call, model)))
    for expected, given in zip(*found, strict=True):
        for one, other in zip(keras.tree.flatten(expected), keras.tree.flatten(given), strict=True):
            np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-6)


def test_data_of_earlier_calls_is_freed():
    """Workers map the arrays of a call from a file, which takes space of the disk while it is mapped."""
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    others = set(psutil.Process().children(recursive=True))
    with elasticcb.Cluster(1, log_level="ERROR") as cluster:
        for _ in range(5):
            cluster.fit(model, X, Y, verbose=0)
        mapped = 0
        for process in set(psutil.Process().children(recursive=True)) - others:
            maps = Path(f"/proc/{process.pid}/maps").read_text(encoding="utf-8")
            mapped = max(mapped, sum("arrays-" in line for line in maps.splitlines()))
    assert mapped <= 2  # of the last call, and of the one before
