"""Methods and steps of a model are called as by Keras, on the data that Keras gives them."""

from typing import ClassVar

import keras
import numpy as np
import pytest
from keras import layers, ops

import elasticcb
from elasticcb.errors import UsageError

X = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
Y = X.sum(axis=1, keepdims=True)


class Model(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(1)
        self.error = keras.metrics.MeanAbsoluteError(name="error")

    def call(self, x):
        return self.dense(x)


@pytest.fixture(scope="module")
def cluster():
    with elasticcb.Cluster(1, 1, kind="inprocess", updates="sync", log_level="WARNING") as cluster:
        yield cluster


class OtherValidation(Model):
    """Validation batches have another structure than those of training, and other logs than all metrics."""

    seen: ClassVar[list[int]] = []

    def test_step(self, data):
        x, y, weight = data
        self.seen.append(len(data))
        predicted = self(x, training=False)
        self.error.update_state(y, predicted, weight)
        return {"plain": ops.max(predicted), "error": self.error.result()}

    def predict_step(self, data):
        raise AssertionError("fit does not predict")


class OwnMetrics(Model):
    """Keras's own steps return what `compute_metrics` returns."""

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        self.error.update_state(y, y_pred)
        return {"only": self.error.result(), "last": ops.mean(y_pred)}


class KeysOfMetrics(Model):
    """For the names of all metrics, Keras takes their results, not what the step returned."""

    def train_step(self, *args):
        logs = super().train_step(*args)
        return {name: 0.0 * value + 7.0 for name, value in logs.items()}


@pytest.mark.parametrize("kind", [OtherValidation, OwnMetrics, KeysOfMetrics])
def test_logs_are_those_of_keras_in_its_order(cluster, kind):
    given = X[:20], Y[:20], np.ones(20, "float32")
    found = []
    for fit in (None, cluster.fit):
        keras.utils.set_random_seed(1)
        model = kind()
        model.compile("sgd", "mse")
        fit = model.fit if fit is None else lambda *args, model=model, **kw: cluster.fit(model, *args, **kw)
        options = {"epochs": 2, "batch_size": 16, "shuffle": False, "verbose": 0, "validation_data": given}
        found.append(fit(X, Y, **options).history)
    assert list(found[0]) == list(found[1])
    for name, values in found[0].items():
        np.testing.assert_allclose(found[1][name], values, rtol=1e-5, err_msg=name)
    assert set(OtherValidation.seen) <= {3}


def test_a_function_that_keras_would_make_is_refused(cluster):
    class Makes(Model):
        def make_train_function(self, force=False):
            raise AssertionError

    model = Makes()
    model.compile("sgd", "mse")
    with pytest.raises(UsageError, match=r"Makes overrides make_train_function.*Override train_step instead"):
        cluster.fit(model, X, Y)


class Changing(layers.Layer):
    """Variables that each step changes."""

    def build(self, shape):
        for rule in ("none", "sum", "mean", "only_first_replica"):
            setattr(self, rule, self.add_weight(shape=(), initializer="zeros", trainable=False, aggregation=rule))
        self.number = self.add_weight(shape=(), initializer="zeros", trainable=False, dtype="int32")

    def call(self, x, training=False):
        if training:
            for variable in (self.none, self.sum, self.mean, self.only_first_replica, self.number):
                variable.assign(variable + 1)
        return x


@pytest.mark.parametrize("updates", ["async", "local"])
def test_changes_by_several_workers_count_as_the_variable_declares(updates, caplog):
    model = keras.Sequential([keras.Input((4,)), Changing(), layers.BatchNormalization(), layers.Dense(1)])
    model.compile("sgd", "mse")
    with elasticcb.Cluster(2, 1, kind="inprocess", updates=updates, log_level="WARNING") as cluster:
        cluster.fit(model, X, Y, epochs=5, batch_size=4, verbose=0)
    layer = model.layers[0]
    assert (float(layer.sum), int(layer.number)) == (80, 80)
    assert 0 < float(layer.only_first_replica) <= 80
    assert 0 < float(layer.mean) <= 80
    told = [record.getMessage() for record in caplog.records if "aggregation=" in record.getMessage()]
    assert len(told) == 1
    assert "Steps on several workers change 'sequential" in told[0]
