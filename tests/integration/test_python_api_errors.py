"""`elasticcb.Cluster` next to `keras.Model`: mistakes are answered in the same words, and all errors in some."""

import re
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import elasticcb
from elasticcb.errors import JobFailedError, UsageError
from keras_calls import Keras, X, Y, dataset, generator, make


@pytest.fixture(scope="module")
def cluster():
    with elasticcb.Cluster(kind="inprocess", log_level="ERROR", updates="sync") as cluster:
        yield cluster


def zero_division(labels, predictions):
    raise ZeroDivisionError("in the loss")


MISTAKES = {
    "not compiled": lambda on: on.fit(make(compiled=False), X, Y),
    "different lengths of weights": lambda on: on.fit(make(), X, Y, sample_weight=np.ones(3)),
    "validation_split of 1": lambda on: on.fit(make(), X, Y, validation_split=1.0),
    "validation_split of one row": lambda on: on.fit(make(), X[:1], Y[:1], validation_split=0.1),
    "validation_split of a dataset": lambda on: on.fit(make(), dataset(), validation_split=0.1),
    "validation_split of a generator": lambda on: on.fit(make(), generator(), validation_split=0.1),
    "validation data of four parts": lambda on: on.fit(make(), X, Y, validation_data=(1, 2, 3, 4)),
    "validation_freq of a string": lambda on: on.fit(make(), X, Y, validation_data=(X, Y), validation_freq="a"),
    "x of a string": lambda on: on.fit(make(), "abc", Y),
    "epochs of a float": lambda on: on.fit(make(), X, Y, epochs=1.5),
    "loss that raises": lambda on: on.fit(make(loss=zero_division), X, Y),
    "labels of a wrong shape": lambda on: on.fit(make(), X, np.ones((64, 3, 2))),
    "callback that raises": lambda on: on.fit(
        make(), X, Y, callbacks=[keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: logs["none"])]
    ),
}


def raised(call, on):
    with pytest.raises(Exception) as caught:
        call(on)
    return caught.value


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake_is_answered_as_by_keras(name, cluster):
    expected, given = raised(MISTAKES[name], Keras()), raised(MISTAKES[name], cluster)
    assert type(given) is type(expected)
    words = [re.sub(r"sequential_\d+/?|dense_\d+|_\d+/|node \S+|0x\w+", "", str(error)) for error in (given, expected)]
    assert words[0] == words[1]


@pytest.mark.parametrize(
    ("words", "call"),
    [
        ("initial_epoch=-1", lambda on: on.fit(make(), X, Y, initial_epoch=-1)),
        ("at least one batch", lambda on: on.fit(make(), X[:0], Y[:0])),
        ("at least one batch", lambda on: on.predict(make(), dataset().take(0))),
        ("steps_per_epoch=None", lambda on: on.fit(make(), dataset().repeat())),
        ("validation_steps=None", lambda on: on.fit(make(), X, Y, validation_data=dataset().repeat())),
        ("`steps_per_epoch` must", lambda on: on.fit(make(), lambda context: dataset())),
        ("`validation_freq` must be at least 1", lambda on: on.fit(make(), X, Y, validation_freq=0)),
        ("batch_size=-1", lambda on: on.fit(make(), X, Y, batch_size=-1)),
        ("steps_per_epoch=-1", lambda on: on.fit(make(), dataset(), steps_per_epoch=-1)),
        ("validation_split=-0.5", lambda on: on.fit(make(), X, Y, validation_split=-0.5)),
        ("validation_split=2.0", lambda on: on.fit(make(), X, Y, validation_split=2.0)),
        ("steps=-1", lambda on: on.predict(make(), X, steps=-1)),
        ("gives no labels in training", lambda on: on.fit(make(), X)),
        ("gives no labels in evaluation", lambda on: on.fit(make(), X, Y, validation_data=X)),
    ],
)
def test_what_keras_lets_pass_or_never_ends_is_an_error_with_words(words, call, cluster):
    with pytest.raises(ValueError, match=re.escape(words)):
        call(cluster)


@pytest.mark.parametrize(
    ("words", "call"),
    [
        ("batch_size=16.0", lambda on: on.fit(make(), X, Y, batch_size=16.0)),
        ("validation_steps=1.0", lambda on: on.fit(make(), X, Y, validation_data=(X, Y), validation_steps=1.0)),
        ("steps='2'", lambda on: on.evaluate(make(), X, Y, steps="2")),
    ],
)
def test_number_that_is_no_integer_is_an_error_that_names_the_argument(words, call, cluster):
    with pytest.raises(TypeError, match=f"must be an integer. Received: {words}"):
        call(cluster)


@pytest.mark.parametrize(
    "call",
    [
        lambda on: on.fit(make(), X, Y, batch_size=0, steps_per_epoch=0, shuffle=False),
        lambda on: on.fit(make(), (pair for pair in [(X, Y)] * 3), steps_per_epoch=0),
        lambda on: on.fit(make(), X, Y, batch_size=16, steps_per_epoch=3, shuffle=False),
        lambda on: on.fit(make(), X, Y, batch_size=16, steps_per_epoch=100, shuffle=False),
    ],
)
@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_zero_and_many_steps_are_what_they_are_in_keras(call, cluster):
    expected, given = call(Keras()), call(cluster)
    assert given.history["loss"] == pytest.approx(expected.history["loss"], rel=1e-5)
    assert expected.params["steps"] in (given.params["steps"], None)  # None: Keras has not seen the end of a generator


def test_data_that_lasts_for_all_epochs_is_not_warned_of(cluster):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Your input ran out of data")
        cluster.fit(make(), X, Y, batch_size=16, steps_per_epoch=3)
        with pytest.raises(UserWarning, match="ran out of data"):
            cluster.fit(make(), X, Y, batch_size=16, steps_per_epoch=3, epochs=2)


@pytest.mark.parametrize(
    ("callbacks", "words"), [([3], "Received: 3"), ([keras.callbacks.CSVLogger], r"CSVLogger\(\)")]
)
def test_callback_that_is_none_is_refused(callbacks, words, cluster):
    with pytest.raises(TypeError, match=words):
        cluster.fit(make(), X, Y, callbacks=callbacks)


def test_error_of_keras_that_texts_are_no_numbers_has_a_note_on_what_to_do(cluster):
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    error = raised(lambda on: on.fit(model, tf.constant([["a"]] * 8), np.ones((8, 1)), verbose=0), cluster)
    assert "Cast string to float" in str(error)
    assert "column_dtypes" in error.__notes__[-1]


def test_error_of_the_user_shows_the_users_own_frames(cluster):
    error = raised(MISTAKES["loss that raises"], cluster)
    names = [frame.name for frame in pytest.ExceptionInfo.from_exception(error).traceback]
    assert names[-1] == "zero_division"
    assert "one_step_on_data" not in names
    assert error.__cause__ is None


class RaisesOnWorker(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        raise LookupError("no such thing")


def test_error_in_a_hook_on_a_worker_names_hook_and_line_once_and_the_cluster_works_again(cluster):
    with pytest.raises(JobFailedError, match="on_train_batch_end") as caught:
        cluster.fit(make(), X, Y, callbacks=[RaisesOnWorker()], verbose=0)
    text = str(caught.value)
    assert text.count('raise LookupError("no such thing")') == 1
    assert "test_python_api_errors.py" in text
    assert "It was tried" not in text
    assert len(text.splitlines()) < 25
    assert cluster.fit(make(), X, Y, verbose=0).history["loss"]


class HoldsAFile(keras.callbacks.Callback):
    def __init__(self, file):
        super().__init__()
        self.file = file

    def on_train_batch_end(self, batch, logs=None):
        self.file.write("x")


def test_callback_that_cannot_be_pickled_is_named(cluster, tmp_path):
    with (tmp_path / "file").open("w") as file, pytest.raises(UsageError, match="HoldsAFile") as caught:
        cluster.fit(make(), X, Y, callbacks=[HoldsAFile(file)], verbose=0)
    assert "not opened for reading" in str(caught.value)
