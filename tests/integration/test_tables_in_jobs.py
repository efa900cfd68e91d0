"""A job with embedding tables: its export, its checkpoints, and the jobs that start from them."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from elasticcb.checkpoint.manifest import read_manifest
from elasticcb.checkpoint.versions import find_latest
from elasticcb.errors import CheckpointError
from elasticcb.settings import Command
from jobs import job_settings, run_job, write_model_file

MODEL_FILE = """
    import keras
    import numpy as np
    import tensorflow as tf
    import elasticcb
    from elasticcb.callbacks import SavedModelExporter
    from elasticcb.layers import Embedding

    def custom_model():
        words = keras.Input((), dtype="string", name="word")
        ids = keras.Input((), dtype="int64", name="id")
        hashed = keras.layers.Hashing(10_000)(words)
        found = [Embedding(4, name="open")(ids), keras.layers.Embedding(10_000, 4, name="hashed")(hashed)]
        return keras.Model({"word": words, "id": ids}, keras.layers.Dense(1)(keras.layers.Concatenate()(found)))

    def loss(labels, predictions):
        return tf.reduce_mean((labels - predictions) ** 2)

    def optimizer():
        return keras.optimizers.Adagrad(0.1)

    def feed(dataset, mode, metadata):
        def parsed(line):
            id, word, label = tf.unstack(tf.strings.split(line, ","), 3)
            features = {"id": tf.strings.to_number(id, tf.int64), "word": word}
            return features if mode == "prediction" else (features, tf.strings.to_number(label)[None])
        return dataset.map(parsed)

    def eval_metrics_fn():
        return {"mae": keras.metrics.MeanAbsoluteError()}

    def callbacks():
        return [SavedModelExporter()]
"""


def test_a_job_exports_its_tables_and_another_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    model_file = write_model_file(tmp_path / "zoo", MODEL_FILE)
    lines = [f"{row % 50 * 10**10},w{row % 40},{row % 5}" for row in range(200)]
    data = tmp_path / "data.csv"
    data.write_text("\n".join(lines) + "\n")
    settings = {
        "training": str(data), "minibatch_size": 20, "directory": str(tmp_path / "checkpoints"), "num_ps": 2,
        "threshold_bytes": 1000, "output": str(tmp_path / "model"),
    }  # fmt: skip
    summary, _ = run_job(job_settings(model_file, tmp_path / "job", num_epochs=6, **settings))
    assert summary.version == 60
    served = tf.saved_model.load(str(tmp_path / "model")).signatures["serving_default"]
    seen = served(id=tf.constant([0, 10**10], tf.int64), word=tf.constant(["w0", "w1"]))
    unseen = served(id=tf.constant([7], tf.int64), word=tf.constant(["never seen"]))
    assert np.isfinite(next(iter(seen.values())).numpy()).all()
    assert np.isfinite(next(iter(unseen.values())).numpy()).all()

    checkpoint = find_latest(tmp_path / "checkpoints")
    assert json.loads(read_manifest(checkpoint)["variables"][0]["table"])["input_dim"] is None
    again = {
        **settings, "directory": "", "directory_for_init": str(checkpoint), "num_ps": 1, "validation": str(data),
        "output": "",
    }  # fmt: skip
    torn, flipped = (
        shutil.copytree(checkpoint, checkpoint.with_name(f"version-000000{number}")) for number in (99, 98)
    )
    (torn / "manifest.json").write_text("")
    file = max(flipped.glob("*.safetensors"))
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    _, display = run_job(job_settings(model_file, tmp_path / "anew", num_epochs=1, **settings))
    assert any("already contains the checkpoint version-00000099" in message for message in display.messages)
    evaluation = {**again, "training": ""}
    evaluated, display = run_job(
        job_settings(
            model_file,
            tmp_path / "evaluate",
            Command.EVALUATE,
            **{**evaluation, "directory_for_init": str(checkpoint.parent)},
        )
    )
    assert evaluated.version == 60
    assert re.match(r"Skipped version-00000099: The manifest .* can't be read", display.messages[0])
    assert re.match(rf"Skipped version-00000098: The file {file} is damaged", display.messages[1])
    assert f"The model starts from {checkpoint}, version 60." in display.messages
    with pytest.raises(CheckpointError, match=rf"The file {file} is damaged: .*Start from another version\."):
        run_job(
            job_settings(
                model_file,
                tmp_path / "damaged",
                Command.EVALUATE,
                **{**evaluation, "directory_for_init": str(flipped)},
            )
        )
    further, _ = run_job(job_settings(model_file, tmp_path / "more", num_epochs=1, **again))
    assert further.version == 70
    assert further.metrics["mae"] < evaluated.metrics["mae"] < 1.2
