"""Stops training at a model version."""

# mypy: allow-subclassing-any

from __future__ import annotations

import operator
from typing import Any

import keras

from elasticcb.errors import ModelFileError


class MaxStepsStopper(keras.callbacks.Callback):
    """Stops training once the model has received `max_steps` pushes, counted over all workers.

    Running tasks of other workers are still completed, so the final version may be higher; `--max_step` stops exactly.

    Args:
        max_steps: model version at which to stop, at least 1.

    Raises:
        ModelFileError: `max_steps` is not a whole number of at least 1.

    Example:

        def callbacks():
            return [MaxStepsStopper(max_steps=1000)]
    """

    def __init__(self, max_steps: int) -> None:
        super().__init__()
        try:
            self._max_steps = operator.index(max_steps)
        except TypeError:
            self._max_steps = 0
        if self._max_steps < 1:
            raise ModelFileError(
                f"MaxStepsStopper expects max_steps as a whole number of at least 1. Received: {max_steps!r}."
            )

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if batch >= self._max_steps:
            self.model.stop_training = True


MaxStepsStopping = MaxStepsStopper  # ElasticDL's name
