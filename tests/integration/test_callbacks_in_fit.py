"""Hooks that Keras's `fit`, `evaluate` and `predict` call on the caller's object, and what they may set there."""

import contextlib
import logging
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


class Writes(keras.callbacks.Callback):
    """Lines of a file from hooks of two processes; its `on_train_end` fails, if it is told so."""

    def __init__(self, path, fails):
        super().__init__()
        self.path, self.fails = path, fails

    def on_train_begin(self, logs=None):
        self.file = open(self.path, "a")  # noqa: SIM115

    def on_epoch_begin(self, epoch, logs=None):
        self.file.write(f"epoch {epoch}\n")

    def on_train_batch_end(self, batch, logs=None):
        self.file.write(f"{batch}\n")

    def on_train_end(self, logs=None):
        self.file.write("end\n")
        if self.fails:
            raise TimeoutError
        self.file.close()


def test_files_that_hooks_write_are_complete_and_a_failed_fit_leaves_the_model_and_its_optimizer_as_keras_does(
    tmp_path,
):
    def trained(fit, name):
        model = make()
        model.optimizer = keras.optimizers.Adam()
        model.set_weights([np.ones((4, 1)), np.ones(1)])
        for fails in (True, False):
            with contextlib.suppress(TimeoutError):
                fit(
                    model,
                    X,
                    Y,
                    epochs=2,
                    verbose=0,
                    shuffle=False,
                    callbacks=[Writes(tmp_path / f"{name}{fails}", fails)],
                )
        return [*model.get_weights(), *map(np.asarray, model.optimizer.variables)]

    expected = trained(lambda model, *args, **options: model.fit(*args, **options), "keras")
    with elasticcb.Cluster() as cluster:
        found = trained(cluster.fit, "cluster")
    for one, other in zip(expected, found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    assert (tmp_path / "clusterFalse").read_text() == (tmp_path / "kerasFalse").read_text()


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


class Kept(logging.Handler):
    def __init__(self):
        super().__init__()
        self.records = []

    def emit(self, record):
        self.records.append((self.format(record), record.levelname, getattr(record, "share", None)))
        if record.msg == "refused":
            raise ValueError("a handler of the caller's")


class Logs(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        log = logging.getLogger("of_a_program.part")
        print("before")
        log.debug("batch %d", batch, extra={"share": np.float32(0.5), "model": self.model})
        try:
            raise ValueError("tried")
        except ValueError:
            log.exception("failed")
        logging.warning("to the root")
        log.info("only the first job: %s", log.isEnabledFor(logging.DEBUG))
        print("after")


class IsRefused(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        logging.getLogger("of_a_program").error("refused")


def test_what_hooks_log_on_workers_gets_to_the_callers_handlers_in_order(capfd, tmp_path, monkeypatch):
    log, kept = logging.getLogger("of_a_program"), Kept()
    shown = logging.StreamHandler(sys.stdout)
    monkeypatch.setattr(log, "handlers", [kept, shown])
    monkeypatch.setattr(log, "propagate", False)
    monkeypatch.setattr(logging.root, "handlers", [])
    log.setLevel("DEBUG")
    with elasticcb.Cluster(num_workers=1, directory=str(tmp_path)) as cluster:
        cluster.fit(make(), X, Y, verbose=0, batch_size=64, callbacks=[Logs()])
        output = capfd.readouterr()
        assert [line for line in output.out.splitlines() if line[0] not in " T"] == [
            "before  [worker 0]", "batch 0", "failed", "ValueError: tried", "only the first job: True",
            "after  [worker 0]",
        ]  # fmt: skip
        assert output.err.count("to the root") == output.err.count("to the root\n") == 1
        debug, failed, info = kept.records
        assert (debug, info[1]) == (("batch 0", "DEBUG", 0.5), "INFO")
        assert failed[0].startswith("failed\nTraceback")
        assert failed[0].endswith("\nValueError: tried")

        log.setLevel(logging.NOTSET)
        monkeypatch.setattr(log, "handlers", [])
        logging.getLogger("of_a_program.part").addHandler(kept)
        cluster.fit(make(), X, Y, verbose=0, batch_size=64, callbacks=[Logs()])
        logging.getLogger("of_a_program.part").removeHandler(kept)
        assert [message.partition("\n")[0] for message, *_ in kept.records[3:]] == ["failed"]

        log.addHandler(kept)
        with pytest.raises(CallbackError, match="ValueError: a handler of the caller's"):
            cluster.fit(make(), X, Y, verbose=0, batch_size=64, callbacks=[IsRefused()])
    (file,) = tmp_path.rglob("worker-0.log")
    of_worker = file.read_text()
    assert of_worker.count(" worker-0 D of_a_program.part: batch 0\n") == 1  # not in the second job
    assert of_worker.count(" worker-0 W root: to the root\n") == 2


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
