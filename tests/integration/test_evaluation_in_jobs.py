"""What evaluation rounds report is what one process would compute over all records with the round's weights."""

import json

import keras
import numpy as np
import pytest
from model_file_jobs import load_module

from elasticcb.settings import Command
from jobs import job_settings, run_job, write_model_file

RECORDS = 203  # neither tasks nor batches come out even

MODEL_FILE = """
import json

import keras
import numpy as np
import tensorflow as tf

@keras.saving.register_keras_serializable()
class MedianScore(keras.metrics.Metric):
    "Needs all scores; has nothing to merge, so labels and predictions travel."

    def __init__(self, name="median", **kwargs):
        super().__init__(name=name, **kwargs)
        self.scores = self.add_weight(name="scores", shape=(1000,), initializer="zeros")
        self.count = self.add_weight(name="count", shape=(), dtype="int32", initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        scores = tf.reshape(y_pred, [-1])
        positions = self.count + tf.range(tf.size(scores))
        self.scores.assign(tf.tensor_scatter_nd_update(self.scores, positions[:, None], scores))
        self.count.assign(self.count + tf.size(scores))

    def result(self):
        count = self.count.value
        return tf.sort(self.scores.value[:count])[count // 2]

class HighestNumber(keras.metrics.Metric):
    "Does not add up, but brings merge_state."

    def __init__(self, start, name="highest", **kwargs):
        super().__init__(name=name, **kwargs)
        self.start = start
        self.highest = self.add_weight(name="highest", shape=(), initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.highest.assign(tf.maximum(self.highest, self.start + tf.reduce_max(y_true[:, 1])))

    def result(self):
        return self.highest

    def merge_state(self, metrics):
        for metric in metrics:
            self.highest.assign(tf.maximum(self.highest, metric.highest))

    def get_config(self):
        return {**super().get_config(), "start": self.start}

class Scored(keras.metrics.AUC):
    "Keras's own, fed with a column of the labels; as it changes update_state, labels and predictions travel."

    def update_state(self, y_true, y_pred, sample_weight=None):
        return super().update_state(y_true[:, :1], y_pred, sample_weight)

def custom_model():
    keras.utils.set_random_seed(1)
    return keras.Sequential([keras.Input((6,)), keras.layers.Dense(1, activation="sigmoid", kernel_regularizer="l2")])

def loss(labels, predictions):
    return keras.losses.binary_crossentropy(labels[:, :1], predictions)

def optimizer():
    return keras.optimizers.SGD(0.5)

def feed(dataset, mode, metadata):
    return dataset.map(lambda record: (record["x"], record["y"], record["weight"]))

def eval_metrics_fn():
    return {
        "auc": Scored(),
        "records": lambda labels, predictions: tf.ones(tf.shape(labels)[0]),
        "squares": lambda labels, predictions: tf.square(labels[:, 0] - predictions[:, 0]),
        "median": MedianScore(),
        "highest": HighestNumber(start=0.5),
    }

class KeepRounds(keras.callbacks.Callback):
    rounds = 0

    def on_test_end(self, logs=None):
        np.savez(f"FOLDER/round-{self.rounds}.npz", *self.model.get_weights())
        with open(f"FOLDER/round-{self.rounds}.json", "w") as file:
            json.dump({**logs, "metrics": logs["metrics"], "version": logs["version"]}, file)
        self.rounds += 1

def callbacks():
    return [KeepRounds()]
"""


def write_data(path):
    generator = np.random.default_rng(7)
    x = generator.normal(size=(RECORDS, 6)).astype("float32")
    clicked = (x.sum(axis=1) + generator.normal(size=RECORDS) > 0).astype("float32")
    y = np.stack([clicked, np.arange(RECORDS)], axis=1).astype("float32")
    weight = generator.uniform(0.5, 2, RECORDS).astype("float32")
    np.savez(path, x=x, y=y, weight=weight)
    return x, y, weight


def expected(module, weights, x, y, weight):
    """All metrics over all records in one process."""
    model = module.custom_model()
    model.set_weights(weights)
    model.compile(loss=lambda labels, predictions: module.loss(labels, predictions))
    predictions = model.predict(x, verbose=0)
    auc = keras.metrics.AUC()
    auc.update_state(y[:, :1], predictions, weight)
    squares = (y[:, 0] - predictions[:, 0]) ** 2
    return {
        "auc": float(auc.result()),
        "records": 1.0,
        "squares": float(np.average(squares, weights=weight)),
        "median": float(np.sort(predictions[:, 0])[RECORDS // 2]),
        "highest": RECORDS - 0.5,
        "loss": model.evaluate(x, y, sample_weight=weight, batch_size=4, verbose=0),
    }


def test_rounds_of_two_workers_equal_one_process_over_all_records(tmp_path):
    x, y, weight = write_data(tmp_path / "data.npz")
    path = write_model_file(tmp_path, MODEL_FILE.replace("FOLDER", str(tmp_path)), "evaluated_file")
    module = load_module(path)
    settings = job_settings(
        path,
        tmp_path / "job",
        training=str(tmp_path / "data.npz"),
        validation=str(tmp_path / "data.npz"),
        minibatch_size=4,
        num_minibatches_per_task=2,
        num_workers=2,
        num_ps=2,
        evaluation_steps=20,
        directory=str(tmp_path / "checkpoints"),
    )
    summary, _ = run_job(settings)
    rounds = sorted(tmp_path.glob("round-*.json"))
    assert len(rounds) >= 2  # one on the way at least; training may be over before the next is due
    for round_file in rounds:
        logs = json.loads(round_file.read_text())
        with np.load(round_file.with_suffix(".npz")) as saved:
            weights = [saved[name] for name in saved.files]
        reference = expected(module, weights, x, y, weight)
        assert logs["metrics"] == pytest.approx(reference, rel=1e-5, abs=1e-6)
        assert logs["auc"] == pytest.approx(reference["auc"], abs=1e-6)
    assert logs["version"] == summary.version

    settings = job_settings(
        path,
        tmp_path / "evaluate",
        Command.EVALUATE,
        validation=str(tmp_path / "data.npz"),
        minibatch_size=16,
        num_workers=2,
        num_ps=3,
        directory_for_init=str(tmp_path / "checkpoints"),
    )
    summary, _ = run_job(settings)
    assert summary.records_evaluated == RECORDS
    assert summary.metrics["auc"] == pytest.approx(logs["auc"], abs=1e-6)
    assert summary.metrics["median"] == pytest.approx(logs["median"], abs=1e-6)
