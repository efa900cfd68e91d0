"""Jobs that begin with what a checkpoint of another model holds."""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import keras
import numpy as np
import pytest

import elasticcb
from elasticcb.checkpoint.versions import find_latest
from elasticcb.cli.main import main
from elasticcb.errors import ElasticCBError
from elasticcb.layers import Embedding
from jobs import LINEAR_MODEL, linear_data, number, train_flags, write_model_file

IDS = {
    name: np.random.default_rng(seed).integers(0, 40, (128, 1)) for seed, name in enumerate(("user", "item", "city"))
}
LABELS = (IDS["user"] + IDS["item"] > 40).astype("float32")

SLOW_MODEL = (
    LINEAR_MODEL.replace("Dense(1)", 'Dense(1, name=os.environ["LAYER"])')
    + """
    import os
    import time

    class Slow(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            time.sleep(0.01)

    def callbacks():
        return [Slow()]
"""
)


def model_of(columns: list[str], learning_rate: float = 0.5) -> keras.Model:
    keras.utils.set_random_seed(len(columns))
    inputs = {name: keras.Input((1,), dtype="int64", name=name) for name in columns}
    kinds = {"user": lambda: Embedding(3, name="user_rows"), "city": lambda: Embedding(3, name="city_rows")}
    rows = [
        keras.layers.Flatten()(kinds.get(name, lambda: keras.layers.Embedding(40, 3, name="item_rows"))()(value))
        for name, value in inputs.items()
    ]
    outputs = keras.layers.Dense(1, name="click")(
        keras.layers.Dense(4, name="hidden")(keras.layers.Concatenate()(rows))
    )
    model = keras.Model(inputs, outputs)
    model.compile(keras.optimizers.Adagrad(learning_rate), "mse")
    return model


def fit(model: keras.Model, num_ps: int, threshold: int, **checkpoint: str) -> None:
    more = {"checkpoint_dir": checkpoint.pop("checkpoint_dir")} if "checkpoint_dir" in checkpoint else {}
    with elasticcb.Cluster(
        1,
        num_ps,
        kind="inprocess",
        log_level="INFO",
        checkpoint=elasticcb.CheckpointOptions(**checkpoint),
        embedding=elasticcb.EmbeddingOptions(threshold_bytes=threshold),
        **more,
    ) as cluster:
        data = {name: IDS[name] for name in model.input}
        cluster.fit(model, data, LABELS, batch_size=32, verbose=0)


def weights(model: keras.Model, name: str) -> np.ndarray:
    return next(variable.numpy() for variable in model.weights if variable.path == name)


def accumulator(model: keras.Model, name: str) -> np.ndarray:
    """The slot of a variable."""
    number = next(i for i, variable in enumerate(model.trainable_weights) if variable.path == name)
    return model.optimizer._accumulators[number].numpy()


def rows(model: keras.Model, layer: str) -> np.ndarray:
    found = model.get_layer(f"{layer}_rows")
    return np.asarray(found(np.unique(IDS[layer])))


@pytest.fixture
def messages(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """What jobs of this process say."""
    logger = logging.getLogger("elasticcb.api")
    caplog.set_level(logging.INFO, logger.name)
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)


def test_a_model_with_one_more_feature_begins_with_the_last_one(tmp_path, messages):
    old = model_of(["user", "item"])
    fit(old, 2, 100, checkpoint_dir=str(tmp_path))  # `item` is on the servers, too
    folder = find_latest(tmp_path)
    still = model_of(["user", "item", "city"], learning_rate=0.0)
    with pytest.raises(ElasticCBError, match=r"'hidden/kernel' is float32\[9, 4\] in the model, and float32\[6, 4\]"):
        fit(still, 1, 1 << 20, init_from=str(folder))
    messages.clear()
    still = model_of(["user", "item", "city"], learning_rate=0.0)
    fresh = weights(still, "hidden/kernel").copy()
    fit(still, 1, 1 << 20, init_from=str(tmp_path), init_map="hidden/kernel=")  # `item` is not any more
    np.testing.assert_array_equal(weights(still, "hidden/kernel"), fresh)
    for name in ("hidden/bias", "click/kernel", "click/bias"):
        np.testing.assert_array_equal(weights(still, name), weights(old, name))
    for layer in ("user", "item"):
        np.testing.assert_array_equal(rows(still, layer), rows(old, layer))
    for name in ("hidden/bias", "click/kernel", "click/bias", "user_rows/embeddings"):  # grows with each step
        assert (accumulator(still, name) >= accumulator(old, name)).all()
        assert (accumulator(still, name) > accumulator(old, name) + 1e-4).any()
    assert int(still.optimizer.iterations) == 4
    assert f"Loaded 5 of 7 variables from {folder}. Newly initialized: " in messages.text


def test_another_fit_of_a_model_keeps_what_it_has_learned(tmp_path, messages):
    old = model_of(["user", "item"])
    fit(old, 1, 1 << 20, checkpoint_dir=str(tmp_path))
    model = model_of(["user", "item"])
    fit(model, 1, 1 << 20, init_from=str(tmp_path))
    model.optimizer.learning_rate = 0.0
    learned = rows(model, "user")
    messages.clear()
    fit(model, 1, 1 << 20, init_from=str(tmp_path))
    np.testing.assert_allclose(rows(model, "user"), learned, rtol=1e-6)
    assert "the model has already been trained for 4 steps" in messages.text


def test_masters_that_take_over_and_jobs_that_are_resumed_keep_what_was_trained(tmp_path: Path, start_job, monkeypatch):
    write_model_file(tmp_path, SLOW_MODEL, "line")
    linear_data(tmp_path, train=1_200, test=200)
    monkeypatch.setenv("LAYER", "line")
    first = train_flags(tmp_path, "line", num_epochs=1, checkpoint_dir=tmp_path / "first", cluster="inprocess")
    assert main(["train", *first]) == 0
    monkeypatch.setenv("LAYER", "top")
    more = {"num_epochs": 4, "checkpoint_interval": 0.2, "checkpoint_dir": tmp_path / "second", "checkpoint_steps": 20}
    begin = {"init_from": tmp_path / "first", "init_map": "top=line", "job_dir": tmp_path / "job-2"}
    job = start_job("train", *train_flags(tmp_path, "line", **more, **begin))
    said = job.wait_for_line(
        r"Loaded 2 of 2 variables from .*\. Newly initialized: nothing\. Unused in the checkpoint: nothing"
    )
    assert "first" in said
    job.wait_for_line(r"Evaluation at version")
    job.master.kill()
    job.wait_for_line(r"recovered in")
    job.wait_for_line(r"Evaluation at version")
    job.interrupt()
    assert job.finish() == 130
    assert len(re.findall("variables from", job.output)) == 1
    shutil.rmtree(tmp_path / "job-2" / "recovery")
    resumed = start_job("resume", str(tmp_path / "job-2"))
    assert resumed.finish() == 0, resumed.output
    assert "variables from" not in resumed.output
    assert f"resumes from {tmp_path / 'second'}/version-" in resumed.output
    assert number(resumed.output, "model version") >= 4 * 1_200 // 8
