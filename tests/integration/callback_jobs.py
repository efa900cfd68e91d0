"""Jobs whose callbacks write down what they see, by process."""

import json

from model_file_jobs import RECORDS, write_arrays

from elasticcb.settings import Command
from jobs import job_settings, write_model_file

__all__ = ["MODEL", "RECORDER", "RECORDS", "calls", "hooks", "model_file", "small_job", "write_arrays"]

MODEL = """
import json
import os
import threading

import keras
import numpy as np

import elasticcb.callbacks
from elasticcb.callbacks import runs_on

FOLDER = "{folder}"

def custom_model():
    keras.utils.set_random_seed(2)
    return keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])

def loss(labels, predictions):
    return keras.losses.mean_squared_error(labels, predictions)

def optimizer():
    return keras.optimizers.SGD(0.125)

def feed(dataset, mode, metadata):
    if mode == "prediction":
        return dataset.map(lambda record: record["x"])
    return dataset.map(lambda record: (record["x"], record["y"]))

def eval_metrics_fn():
    return {{"mae": keras.metrics.MeanAbsoluteError()}}

def process():
    name = threading.current_thread().name
    return name if name.startswith("worker") else "master"

def write(name, *values):
    with open(f"{{FOLDER}}/{{name}}-{{process()}}.jsonl", "a") as file:
        file.write(json.dumps(values, default=lambda value: np.asarray(value).tolist()) + "\\n")
"""

RECORDER = """
class Recorder(keras.callbacks.Callback):
    pass

def hook(name):
    def called(self, *values, logs=None):
        *values, logs = (*values, logs) if logs is not None else values
        more = {"+" + key: logs[key] for key in ("batch", "metrics", "predictions", "size", "version") if key in logs}
        write(self.file, name, *values, {**logs, **more})
    return called

from elasticcb.callbacks.placement import TABLE
for name in TABLE:
    setattr(Recorder, name, hook(name))
Recorder.file = "hooks"

@runs_on("worker")
class OnWorkers(Recorder):
    file = "moved"

def callbacks():
    return [Recorder(), OnWorkers()]
"""


def model_file(tmp_path, callbacks, name):
    return write_model_file(tmp_path, MODEL.format(folder=tmp_path) + callbacks, name)


def calls(tmp_path, name, process):
    """What callbacks wrote in one process, in order."""
    path = tmp_path / f"{name}-{process}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def hooks(entries):
    return {entry[0] for entry in entries}


def small_job(tmp_path, path, **parts):
    parts = {"minibatch_size": 8, "num_minibatches_per_task": 2, "num_workers": 2} | parts
    if parts.get("command") is not Command.PREDICT and "training" not in parts:
        parts["training"] = parts["validation"] = write_arrays(tmp_path / "data.npz")
    return job_settings(path, tmp_path / "job", **parts)
