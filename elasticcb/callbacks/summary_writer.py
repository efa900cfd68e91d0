"""Writes the metrics of every evaluation pass to TensorBoard event files."""

# mypy: allow-subclassing-any

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from elasticcb.errors import CallbackError


class SummaryWriter(keras.callbacks.Callback):
    """Writes TensorBoard scalars after each evaluation pass, on the master.

    The step of a scalar is the model version of the pass. The tag is the metric's name; `output/name` for a model with
    several outputs; `name/0`, `name/1`, … for a metric with several values.

    Args:
        log_dir: folder for the event files, any path that TensorFlow can write to; default: `<job
            directory>/tensorboard`.

    Example:

        def callbacks():
            return [SummaryWriter("/tmp/logs")]  # tensorboard --logdir /tmp/logs
    """

    def __init__(self, log_dir: str | os.PathLike[str] | None = None) -> None:
        super().__init__()
        self._log_dir = None if log_dir is None else os.fspath(log_dir)
        self._writer: Any = None
        self._rounds = 0

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        logs = logs or {}
        step = int(logs.get("version", self._rounds))
        self._rounds += 1
        if self._writer is None:
            self._writer = tf.summary.create_file_writer(self._folder())
        with self._writer.as_default():
            for tag, value in _scalars(logs.get("metrics", {})):
                tf.summary.scalar(tag, value, step=step)
        self._writer.flush()  # a pass may be the last one before the process ends

    def _folder(self) -> str:
        if self._log_dir is not None:
            return self._log_dir
        job_directory = (self.params or {}).get("job_directory")
        if not job_directory:
            raise CallbackError(
                "SummaryWriter has no folder to write to: log_dir was not given, and the job has no "
                'directory in params["job_directory"]. Pass a folder: SummaryWriter(log_dir="/path/to/logs").'
            )
        return os.path.join(os.fspath(job_directory), "tensorboard")


def _scalars(metrics: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for name, value in metrics.items():
        tag = f"{prefix}{name}"
        if isinstance(value, Mapping):
            yield from _scalars(value, f"{tag}/")
            continue
        values = np.asarray(value, dtype=np.float64)
        if values.ndim == 0:
            yield tag, float(values)
        else:
            yield from ((f"{tag}/{index}", float(item)) for index, item in enumerate(values.ravel()))
