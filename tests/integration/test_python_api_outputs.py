"""What `Cluster.predict` and `Cluster.evaluate` make of outputs and metrics of all kinds, next to `keras.Model`."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import elasticcb
from deep_cases import deep_but
from keras_calls import Keras

X = np.random.default_rng(0).normal(size=(40, 4)).astype("float32")
Y = X.sum(1, keepdims=True)
LENGTHS = np.arange(40) % 5 + 1


@pytest.fixture(scope="module")
def cluster():
    with elasticcb.Cluster(kind="inprocess", num_workers=2, log_level="ERROR") as cluster:
        yield cluster


def rows():
    """Each record a list of one to five numbers."""
    return [np.arange(length, dtype="float32") + number for number, length in enumerate(LENGTHS)]


def padded(labels=False):
    """Batches whose widths differ."""
    numbers = tf.data.Dataset.from_generator(rows, output_signature=tf.TensorSpec([None], tf.float32))
    if labels:
        numbers = tf.data.Dataset.zip(numbers, tf.data.Dataset.from_tensor_slices(Y[:, 0]))
        return numbers.padded_batch(7, padded_shapes=([None], []))
    return numbers.padded_batch(7)


def dense(predict_step=None, **compiled):
    keras.utils.set_random_seed(3)
    layers = [keras.layers.Dense(3, "relu"), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    if predict_step is not None:
        model = type("Model", (keras.Sequential,), {"predict_step": predict_step})(layers)
    model.compile("sgd", "mse", **compiled)
    return model


class Doubled(keras.Model):
    def call(self, inputs):
        return inputs * 2.0


class RaggedAndMore(keras.Model):
    def call(self, inputs):
        return {"all": inputs * 2.0, "sum": tf.reduce_sum(inputs, 1), "both": (tf.reduce_max(inputs, 1), inputs)}


def of_batch(self, data):
    return {"mean": tf.reduce_mean(self(data)), "each": self(data)}


def residual(self, data):
    x, y = data
    return y - self(x)


PREDICTIONS = {
    "ragged": lambda on: on.predict(Doubled(), tf.ragged.constant([list(row) for row in rows()]), batch_size=7),
    "ragged, nested": lambda on: on.predict(
        RaggedAndMore(), tf.data.Dataset.from_tensor_slices(tf.ragged.constant([list(row) for row in rows()])).batch(7)
    ),
    "padded batches": lambda on: on.predict(Doubled(), padded()),
    "one scalar for a batch": lambda on: on.predict(dense(of_batch), X, batch_size=7),
    "labels in predict_step": lambda on: on.predict(dense(residual), tf.data.Dataset.from_tensors((X, Y)).repeat(2)),
    "bare features in predict_step": lambda on: on.predict(dense(lambda self, data: self(data)), X, batch_size=9),
}


@pytest.mark.parametrize("call", PREDICTIONS)
def test_predictions_are_those_of_keras(cluster, call):
    expected, given = PREDICTIONS[call](Keras()), PREDICTIONS[call](cluster)
    tf.nest.assert_same_structure(expected, given)
    for theirs, ours in zip(tf.nest.flatten(expected), tf.nest.flatten(given), strict=True):
        assert type(ours) is type(theirs)
        if isinstance(theirs, tf.RaggedTensor):
            assert ours.to_list() == theirs.to_list()
        else:
            assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
            np.testing.assert_allclose(ours, theirs, rtol=1e-6)


@keras.saving.register_keras_serializable("test")
class MeanOfLargest(keras.metrics.Metric):
    """The mean over batches of a batch's largest prediction; it can't be merged."""

    def __init__(self, name="mean_of_largest", **kwargs):
        super().__init__(name=name, **kwargs)
        self.total, self.batches = (self.add_weight(name=name, initializer="zeros") for name in ("total", "batches"))

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(tf.cast(tf.reduce_max(y_pred), self.dtype))
        # By the data, so that TensorFlow does not count the batch that Keras asks for when there is none left.
        self.batches.assign_add(tf.cast(tf.size(y_pred) > 0, self.dtype))

    def result(self):
        return self.total / self.batches


class Sums(keras.Model):
    def call(self, inputs):
        return tf.reduce_sum(inputs, 1)


class Halved(keras.Model):
    def call(self, inputs):
        return inputs / 2.0

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return tf.reduce_mean(y_pred)


def test_metric_that_depends_on_batches_gets_those_of_keras(cluster):
    def evaluated(on):
        return on(dense(metrics=[MeanOfLargest()]))

    expected = evaluated(lambda model: model.evaluate(X, Y, batch_size=7, verbose=0, return_dict=True))
    given = evaluated(lambda model: cluster.evaluate(model, X, Y, batch_size=7, verbose=0, return_dict=True))
    assert given == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("model", deep_but([Sums, Halved], Sums))
def test_metric_without_merge_state_is_evaluated_on_batches_of_different_shapes(cluster, model):
    results = []
    for evaluate in (keras.Model.evaluate, cluster.evaluate):
        compiled = model()
        compiled.compile("sgd", "mse", metrics=[MeanOfLargest()])
        results.append(evaluate(compiled, padded(labels=True), verbose=0, return_dict=True))
    assert results[1] == pytest.approx(results[0], rel=1e-5)


class Records(keras.metrics.Metric):
    """A number of records, which is an integer in the model, and a float in Keras's logs."""

    def __init__(self, name="records", **kwargs):
        super().__init__(name=name, **kwargs)
        self.count = self.add_weight(name="count", initializer="zeros", dtype="int32")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.count.assign_add(tf.shape(y_true)[0])

    def result(self):
        return self.count


def test_results_are_floats_and_shown_in_the_order_of_keras(cluster, capsys):
    shown, results = [], []
    for evaluate in (keras.Model.evaluate, cluster.evaluate):
        model = dense(metrics=[Records(), keras.metrics.R2Score(), "mae"])
        results.append(evaluate(model, X, Y, batch_size=7, verbose=2, return_dict=True))
        shown.append(re.findall(r"(\w+): ", capsys.readouterr().out))
    assert len(shown[0]) == 4
    assert (list(results[1]), shown[1]) == (list(results[0]), shown[0])
    assert results[1] == pytest.approx(results[0], rel=1e-5)
    assert all(type(value) is float for logs in results for value in logs.values())
