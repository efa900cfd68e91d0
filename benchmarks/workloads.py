"""The workloads: a model in Keras 3 and in `tf_keras` from the same lines, its data, and how it is read.

All contestants read the same arrays through the same `tf.data` pipeline: each process maps the .npy files, holds them
as tensors in memory, and slices batch after batch from them, two ahead.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

DATA_VARIABLE = "BENCHMARK_DATA"  # environment variable: folder of the arrays
WORKLOADS = ("mlp", "deepfm", "dcn")


def module_of(workload: str) -> ModuleType:
    """`models/WORKLOAD.py`."""
    return importlib.import_module(f"models.{workload}")


def write_data(workload: str, folder: Path, which: str = "") -> None:
    """Writes the arrays of a workload as .npy files; `which` of them, where it has several."""
    for name, array in module_of(workload).arrays(np.random.default_rng(0), *filter(None, [which])).items():
        np.save(folder / f"{name}.npy", array)


def dataset(batch_size: int) -> Any:
    """Endless batches of `(features, labels)`, of the arrays in the folder that the environment names."""
    import tensorflow as tf

    files = sorted(Path(os.environ[DATA_VARIABLE]).glob("*.npy"))
    arrays = {file.stem: tf.constant(np.load(file)) for file in files}
    batches = len(arrays["labels"]) // batch_size

    def batch(number: Any) -> Any:
        rows = {name: array[number * batch_size : (number + 1) * batch_size] for name, array in arrays.items()}
        labels = rows.pop("labels")
        return (next(iter(rows.values())) if len(rows) == 1 else rows), labels

    return tf.data.Dataset.range(batches).map(batch).repeat().prefetch(2)


def compiled_model(workload: str, legacy: bool) -> Any:
    """The model with loss and optimizer, without metrics; by `tf_keras` if `legacy`."""
    module = module_of(workload)
    if legacy:
        import tensorflow as tf
        import tf_keras as keras

        operations: Any = SimpleNamespace(mean=tf.reduce_mean, sum=tf.reduce_sum, square=tf.square)
    else:
        import keras

        operations = keras.ops
    model = module.model(keras, operations)
    model.compile(optimizer=module.optimizer(keras), loss=module.loss(keras))
    return model
