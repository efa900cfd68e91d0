"""Workers that train by themselves, and have how far their weights moved merged."""

import re
import signal

import keras
import numpy as np
import pytest

import elasticcb
from elasticcb.errors import JobFailedError
from elasticcb.worker.local_updates import LocalUpdates
from jobs import (
    LINEAR_MODEL,
    linear_data,
    number,
    records_trained,
    train_flags,
    write_model_file,
)

RECORDS = 6_000


@pytest.fixture
def data(tmp_path):
    write_model_file(tmp_path, LINEAR_MODEL, "linear")
    linear_data(tmp_path, train=RECORDS, test=400)
    return tmp_path


@pytest.mark.timeout(600)
def test_whichever_process_dies_no_record_is_lost_and_what_is_merged_counts_once(data, start_job, faults):
    happened = [
        faults.fail_at("worker", 0, "trains a batch", nth=33),
        faults.fail_at("worker", 0, "reports a task", nth=2),  # the next one
        faults.fail_at("worker", 1, "has what it trained merged", nth=4),
        faults.fail_at("worker", 1, "has reported a task", nth=2),
        faults.fail_at("ps", 1, "has applied a push", nth=40),
        faults.fail_at("master", 0, "has taken a report", nth=12),
    ]
    small = {"evaluation_steps": 200, "checkpoint_interval": 0.2, "num_epochs": 2, "num_ps": 2}
    job = start_job("train", *train_flags(data, "linear", updates="local", local_steps=5, **small))
    assert job.finish() == 0, job.output
    assert all(each() for each in happened)
    assert records_trained(job.output) == [RECORDS] * 2
    assert number(job.output, "duplicate records (at most)") < RECORDS  # tasks, and what the server had not saved
    assert number(job.output, "workers lost") == 4
    assert float(re.findall(r"Evaluation at version .*loss ([\d.e-]+)", job.output)[-1]) < 1e-6
    assert {int(float(n)) for n in re.findall(r"Evaluation at version .*rows ([\d.]+)", job.output)} == {400}
    job.assert_no_orphans()


def test_sigterm_to_a_worker_merges_what_it_has_trained(data, start_job):
    flags = train_flags(data, "linear", updates="local", local_steps=1_000, num_minibatches_per_task=700, num_workers=1)
    job = start_job("train", *flags, "--num_epochs=6")
    job.wait_for_line(r"epoch [2345]/6")
    job.kill("worker", 0, signal.SIGTERM)
    assert job.finish() == 0, job.output
    assert records_trained(job.output) == [RECORDS] * 6
    assert number(job.output, "duplicate records (at most)") == 0


@pytest.mark.parametrize(("batches", "expected"), [(24, [4] * 6), (8, [2] * 4)])
def test_tasks_of_fit_are_whole_windows_where_each_worker_gets_several(monkeypatch, batches, expected):
    windows, merge = [], LocalUpdates.merge

    def noted(self, *given):
        windows.append(self._batches)
        return merge(self, *given)

    monkeypatch.setattr(LocalUpdates, "merge", noted)
    x = np.ones((16 * batches, 4), "float32")
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with elasticcb.Cluster(kind="inprocess", updates="local", local_steps=4, log_level="ERROR") as cluster:
        cluster.fit(model, x, x[:, :1], batch_size=16, verbose=0)
    assert windows == expected


def table_model(**options):
    keras.utils.set_random_seed(2)
    ids = keras.Input((3,), dtype="int64")
    x = keras.layers.Flatten()(keras.layers.Embedding(500, 8)(ids))
    x = keras.layers.Dense(8, activation="relu")(x)
    model = keras.Model(ids, keras.layers.Dense(1)(x))
    model.compile(**{"optimizer": keras.optimizers.SGD(0.1), "loss": "mse", **options})
    return model


IDS = np.random.default_rng(3).integers(0, 500, (640, 3))
LABELS = np.sin(IDS).sum(1, keepdims=True).astype("float32")
SERVED = elasticcb.EmbeddingOptions(threshold_bytes=0)


class Halved(keras.callbacks.Callback):
    """The learning rate of each batch of an epoch is half that of the one before."""

    def on_train_batch_begin(self, batch, logs=None):
        self.model.optimizer.learning_rate = 0.2 * 0.5 ** (batch % 40)


@pytest.mark.parametrize(
    ("rate", "callbacks"),
    [
        (keras.optimizers.schedules.ExponentialDecay(0.2, 8, 0.5), []),
        (0.1, [Halved()]),
    ],
    ids=["schedule", "callback"],
)
def test_rows_of_embedding_tables_are_updated_by_the_servers_at_each_batch(rate, callbacks):
    fit = {"batch_size": 16, "epochs": 2, "shuffle": False, "verbose": 0, "callbacks": callbacks}
    expected, model = (table_model(optimizer=keras.optimizers.SGD(rate)) for _ in range(2))
    expected.fit(IDS, LABELS, **fit)
    with elasticcb.Cluster(1, 2, kind="inprocess", updates="local", embedding=SERVED, log_level="WARNING") as cluster:
        cluster.fit(model, IDS, LABELS, **fit)
    for mine, theirs in zip(model.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-6)
    assert int(model.optimizer.iterations) == 80


def test_several_workers_with_tables_learn_as_one_process_does():
    fit = {"batch_size": 16, "epochs": 12, "verbose": 0}
    adam = {"optimizer": keras.optimizers.Adam(0.01)}
    with elasticcb.Cluster(
        2, 2, kind="inprocess", updates="local", local_steps=4, embedding=SERVED, log_level="WARNING"
    ) as cluster:
        losses = cluster.fit(table_model(**adam), IDS, LABELS, **fit).history["loss"]
    assert losses[-1] < 0.1 * losses[0]


def test_gradients_that_are_clipped_together_stay_together():
    fit = {"batch_size": 16, "shuffle": False, "verbose": 0}
    expected, model = (table_model(optimizer=keras.optimizers.SGD(0.1, global_clipnorm=0.1)) for _ in range(2))
    expected.fit(IDS, LABELS, **fit)
    with elasticcb.Cluster(1, 1, kind="inprocess", updates="local", embedding=SERVED, log_level="ERROR") as cluster:
        cluster.fit(model, IDS, LABELS, **fit)
        for mine, theirs in zip(model.get_weights(), expected.get_weights(), strict=True):
            np.testing.assert_allclose(mine, theirs, atol=1e-6)
        own = keras.Sequential(
            [keras.Input((3,), dtype="int64"), elasticcb.layers.Embedding(input_dim=500, output_dim=8)]
        )
        own.compile(keras.optimizers.SGD(0.1, global_clipnorm=0.1), "mse")
        with pytest.raises(JobFailedError, match="has global_clipnorm, and the model has embedding tables"):
            cluster.fit(own, IDS, np.zeros((640, 3, 8)), verbose=0)


class Spoiled(keras.losses.Loss):
    """Its gradient is NaN for labels of 900, though it is finite itself."""

    def call(self, labels, predictions):
        spoiled = keras.ops.cast(labels > 800, "float32")
        errors = keras.ops.square(predictions - labels) * (1 - spoiled)
        return keras.ops.mean(errors + spoiled * keras.ops.sqrt(keras.ops.abs(predictions * 0.0)), -1)


@pytest.mark.parametrize(  # in the second window of a task, of which 9 is the end
    ("place", "spoiled"), [pytest.param(7, 900.0, id="7-gradient"), pytest.param(9, np.nan, id="9-loss")]
)
def test_no_batch_but_the_one_with_nan_is_passed_over(place, spoiled):
    x = np.random.default_rng(5).normal(size=(640, 4)).astype("float32")
    y = x.sum(1, keepdims=True)
    bad = slice(16 * place, 16 * place + 16)
    labels = y.copy()
    labels[bad] = spoiled

    def model():
        keras.utils.set_random_seed(4)
        made = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8), keras.layers.Dense(1)])
        made.compile(keras.optimizers.SGD(0.05, momentum=0.9), Spoiled())
        return made

    fit = {"batch_size": 16, "shuffle": False, "verbose": 0}
    expected, found = model(), model()
    history = expected.fit(np.delete(x, bad, 0), np.delete(y, bad, 0), **fit).history
    with elasticcb.Cluster(
        kind="inprocess", updates="local", local_steps=5, non_finite="skip", log_level="ERROR"
    ) as cluster:
        np.testing.assert_allclose(cluster.fit(found, x, labels, **fit).history["loss"], history["loss"], rtol=1e-5)
    for mine, theirs in zip(found.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-5)


def test_rows_of_tables_do_not_move_again_when_a_batch_with_nan_is_passed_over():
    fit = {"batch_size": 16, "shuffle": False, "verbose": 0}
    labels = LABELS.copy()
    labels[96:112] = np.nan
    expected, model = table_model(), table_model()
    expected.fit(np.delete(IDS, slice(96, 112), 0), np.delete(LABELS, slice(96, 112), 0), **fit)
    with elasticcb.Cluster(
        kind="inprocess", updates="local", non_finite="skip", embedding=SERVED, log_level="ERROR"
    ) as cluster:
        cluster.fit(model, IDS, labels, **fit)
    for mine, theirs in zip(model.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-6)
