"""Metrics whose records are spread over workers give what one process would."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from elasticcb.errors import ModelFileError
from elasticcb.model.metric_messages import (
    OUTPUTS,
    PROGRESSIVE,
    flatten_outputs,
    from_metric_states,
    from_outputs,
    to_metric_states,
    to_outputs,
    unflatten_outputs,
    with_outputs,
)
from elasticcb.model.metrics import MetricTransport, ModelMetrics
from elasticcb.settings import Mode

generator = np.random.default_rng(0)
X = generator.normal(size=(40, 3)).astype("float32")
Y = generator.integers(0, 2, size=(40, 1)).astype("float32")
WEIGHT = generator.uniform(0, 2, 40).astype("float32")
TASKS = [slice(0, 7), slice(7, 30), slice(30, 40)]


class LastLabel(keras.metrics.Metric):
    """Can neither be added up nor merged."""

    def __init__(self, name="last", **kwargs):
        super().__init__(name=name, **kwargs)
        self.last = self.add_weight(name="last", shape=(), initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.last.assign(tf.reshape(y_true, [-1])[-1])

    def result(self):
        return self.last


class Largest(keras.metrics.Metric):
    """Brings merge_state."""

    def __init__(self, name="largest", **kwargs):
        super().__init__(name=name, **kwargs)
        self.largest = self.add_weight(name="largest", shape=(), initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.largest.assign(tf.maximum(self.largest, tf.reduce_max(y_pred)))

    def result(self):
        return self.largest

    def merge_state(self, metrics):
        for metric in metrics:
            self.largest.assign(tf.maximum(self.largest, metric.largest))


class Halved(keras.metrics.MeanSquaredError):
    """Changes the result alone, so its state still adds up."""

    def result(self):
        return super().result() / 2


def make(eval_metrics=None, **compiled):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, activation="sigmoid")])
    model.compile("sgd", "mse", **compiled)
    metrics = ModelMetrics(model, eval_metrics or {})
    model.test_step((X[:2], Y[:2]))
    metrics.reset()
    return model, metrics


EVAL_METRICS = {
    "auc": keras.metrics.AUC,
    "halved": Halved,
    "last": LastLabel,
    "largest": Largest,
    "right": lambda: lambda labels, predictions: tf.equal(labels, tf.round(predictions)),
    "average": lambda: lambda labels, predictions: tf.reduce_mean(predictions),
}


def all_metrics():
    return make(
        {name: make_metric() for name, make_metric in EVAL_METRICS.items()},
        metrics=["accuracy", LastLabel(name="final")],
        weighted_metrics=["mae"],
    )


def test_each_metric_travels_in_its_own_way():
    _, metrics = all_metrics()
    assert metrics.transports() == {
        "loss": MetricTransport.SUM,
        "accuracy": MetricTransport.SUM,
        "final": MetricTransport.OUTPUTS,
        "mae": MetricTransport.SUM,
        "auc": MetricTransport.SUM,
        "halved": MetricTransport.SUM,
        "last": MetricTransport.OUTPUTS,
        "largest": MetricTransport.MERGE,
        "right": MetricTransport.SUM,
        "average": MetricTransport.SUM,
    }


def test_merged_tasks_equal_one_process_over_all_records():
    model, metrics = all_metrics()
    of_tasks, outputs = [], []
    for task in TASKS:
        metrics.reset()
        batch = (X[task], Y[task], WEIGHT[task])
        model.test_step(batch)
        states = metrics.states()
        of_tasks.append(from_metric_states(to_metric_states(states)))
        outputs.append((Y[task], model.predict_on_batch(X[task]), WEIGHT[task]))

    whole_model, whole = all_metrics()
    whole_model.test_step((X, Y, WEIGHT))
    expected = whole.results()

    merged = {name: metrics.merge_states(name, [task[name] for task in of_tasks]) for name in of_tasks[0]}
    metrics.load(merged, outputs)
    assert metrics.results() == pytest.approx(expected, rel=1e-6)
    assert metrics.results({"accuracy", "auc"}) == pytest.approx({k: expected[k] for k in ("accuracy", "auc")})


def test_names_of_outputs_nest_the_results_and_may_meet_lists():
    x = keras.Input((3,))
    a, b = keras.layers.Dense(1, name="a")(x), keras.layers.Dense(1, name="b")(x)
    for outputs, labels in (({"a": a, "b": b}, {"a": Y, "b": 1 - Y}), ([a, b], (Y, 1 - Y))):
        model = keras.Model(x, outputs)
        model.compile("sgd")
        model.compute_loss = lambda x, y, y_pred, sample_weight, training: tf.constant(0.0)
        metrics = ModelMetrics(
            model,
            {"a": {"mse": keras.metrics.MeanSquaredError()}, "b": {"mse": keras.metrics.MeanSquaredError()}},
        )
        model.test_step((X, labels))
        predictions = model(X)
        first, second = predictions.values() if isinstance(predictions, dict) else predictions
        expected = {"a": {"mse": np.mean((first - Y) ** 2)}, "b": {"mse": np.mean((second - 1 + Y) ** 2)}}
        nested = metrics.nested_results()
        assert nested == {"loss": 0.0, "a": pytest.approx(expected["a"]), "b": pytest.approx(expected["b"])}
        assert sorted(metrics.results()) == ["a_mse", "b_mse", "loss"]


def test_metric_named_like_one_of_the_model_keeps_its_own_state():
    model, metrics = make({"loss": keras.metrics.MeanAbsoluteError()})
    assert sorted(metrics.units()) == ["loss", "loss_2"]
    model.test_step((X, Y))
    states = metrics.states()
    expected = metrics.results()
    metrics.load(states)
    assert metrics.results() == expected


def test_metric_that_cannot_be_copied_to_be_merged_is_told():
    class NeedsMore(Largest):
        def __init__(self, start, name="more", **kwargs):
            super().__init__(name=name, **kwargs)

    _, metrics = make({"more": NeedsMore(3)})
    with pytest.raises(ModelFileError, match=r"'more' has merge_state.*get_config\(\) with"):
        metrics.merge_states("more", [[np.zeros(())], [np.ones(())]])


RAGGED = tf.ragged.constant([[[1.0], [2.0, 3.0]], [], [[4.0]]])


@pytest.mark.parametrize(
    "structure",
    [Y, (Y, WEIGHT), ({"a": Y, "b.c": X}, {"a": WEIGHT}), (Y, None), RAGGED, {"a": RAGGED, "b": tf.sparse.eye(3)}],
)
def test_outputs_keep_their_structure_and_their_batches_on_the_way(structure):
    batches = from_outputs(to_outputs([flatten_outputs(structure), flatten_outputs(structure)]))
    assert len(batches) == 2
    for arrived in map(unflatten_outputs, batches):
        tf.nest.assert_same_structure(structure, arrived, expand_composites=True)
        flat = [tf.nest.flatten(each, expand_composites=True) for each in (structure, arrived)]
        for sent, received in zip(*flat, strict=True):
            if sent is not None:
                np.testing.assert_array_equal(sent, received)


class FromOne(LastLabel):
    def reset_state(self):
        self.last.assign(1.0)


class Positives(LastLabel):
    """Adds up, like most metrics of users."""

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.last.assign_add(tf.reduce_sum(y_true * y_pred))


class Labels(keras.metrics.Metric):
    """Its state is no variable."""

    def __init__(self, name="labels"):
        super().__init__(name=name)
        self.seen = []

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.seen.append(np.asarray(y_true))

    def result(self):
        return np.concatenate(self.seen).mean() if self.seen else 0.0

    def reset_state(self):
        self.seen = []


def test_training_states_that_cannot_be_summed_come_from_the_outputs_of_all_batches():
    given = {"last": LastLabel, "largest": Largest, "one": FromOne, "positives": Positives, "labels": Labels}

    def both():
        return make({name: kind() for name, kind in given.items()}, metrics=[Labels("final")], run_eagerly=True)

    model, metrics = both()
    metrics.replayed = metrics.try_out((X[:2], np.array([[0.0], [1.0]], "float32")))
    assert metrics.replayed == {"last", "one", "labels", "final"}
    assert metrics.merging_units == {"largest", f"{PROGRESSIVE}largest", OUTPUTS}
    batches = []
    for task in TASKS:
        metrics.reset()
        with metrics.kept_outputs(Mode.TRAINING) as outputs:
            model.train_step((X[task], Y[task]))
        states = {name: states for name, states in metrics.states().items() if name in metrics.training_units()}
        batches.append(with_outputs(states | {"positives": [metrics.units()["positives"].last.numpy()]}, outputs))
    names = metrics.training_units()

    whole_model, whole = both()
    for task in TASKS:
        whole_model.train_step((X[task], Y[task]))
    expected = whole.results(step="train")
    metrics.load({name: metrics.merge_states(name, [batch[name] for batch in batches]) for name in names})
    assert metrics.results(step="train") == pytest.approx(expected, rel=1e-5)


def test_a_metric_without_variables_that_the_model_updates_is_refused():
    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense, self.labels = keras.layers.Dense(1), Labels()

        def call(self, x):
            return self.dense(x)

        def test_step(self, data):
            x, y = data
            self.labels.update_state(y, self(x))
            return {"labels": self.labels.result()}

    model = Own()
    model.compile("sgd", "mse", run_eagerly=True)
    metrics = ModelMetrics(model, {})
    model.test_step((X, Y))
    with pytest.raises(ModelFileError, match=r"'labels' \(Labels\) has no variables.*compile\(metrics="):
        metrics.transports()


def test_logs_of_a_step_have_the_order_of_its_own_results():
    class Own(keras.Sequential):
        def train_step(self, data):
            return {
                "a": self.compute_loss(None, data[1], self(data[0])),
                "compiled": {"b": tf.constant(1.0), "c": tf.constant(2.0)},
            }

        def test_step(self, data):
            return {**self.train_step(data)["compiled"], "bb": tf.constant(3.0)}

    model = Own([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", run_eagerly=True)
    metrics = ModelMetrics(model, {})
    for step in (model.train_step, model.test_step):
        step((X, Y))
    assert list(metrics.in_order({"c": 2.0, "bb": 3.0, "b": 1.0}, "test")) == ["b", "bb", "c"]
    assert list(metrics.in_order({"c": 2.0, "bb": 3.0, "b": 1.0})) == ["bb", "b", "c"]


@pytest.mark.parametrize(("monitor", "better", "worse"), [("val_auc", 0.9, 0.8), ("val_error", 0.1, 0.2)])
def test_callbacks_know_whether_a_metric_of_eval_metrics_fn_is_to_grow(monitor, better, worse):
    model, metrics = make({"auc": keras.metrics.AUC(), "error": keras.metrics.MeanAbsoluteError()})
    stopping = keras.callbacks.EarlyStopping(monitor, patience=3)
    stopping.set_model(model)
    metrics.give_directions([stopping, keras.callbacks.TerminateOnNaN()])
    stopping.on_train_begin()
    for epoch, value in enumerate((worse, better, worse)):
        stopping.on_epoch_end(epoch, {monitor: value})
    assert stopping.best == better
    chosen = keras.callbacks.EarlyStopping(monitor, mode="min")
    metrics.give_directions([chosen])
    assert chosen.mode == "min"
