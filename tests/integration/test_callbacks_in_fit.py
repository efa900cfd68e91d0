"""Hooks that Keras's `fit`, `evaluate` and `predict` call on the caller's object, and what they may set there."""

import keras
import numpy as np
import pytest

import elasticcb
from elasticcb.callbacks import runs_on
from elasticcb.errors import CallbackError, JobFailedError

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
    assert whole.called == batches.called == ["begin", "end"]  # batches are the copies'
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


def test_model_of_the_caller_knows_that_a_hook_on_a_worker_ended_training(cluster):
    class Stops(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.stop_training = True

    model = make()
    history = cluster.fit(model, X, Y, epochs=3, verbose=0, callbacks=[Stops()])
    assert history.epoch == [0]
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
