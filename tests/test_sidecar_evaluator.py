"""`SidecarEvaluator` beside real training: jobs and `keras.callbacks.ModelCheckpoint`."""

from __future__ import annotations

import logging
import shutil
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

from deep_cases import deep_but
from elasticcb.checkpoint.versions import find_versions
from elasticcb.errors import CheckpointError, UsageError
from elasticcb.layers import Embedding
from elasticcb.settings import Command
from elasticcb.sidecar import SidecarEvaluator
from jobs import job_settings, run_job, write_model_file

RECORDS = 96

MODEL_FILE = """
    import keras

    def custom_model():
        model = keras.Sequential(
            [keras.Input((4,)), keras.layers.Dense(8, "tanh"), keras.layers.BatchNormalization(), keras.layers.Dense(3)]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
        return model
"""


def make_model(optimizer="sgd", layers=(8,), metrics=("accuracy",)):
    model = keras.Sequential(
        [keras.Input((4,), name="table"), *(keras.layers.Dense(units, "tanh") for units in layers)]
    )
    model.add(keras.layers.BatchNormalization())
    model.add(keras.layers.Dense(3))
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=list(metrics))
    return model


@pytest.fixture(scope="module")
def data():
    x = np.random.default_rng(0).normal(size=(RECORDS, 4)).astype("float32")
    return x, x[:, :3].argmax(axis=1)


@pytest.fixture(scope="module")
def trained_by_keras(tmp_path_factory, data):
    """Of three epochs: where each one's files are, and what its model gives."""
    folder, results = tmp_path_factory.mktemp("keras"), []
    model = make_model("adam")
    evaluate = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: results.append(model.evaluate(*data, verbose=0, return_dict=True))
    )
    saving = [
        keras.callbacks.ModelCheckpoint(folder / "{epoch:02}.keras"),
        keras.callbacks.ModelCheckpoint(folder / "{epoch:02}.weights.h5", save_weights_only=True),
    ]
    model.fit(*data, batch_size=32, epochs=3, verbose=0, callbacks=[*saving, evaluate])
    return folder, results


@pytest.fixture
def keras_files(tmp_path, trained_by_keras):
    """As `trained_by_keras`, with files of the test's own."""
    folder, results = trained_by_keras
    return shutil.copytree(folder, tmp_path / "checkpoints"), results


@pytest.fixture
def messages(caplog, monkeypatch):
    """What is logged here; a job keeps the package's messages from getting further."""
    logger = logging.getLogger("elasticcb.sidecar")
    monkeypatch.setattr(logger, "propagate", False)
    monkeypatch.setattr(logger, "handlers", [caplog.handler])
    return caplog


class Recorder(keras.callbacks.Callback):
    """Keeps what it was called with."""

    def __init__(self):
        super().__init__()
        self.ends, self.iterations, self.batches = [], [], 0

    def on_test_batch_end(self, batch, logs=None):
        self.batches += 1

    def on_test_end(self, logs=None):
        self.ends.append(logs)
        self.iterations.append(int(self.model.optimizer.iterations.numpy()))


def training_job(tmp_path, data):
    """Settings of one in this process: 36 versions, a checkpoint every 12."""
    np.savez(tmp_path / "data.npz", x=data[0], y=data[1])
    path = write_model_file(tmp_path, MODEL_FILE, "beside")
    return job_settings(
        path,
        tmp_path / "job",
        training=str(tmp_path / "data.npz"),
        minibatch_size=8,
        num_epochs=3,
        num_ps=2,
        directory=str(tmp_path / "checkpoints"),
        steps=12,
        keep_max=0,
    )


@pytest.fixture(scope="module")
def trained_by_job(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("job")
    run_job(training_job(folder, data))
    return folder / "checkpoints"


@pytest.fixture
def job_checkpoints(tmp_path, trained_by_job):
    """Those of a job that is over."""
    return shutil.copytree(trained_by_job, tmp_path / "checkpoints")


def test_each_checkpoint_of_a_running_job_is_evaluated_and_gives_what_its_weights_give(tmp_path, data):
    class UntilVersion36(keras.callbacks.Callback):
        def on_test_end(self, logs=None):
            if logs["version"] == 36:
                evaluator.stop()

    evaluator = SidecarEvaluator(make_model(), data, tmp_path / "checkpoints", callbacks=[UntilVersion36()])
    done = []
    thread = threading.Thread(target=lambda: done.extend(evaluator.start()), daemon=True)
    thread.start()
    run_job(training_job(tmp_path, data))
    thread.join(60)
    evaluator.stop()
    assert [each.checkpoint for each in done] == find_versions(tmp_path / "checkpoints")
    assert [each.version for each in done][-1] == 36
    assert len({each.metrics["loss"] for each in done}) == len(done) > 1

    # The same checkpoint by way of the servers.
    settings = job_settings(
        tmp_path / "beside.py",
        tmp_path / "evaluation",
        Command.EVALUATE,
        validation=str(tmp_path / "data.npz"),
        directory_for_init=str(done[0].checkpoint),
    )
    summary, _ = run_job(settings)
    assert summary.version == done[0].version
    assert done[0].metrics == pytest.approx(dict(summary.metrics), rel=1e-5)


@pytest.mark.parametrize("suffix", [".keras", ".weights.h5"])
def test_files_of_keras_give_what_the_trained_model_gave(keras_files, data, suffix):
    folder, results = keras_files
    for path in list(folder.iterdir()):
        if not path.name.endswith(suffix):
            path.unlink()
    # Other metrics and another optimizer than in training.
    recorder = Recorder()
    model = make_model("sgd", metrics=["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(2, name="top")])
    done = SidecarEvaluator(model, data, folder, max_evaluations=3, callbacks=[recorder], verbose=0).start()
    assert [each.checkpoint.name for each in done] == [f"{epoch:02}{suffix}" for epoch in (1, 2, 3)]
    for each, expected in zip(done, results, strict=True):
        assert {name: each.metrics[name] for name in expected} == pytest.approx(expected, rel=1e-6)
    assert [each.version for each in done] == recorder.iterations == [3, 6, 9]


def test_one_file_that_training_overwrites_is_evaluated_each_time(tmp_path, data):
    path = tmp_path / "newest.weights.h5"
    trained = make_model("adam")

    class TrainOn(keras.callbacks.Callback):
        """Training that goes on between two evaluations."""

        def on_test_end(self, logs=None):
            trained.fit(*data, batch_size=32, verbose=0)
            trained.save_weights(path)

    trained.save_weights(path)
    evaluator = SidecarEvaluator(make_model(), data, path, max_evaluations=3, callbacks=[TrainOn()], poll_seconds=0.05)
    done = evaluator.start()
    assert [each.version for each in done] == [0, 3, 6]
    assert done[0].metrics["loss"] > done[2].metrics["loss"]


def test_callbacks_get_metrics_and_the_version_and_keras_own_get_metrics_alone(keras_files, data, tmp_path, capsys):
    folder, _ = keras_files
    recorder = Recorder()
    board = keras.callbacks.TensorBoard(tmp_path / "logs")
    evaluator = SidecarEvaluator(
        make_model(), data, folder, max_evaluations=6, callbacks=[recorder, board], batch_size=48
    )
    done = evaluator.start()
    assert recorder.batches == 6 * RECORDS / 48
    for logs, each in zip(recorder.ends, done, strict=True):
        assert logs == each.metrics
        assert (logs["metrics"], logs["version"]) == (each.metrics, each.version)
    assert capsys.readouterr().out.count("Version 9: accuracy") == 2

    written = {}
    for file in (tmp_path / "logs" / "validation").iterdir():
        for event in tf.compat.v1.train.summary_iterator(str(file)):
            for value in event.summary.value:
                written.setdefault(value.tag, {})[event.step] = float(tf.make_ndarray(value.tensor))
    assert set(written) == {"evaluation_loss_vs_iterations", "evaluation_accuracy_vs_iterations"}
    losses = {each.version: each.metrics["loss"] for each in done}
    assert written["evaluation_loss_vs_iterations"] == pytest.approx(losses)


KINDS = ("dataset", "PyDataset", "generator", "weighted", "inputs by name")


@pytest.mark.parametrize("kind", deep_but(KINDS, "generator", "inputs by name"))
def test_all_kinds_of_data_are_evaluated_anew_for_each_checkpoint(keras_files, data, kind):
    folder, results = keras_files
    x, y = data

    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return 3

        def __getitem__(self, index):
            return x[index * 32 : index * 32 + 32], y[index * 32 : index * 32 + 32]

    def forever():
        while True:
            yield from (Batches()[index] for index in range(3))

    inputs = {
        "dataset": tf.data.Dataset.from_tensor_slices(data).batch(32),
        "PyDataset": Batches(),
        "generator": forever(),
        "weighted": (x, y, np.ones(RECORDS)),
        "inputs by name": ({"table": x}, y),
    }
    steps = 3 if kind == "generator" else None
    done = SidecarEvaluator(make_model(), inputs[kind], folder, steps, 6, verbose=0).start()
    assert [each.metrics["loss"] for each in done] == pytest.approx([r["loss"] for r in results for _ in "ab"])


def test_a_model_that_is_not_built_yet_is_built_from_the_data(keras_files, data):
    folder, results = keras_files
    model = keras.Sequential([keras.layers.Dense(8, "tanh"), keras.layers.BatchNormalization(), keras.layers.Dense(3)])
    model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    done = SidecarEvaluator(model, data, folder, max_evaluations=1).start()
    assert done[0].metrics["loss"] == pytest.approx(results[0]["loss"])


def test_it_ends_without_new_checkpoints_and_goes_on_when_started_again(keras_files, data, tmp_path):
    folder, _ = keras_files
    evaluator = SidecarEvaluator(make_model(), data, folder, timeout=1.0, verbose=0)
    assert len(evaluator.start()) == 6
    shutil.copy(folder / "01.keras", folder / "again.keras")
    assert [each.checkpoint.name for each in evaluator.start()] == ["again.keras"]
    assert SidecarEvaluator(make_model(), data, tmp_path / "nothing", timeout=0.1).start() == []


def test_ctrl_c_drops_the_evaluation_under_way_and_gives_the_others(keras_files, data):
    class CtrlC(keras.callbacks.Callback):
        begun = 0

        def on_test_begin(self, logs=None):
            self.begun += 1
            if self.begun == 3:
                raise KeyboardInterrupt

    done = SidecarEvaluator(make_model(), data, keras_files[0], callbacks=[CtrlC()]).start()
    assert len(done) == 2


def test_damaged_and_deleted_checkpoints_of_a_job_are_passed_over(tmp_path, data, job_checkpoints, messages):
    damaged, deleted, *others = find_versions(job_checkpoints)
    file = next(damaged.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-5])

    shutil.move(deleted, tmp_path / "kept")
    evaluator = SidecarEvaluator(make_model(), data, job_checkpoints, timeout=0.2)
    assert [each.checkpoint for each in evaluator.start()] == others
    assert messages.text.count("Skipped") == 1
    assert "is damaged" in messages.text

    shutil.move(tmp_path / "kept", deleted)
    original = evaluator._follower.next

    def delete_after(timeout):
        found = original(timeout)
        if found is not None:
            shutil.rmtree(found.path)
        return found

    evaluator._follower.next = delete_after
    assert evaluator.start() == []
    assert messages.text.count("Skipped") == 1  # old checkpoints are deleted all the time


def test_a_file_that_lacks_variables_is_passed_over_as_not_whole(tmp_path, data, messages):
    class Parts(keras.Model):
        def __init__(self, parts):
            super().__init__()
            self.body, self.parts_of_head = keras.layers.Dense(4), [keras.layers.Dense(4) for _ in range(parts)]

        def call(self, x):
            x = self.body(x)
            for part in self.parts_of_head:
                x = part(x)
            return x

    small, large = Parts(1), Parts(2)
    for model in (small, large):
        model.compile("sgd", "sparse_categorical_crossentropy")
        model(data[0])
    small.save_weights(tmp_path / "half.weights.h5")
    large.save_weights(tmp_path / "whole.weights.h5")
    done = SidecarEvaluator(large, data, tmp_path, timeout=1.0).start()
    assert [each.checkpoint.name for each in done] == ["whole.weights.h5"]
    assert "lacks 2 of the model's 6 variables" in messages.text


@pytest.mark.parametrize("layers", deep_but([(), (9,), (8, 8)], (9,)))
def test_a_checkpoint_of_another_model_is_told_with_its_variables(data, trained_by_job, trained_by_keras, layers):
    for folder, words in (
        (trained_by_keras[0], r"01\.keras belongs to another model. It contains layers/.*in the model: "),
        (trained_by_job, r"version-\d+ belongs to another model: variable \d.*in the checkpoint"),
    ):
        with pytest.raises(CheckpointError, match=words):
            SidecarEvaluator(make_model(layers=layers), data, folder).start()


def test_an_error_of_a_callback_or_of_the_data_reaches_the_caller(keras_files, data):
    class Failing(keras.callbacks.Callback):
        def on_test_end(self, logs=None):
            raise RuntimeError(f"no room for version {logs['version']}")

    with pytest.raises(RuntimeError, match="no room for version 3"):
        SidecarEvaluator(make_model(), data, keras_files[0], callbacks=[Failing()]).start()
    with pytest.raises(ValueError):
        SidecarEvaluator(make_model(), (data[0][:, :2], data[1]), keras_files[0]).start()


def test_arguments_that_cant_be_used_are_told_before_anything_is_read(tmp_path, data):
    bare = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    with pytest.raises(UsageError, match="is not compiled"):
        SidecarEvaluator(bare, data, tmp_path)
    with pytest.raises(UsageError, match="data is a tuple of 4"):
        SidecarEvaluator(make_model(), (*data, *data), tmp_path)
    with pytest.raises(UsageError, match="data is a generator"):
        SidecarEvaluator(make_model(), (pair for pair in [data]), tmp_path)
    for name in ("steps", "max_evaluations", "timeout"):
        with pytest.raises(UsageError, match=f"{name}=0 is invalid"):
            SidecarEvaluator(make_model(), data, tmp_path, **{name: 0})
    lazy = keras.Sequential([keras.layers.Dense(3)])
    lazy.compile(loss="mse")
    make_model().save(tmp_path / "a.keras")
    with pytest.raises(UsageError, match="no variables yet, and they can't be created from a generator"):
        SidecarEvaluator(lazy, (pair for pair in [data]), tmp_path, steps=1).start()


TABLE_FILE = """
    import keras
    from elasticcb.layers import Embedding

    def custom_model():
        model = keras.Sequential([keras.Input((2,), dtype="int64"), Embedding(4, name="open"), keras.layers.Flatten()])
        model.add(keras.layers.Dense(1))
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model
"""


def test_embedding_tables_of_a_checkpoint_are_evaluated(tmp_path):
    ids = np.arange(RECORDS * 2).reshape(RECORDS, 2) % 50
    labels = (ids.sum(1, keepdims=True) % 3).astype("float32")
    np.savez(tmp_path / "data.npz", x=ids, y=labels)
    model_file = write_model_file(tmp_path / "zoo", TABLE_FILE)
    checkpoints = tmp_path / "checkpoints"
    run_job(
        job_settings(
            model_file, tmp_path / "job", training=str(tmp_path / "data.npz"), num_ps=2, directory=str(checkpoints)
        )
    )
    model = keras.Sequential([keras.Input((2,), dtype="int64"), Embedding(4, name="open"), keras.layers.Flatten()])
    model.add(keras.layers.Dense(1))
    model.compile("sgd", "mse")
    before = model.evaluate(ids, labels, verbose=0)
    SidecarEvaluator(model, (ids, labels), checkpoints, max_evaluations=1, verbose=0).start()
    held, _ = model.layers[0].rows()
    assert held.tolist() == list(range(50))
    assert model.evaluate(ids, labels, verbose=0) < before
