"""Hooks that Keras's `fit`, `evaluate` and `predict` call on the caller's object, and what they may set there."""

import os
import re
import sys

import keras
import numpy as np
import pytest

import elasticcb
from elasticcb.callbacks import runs_on
from elasticcb.errors import CallbackError, JobFailedError, UsageError

X = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
Y = X.sum(axis=1, keepdims=True)


@pytest.fixture(scope="module")
def cluster():
    with elasticcb.Cluster(kind="inprocess") as cluster:
        yield cluster


def make():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


class Whole(keras.callbacks.Callback):
    """Training as a whole, with the names of the hooks that ran on this object."""

    def __init__(self):
        super().__init__()
        self.called = []

    def on_train_begin(self, logs=None):
        self.called.append("begin")
        self.model.set_weights([np.zeros_like(weight) for weight in self.model.get_weights()])

    def on_train_end(self, logs=None):
        self.called.append("end")
        self.model.set_weights([np.round(weight, 1) for weight in self.model.get_weights()])


class Batches(Whole):
    def on_train_batch_end(self, batch, logs=None):
        self.called.append("batch")


def test_training_as_a_whole_is_called_on_the_callers_object(cluster):
    whole, batches = Whole(), Batches()
    model = make()
    cluster.fit(model, X, Y, epochs=1, verbose=0, callbacks=[whole, batches])
    assert whole.called == ["begin", "end"]
    assert batches.called == ["begin", "batch", "batch", "end"]
    kernel, bias = model.get_weights()
    assert np.any(kernel)
    for weight in (kernel, bias):
        assert np.array_equal(weight, np.round(weight, 1))


def test_outputs_of_a_batch_have_keras_name(cluster, tmp_path):
    folder = str(tmp_path)

    class Outputs(keras.callbacks.Callback):
        def on_predict_batch_end(self, batch, logs=None):
            assert logs["outputs"] is logs["predictions"]
            np.save(f"{folder}/{batch}.npy", logs["outputs"])

    model = make()
    predicted = cluster.predict(model, X, verbose=0, callbacks=[Outputs()])
    saved = np.concatenate([np.load(tmp_path / f"{batch}.npy") for batch in range(2)])
    np.testing.assert_array_equal(saved, predicted)


def test_a_hook_on_the_only_worker_ends_training_with_its_batch_and_the_callers_model_knows_it(cluster):
    class Stops(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.stop_training = batch == 2

    model = make()
    history = cluster.fit(model, X, Y, batch_size=8, epochs=3, verbose=0, callbacks=[Stops()])
    assert history.epoch == [0]
    assert int(model.optimizer.iterations) == 3
    cluster.evaluate(model, X, Y, verbose=0)
    cluster.predict(model, X, verbose=0)
    assert model.stop_training is True
    cluster.fit(model, X, Y, verbose=0)
    assert model.stop_training is False


def test_limits_of_kerass_configuration_hold(cluster):
    keras.config.set_max_epochs(2)
    keras.config.set_max_steps_per_epoch(1)
    try:
        model = make()
        with pytest.warns(UserWarning, match="Limiting epochs to 2"):
            history = cluster.fit(model, X, Y, epochs=5, verbose=0)
        assert history.epoch == [0, 1]
        assert int(model.optimizer.iterations) == 2
    finally:
        keras.config.set_max_epochs(None)
        keras.config.set_max_steps_per_epoch(None)


def test_evaluation_and_prediction_that_a_callback_wants_to_stop_are_refused_in_words():
    class Stops(keras.callbacks.Callback):
        def on_test_batch_end(self, batch, logs=None):
            self.model.stop_evaluating = True

    @runs_on("master")
    class StopsHere(keras.callbacks.Callback):
        def on_predict_batch_end(self, batch, logs=None):
            self.model.stop_predicting = True

    with elasticcb.Cluster(kind="inprocess") as cluster:
        words = r"Stops failed in on_test_batch_end on worker .*: It set model.stop_evaluating, .*`steps`"
        with pytest.raises(JobFailedError, match=words):
            cluster.evaluate(make(), X, Y, verbose=0, callbacks=[Stops()])
        with pytest.raises(CallbackError, match=r"It set model\.stop_predicting"):
            cluster.predict(make(), X, verbose=0, callbacks=[StopsHere()])


class EveryHook(keras.callbacks.Callback):
    """Keeps all calls, an average of the weights to evaluate with, and sets the rate."""

    def __init__(self, lines):
        super().__init__()
        self.lines, self.step = lines, 0

    def on_train_begin(self, logs=None):
        self.average = self.model.get_weights()

    def on_train_batch_end(self, batch, logs=None):
        self.step += 1
        self.average = [0.5 * (old + new) for old, new in zip(self.average, self.model.get_weights(), strict=True)]
        self.model.optimizer.learning_rate = 0.1 / (1 + self.step)

    def on_test_begin(self, logs=None):
        self.kept = self.model.get_weights()
        self.model.set_weights(self.average)

    def on_test_end(self, logs=None):
        self.model.set_weights(self.kept)

    def on_train_end(self, logs=None):
        self.model.set_weights(self.average)


def recorded(name):
    inner = getattr(EveryHook, name)

    def hook(self, *values, logs=None):
        *values, logs = (*values, logs) if logs is not None else values
        rate = 0.0 if "_batch_" in name and "train" not in name else float(self.model.optimizer.learning_rate)
        numbers = {key: float(value) for key, value in (logs or {}).items() if key != "outputs"}
        self.lines.append((name, *values, rate, numbers))
        inner(self, *values, logs)

    setattr(EveryHook, name, hook)


for each in (name for name in dir(keras.callbacks.Callback) if name.startswith("on_")):
    if "_batch_" not in each or not each.startswith("on_batch"):
        recorded(each)


@pytest.mark.parametrize("updates", ["local", "async"])
def test_with_one_worker_all_hooks_of_a_callback_see_one_state_as_in_keras(updates):
    results = []
    with elasticcb.Cluster(kind="inprocess", updates=updates) as cluster:
        for on in (None, cluster):
            keras.utils.set_random_seed(1)
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse", metrics=["mae", keras.metrics.RootMeanSquaredError(name="rms")])
            callback, outside = EveryHook([]), []
            functions = keras.callbacks.LambdaCallback(
                on_train_batch_end=lambda batch, logs, outside=outside: outside.append(logs["loss"]),
                on_epoch_end=lambda epoch, logs, outside=outside: outside.append(sum(outside)),
            )
            calls = model if on is None else on
            given = () if on is None else (model,)
            options = {"batch_size": 16, "verbose": 0, "callbacks": [callback, functions]}
            calls.fit(*given, X, Y, epochs=2, shuffle=False, validation_data=(X[:40], Y[:40]), **options)
            calls.evaluate(*given, X, Y, **options)
            calls.predict(*given, X, **options)
            results.append((callback.lines, callback.step, model.get_weights(), callback.average))
    expected, found = results
    assert [line[:-2] for line in found[0]] == [line[:-2] for line in expected[0]]
    for mine, keras_own in zip(found[0], expected[0], strict=True):
        assert mine[-2:] == (pytest.approx(keras_own[-2], rel=1e-5), pytest.approx(keras_own[-1], rel=1e-4)), mine
    assert found[1] == expected[1] == 8
    for mine, keras_own in zip([*found[2], *found[3]], [*expected[2], *expected[3]], strict=True):
        np.testing.assert_allclose(mine, keras_own, rtol=1e-4)


def test_what_a_hook_on_the_master_opens_stays_there():
    lines = None

    class Opens(keras.callbacks.Callback):
        batches, begun = 0, 0

        def __init__(self):
            super().__init__()
            self.log = None

        def on_train_begin(self, logs=None):
            self.begun += 1

        def on_epoch_begin(self, epoch, logs=None):
            nonlocal lines
            self.file = self.log = open(os.devnull, "w")  # noqa: SIM115
            lines = (line for line in "ab")

        def on_epoch_end(self, epoch, logs=None):
            assert self.file is self.log
            self.file.close()
            assert next(lines) == "a"

        def on_train_batch_end(self, batch, logs=None):
            self.batches += 1

    opens = Opens()
    with elasticcb.Cluster(kind="inprocess") as cluster:
        cluster.fit(make(), X, Y, epochs=2, batch_size=32, verbose=0, callbacks=[opens])
    assert (opens.batches, opens.begun) == (4, 1)


class Prints(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        print("epoch", epoch)

    def on_train_batch_end(self, batch, logs=None):
        print("batch", batch)
        print("to errors", file=sys.stderr)

    def on_test_end(self, logs=None):
        print("tested:", *(f"{name} {value:.1f}" for name, value in logs.items()))
        assert logs["metrics"] == logs


def test_what_hooks_print_on_workers_is_in_the_callers_output_in_order(capfd):
    with elasticcb.Cluster(num_workers=1) as cluster:
        cluster.fit(make(), X, Y, epochs=2, batch_size=32, verbose=0, validation_data=(X, Y), callbacks=[Prints()])
        output = capfd.readouterr()
    lines = [re.sub(r"[0-9.]+$", "", line) for line in output.out.splitlines()]
    of_epoch = ["epoch ", "batch 0  [worker 0]", "batch 1  [worker 0]", "tested: loss "]
    assert lines == of_epoch * 2
    assert output.err.count("to errors  [worker 0]\n") == 4


def test_hooks_that_would_differ_with_two_workers_are_refused_before_training():
    with elasticcb.Cluster(num_workers=2, kind="inprocess") as cluster, pytest.raises(UsageError) as caught:
        cluster.fit(make(), X, Y, verbose=0, validation_data=(X, Y), callbacks=[EveryHook([])])
    assert "self.average" in str(caught.value)
    assert "num_workers=1" in str(caught.value)


class ResetsMetrics(keras.callbacks.Callback):
    def __init__(self, batches):
        super().__init__()
        self.batches = batches

    def on_train_batch_begin(self, batch, logs=None):
        if batch in self.batches:
            self.model.reset_metrics()

    def on_test_batch_begin(self, batch, logs=None):
        self.on_train_batch_begin(batch)


def test_metrics_that_hooks_reset_start_again_there_whichever_task_it_is():
    options = {"epochs": 2, "batch_size": 4, "verbose": 0, "shuffle": False, "validation_data": (X, Y)}
    resets = ResetsMetrics([10])  # within the second task and its second window
    first, second = make(), make()
    second.set_weights(first.get_weights())
    expected = first.fit(X, Y, callbacks=[resets], **options).history
    with elasticcb.Cluster(kind="inprocess", updates="local", local_steps=3) as cluster:
        found = cluster.fit(second, X, Y, callbacks=[resets], **options).history
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-5)


def test_metrics_that_hooks_reset_on_several_workers_cause_a_warning(caplog):
    with elasticcb.Cluster(num_workers=2) as cluster:
        cluster.fit(make(), X, Y, batch_size=8, verbose=0, callbacks=[ResetsMetrics(range(64))])
    assert caplog.text.count("on_train_batch_begin of ResetsMetrics changes the metrics") == 1
