"""`elasticcb.Cluster` where it is not used as it is meant to be, and what is left of it afterwards."""

import inspect
import os
import signal
import socket
import threading

import keras
import numpy as np
import pytest

import elasticcb
from elasticcb import ExchangeOptions, NetworkOptions, RecoveryOptions
from elasticcb.errors import JobFailedError, UsageError
from elasticcb.settings.definition import AUTO
from elasticcb.settings.names import EVERYDAY, GROUPS

X = np.linspace(0, 1, 64, dtype="float32")[:, None]
Y = 2 * X


def make():
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


class Calls(keras.callbacks.Callback):
    """Calls a function at the end of each epoch."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def on_epoch_end(self, epoch, logs=None):
        self.function()


@pytest.fixture(scope="module")
def cluster():
    with elasticcb.Cluster(kind="inprocess", log_level="ERROR") as cluster:
        yield cluster


def fit(cluster, model=None, **options):
    return cluster.fit(model or make(), X, Y, **{"verbose": 0, **options})


def test_numbers_of_numpy_are_numbers():
    one, two = np.int64(1), np.int64(2)
    options = {"epochs": two, "initial_epoch": one, "batch_size": two, "steps_per_epoch": two, "verbose": np.int64(0)}
    options |= {"validation_data": (X, Y), "validation_freq": [one], "validation_steps": one}
    with elasticcb.Cluster(one, one, kind="inprocess", recovery=RecoveryOptions(max_worker_restarts=one)) as cluster:
        assert fit(cluster, **options).history["loss"]


@pytest.mark.parametrize(
    ("words", "given"),
    [
        ("local_steps=3 can't be combined with updates='sync'", {"updates": "sync", "local_steps": 3}),
        ("exchange=3 is invalid. Expected an elasticcb.ExchangeOptions, such as", {"exchange": 3}),
    ],
)
def test_cluster_says_what_cannot_be(words, given):
    with pytest.raises(UsageError) as caught:
        elasticcb.Cluster(**given)
    assert words in str(caught.value)


def test_cluster_says_all_that_cannot_be_at_once():
    with pytest.raises(UsageError) as caught:
        elasticcb.Cluster(0, kind="cloud", exchange=ExchangeOptions(max_staleness=-1), job_dir="s3://a:b@bucket")
    words = str(caught.value)
    assert words.startswith("`Cluster` can't start, for 4 reasons:\n  1. ")
    for part in ("num_workers=0", "kind='cloud'", "ExchangeOptions(max_staleness=-1)", "contains a password"):
        assert part in words


@pytest.mark.parametrize("method", ["fit", "evaluate", "predict"])
def test_what_is_no_model_is_refused(method, cluster):
    with pytest.raises(
        UsageError, match=rf"Cluster\.{method} takes a keras\.Model as its first argument\. Received .* class str\."
    ):
        getattr(cluster, method)("model", X)


def test_argument_that_stands_in_a_group_now_is_told_with_its_place():
    with pytest.raises(UsageError) as caught:
        elasticcb.Cluster(2, max_staleness=1, embedding_memory_bytes=9, tls=True)
    words = str(caught.value)
    assert "for 3 reasons" in words
    assert "Cluster(exchange=elasticcb.ExchangeOptions(max_staleness=1))" in words
    assert "Cluster(embedding=elasticcb.EmbeddingOptions(memory_bytes=9))" in words
    assert "Cluster(network=elasticcb.NetworkOptions(tls=True))" in words
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'num_wokers'\. Did you mean 'num_workers'\?"):
        elasticcb.Cluster(num_wokers=2)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda on: on.fit(make(), X, Y, epoch=2), r"Cluster\.fit\(\) got .* 'epoch'\. Did you mean 'epochs'\?"),
        (lambda on: on.evaluate(make(), X, Y, batchsize=2), "Did you mean 'batch_size'"),
        (lambda on: on.predict(make(), X, step=2), "Did you mean 'steps'"),
        (lambda on: elasticcb.fit(make(), X, Y, num_worker=2), r"elasticcb\.fit\(\) .*Did you mean 'num_workers'"),
        (lambda on: elasticcb.fit(make(), X, Y, updates="sync"), r"Pass it as cluster=\{'updates': 'sync'\}\."),
    ],
)
def test_misspelled_argument_is_told_with_the_near_one(call, words, cluster):
    with pytest.raises(TypeError, match=words):
        call(cluster)


def test_cluster_shows_what_it_has_and_does(cluster):
    one, seen = "<elasticcb.Cluster: 1 worker, 1 parameter server, inprocess", []
    fit(cluster, callbacks=[Calls(lambda: seen.append(repr(cluster)))])
    assert [*seen, repr(cluster)] == [f"{one}, {state}; {cluster.directory}>" for state in ("in fit", "idle")]
    other = elasticcb.Cluster(num_workers=2, num_ps=3)
    assert repr(other) == "<elasticcb.Cluster: 2 workers, 3 parameter servers, local, not started>"
    other.close()
    assert repr(other) == "<elasticcb.Cluster: 2 workers, 3 parameter servers, local, closed>"


def test_arguments_of_every_day_are_those_of_the_settings():
    taken = inspect.signature(elasticcb.Cluster).parameters
    own = {name for name in taken if name not in GROUPS} - {"directory", "job_dir", "rehearsal", "others"}
    assert own == set(EVERYDAY)
    assert len(taken) <= 22
    for name, setting in EVERYDAY.items():
        assert taken[name].default == (AUTO if setting.may_be_auto else setting.initial)


def test_calls_within_a_callback_of_a_call_are_refused_with_words(cluster):
    def calls():
        with pytest.raises(UsageError, match=r"busy with `fit`\. Call `predict` when"):
            cluster.predict(make(), X)
        with pytest.raises(UsageError, match=r"busy with `fit`\. Call `schedule` when"):
            cluster.schedule(len, "a")
        cluster.close()

    with pytest.raises(UsageError, match="`close` was called inside `fit`"):
        fit(cluster, callbacks=[Calls(calls)])
    assert fit(cluster).history["loss"]


def test_model_that_could_not_be_placed_stays_unplaced(cluster):
    model = make()
    model.build((None, 1))
    with pytest.raises(UsageError, match="busy"):
        fit(cluster, callbacks=[Calls(lambda: cluster.place(model))])
    weights = model.get_weights()
    assert cluster.schedule(len, "abc").fetch() == 3
    cluster.join()
    np.testing.assert_array_equal(model.get_weights()[0], weights[0])


def test_start_within_a_callback_does_nothing_and_history_is_there(cluster):
    model, seen = make(), []
    history = fit(cluster, model, callbacks=[Calls(lambda: (cluster.start(), seen.append(model.history)))])
    assert seen == [history]


def test_close_in_another_thread_ends_a_call_with_words_and_the_cluster_works_again():
    cluster = elasticcb.Cluster(kind="inprocess", log_level="ERROR")
    running, errors = threading.Event(), []

    def run():
        try:
            fit(cluster, epochs=100_000, callbacks=[Calls(running.set)])
        except JobFailedError as error:
            errors.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    assert running.wait(60)
    cluster.close()
    thread.join()
    assert errors == ["The cluster was closed before the job finished."]
    assert fit(cluster).history["loss"]
    cluster.close()


def test_cluster_that_could_not_start_can_start_later():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        cluster = elasticcb.Cluster(kind="inprocess", network=NetworkOptions(port=taken.getsockname()[1]))
        for _ in range(2):
            with pytest.raises(UsageError, match="Can't listen"):
                cluster.start()
        assert cluster.directory == ""
    with cluster:
        assert fit(cluster).history["loss"]


def test_directory_may_be_that_of_another_cluster_and_keeps_its_data(tmp_path):
    with elasticcb.Cluster(kind="inprocess", directory=tmp_path, log_level="ERROR") as one:
        with elasticcb.Cluster(kind="inprocess", directory=tmp_path, log_level="ERROR") as other:
            fit(one, callbacks=[Calls(lambda: fit(other))])
        assert fit(one, epochs=2).epoch == [0, 1]
    assert not list(tmp_path.glob("fit-*"))


def test_model_is_as_before_when_its_first_batch_does_not_fit(cluster):
    model = make()
    before = set(vars(model))
    with pytest.raises(ValueError, match="Dimensions"):
        cluster.fit(model, X, np.ones((64, 3, 2)), verbose=0)
    assert set(vars(model)) - before <= {"history"}


class Interrupts(keras.layers.Layer):
    """As Ctrl-C while the model is built for a call."""

    def build(self, shape):
        os.kill(os.getpid(), signal.SIGINT)


def test_interrupt_while_the_model_is_built_for_a_second_call_raises_keyboard_interrupt(cluster):
    fit(cluster)
    model = keras.Sequential([Interrupts(), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with pytest.raises(KeyboardInterrupt):
        fit(cluster, model)
    assert fit(cluster).history["loss"]


def test_what_was_predicted_is_not_kept(cluster):
    assert cluster.predict(make(), X, verbose=0).shape == (64, 1)
    with cluster._processes.start().server.state() as state:
        assert state.predictions == {}


def test_token_that_no_call_can_carry_is_refused_without_showing_it(monkeypatch):
    monkeypatch.setenv("ELASTICCB_JOB_TOKEN", "geheim ü")
    with pytest.raises(UsageError, match="ELASTICCB_JOB_TOKEN") as caught, elasticcb.Cluster(kind="inprocess"):
        pass
    assert "geheim" not in str(caught.value)
