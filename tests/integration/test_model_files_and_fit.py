"""One synchronous worker in a job with a model file, and plain Keras, on the same batches in the same order."""

import dataclasses
import json

import numpy as np
import pytest
from model_file_jobs import RECORDS, final_weights, load_module, weights_saver, write_arrays

from elasticcb.master.task import QueueSettings
from elasticcb.master.task_queue import TaskQueue
from jobs import job_settings, run_job, write_model_file

COMPILED = """
    import keras
    import numpy as np
    import tensorflow as tf

    class Own(keras.Sequential):
        def train_step(self, data):
            x, y, weight = data
            with tf.GradientTape() as tape:
                y_pred = self(x, training=True)
                loss = self.compute_loss(x, y, y_pred, weight)
            if not self.optimizer.built:
                self.optimizer.build(self.trainable_variables)
            self.optimizer.apply(tape.gradient(loss, self.trainable_variables))  # by their order
            for metric in self.metrics:
                metric.update_state(*((loss,) if metric.name == "loss" else (y, y_pred, weight)))
            return {metric.name: metric.result() for metric in self.metrics}

    def custom_model(units):
        keras.utils.set_random_seed(4)
        frozen = keras.layers.Dense(6, trainable=False, name="frozen")
        model = Own([
            frozen,
            keras.layers.Dense(units, activation="relu", kernel_regularizer="l2"),
            keras.layers.BatchNormalization(momentum=0.7),
            keras.layers.Dense(1, activation="sigmoid", activity_regularizer="l1"),
        ])  # without input shape: built with the first batch
        model.compile("adam", "binary_crossentropy", metrics=["accuracy", "AUC"], weighted_metrics=["mae"])
        return model

    def feed_batch(records, mode, metadata):
        return records["x"], records["y"], records["weight"]

    class KeepLogs(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            with open("FOLDER/logs", "a") as file:
                file.write(json.dumps(logs) + "\\n")

    import json

    def callbacks():
        return [SaveWeights(), KeepLogs()]
"""


def test_compiled_model_with_weights_regularizers_moving_statistics_and_a_step_of_its_own(tmp_path):
    weight = np.random.default_rng(1).uniform(0, 2, RECORDS).astype("float32")
    data = write_arrays(tmp_path / "data.npz", weight=weight)
    text = COMPILED.replace("FOLDER", str(tmp_path)) + weights_saver(tmp_path)
    path = write_model_file(tmp_path, text, "compiled_file")
    settings = job_settings(
        path,
        tmp_path / "job",
        training=data,
        validation=data,
        minibatch_size=16,
        num_minibatches_per_task=2,
        num_epochs=2,
        updates="sync",
        shuffle_seed=2,
    )
    settings = with_params(settings, units=5)
    order = []
    run_job(settings)

    model = load_module(path).custom_model(units=5)
    arrays = np.load(data)
    x, y = arrays["x"], arrays["y"]
    model.build((None, 6))
    history = []
    for epoch in range(2):
        starts = task_order(data, 32, settings.training.shuffle_seed, epoch)
        order = np.concatenate([np.arange(start, start + 32) for start in starts])
        result = model.fit(
            x[order],
            y[order],
            sample_weight=weight[order],
            batch_size=16,
            shuffle=False,
            validation_data=(x, y, weight),
            validation_batch_size=16,
            verbose=0,
        )
        history.append({name: values[0] for name, values in result.history.items()})
    logs = [json.loads(line) for line in (tmp_path / "logs").read_text().splitlines()]
    for ours, theirs in zip(logs, history, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)
    for ours, theirs in zip(final_weights(tmp_path), model.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=1e-5)


def with_params(settings, **params):
    return dataclasses.replace(settings, model=dataclasses.replace(settings.model, params=params))


def task_order(source, records, seed, epoch):
    """The starts of the tasks of one source in an epoch, as the task queue shuffles them."""
    queue = TaskQueue(
        QueueSettings(records_per_task=records, minibatch_size=records, num_epochs=epoch + 1, shuffle_seed=seed),
        training=[(source, RECORDS)],
    )
    starts = []
    while (lease := queue.get_task(0, 0.0).lease) is not None:
        if lease.task.epoch == epoch:
            starts.append(lease.task.shard.start)
        queue.report_done(0, lease.id)
    return starts
