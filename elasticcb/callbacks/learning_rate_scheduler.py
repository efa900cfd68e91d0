"""Sets the learning rate of each batch from the model version."""

# mypy: allow-subclassing-any

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from elasticcb.errors import CallbackError, ModelFileError


class LearningRateScheduler(keras.callbacks.Callback):
    """Sets the learning rate before each training batch, on the worker that runs the batch.

    The rate is sent with the gradients of the batch, and parameter servers apply them with it. Versions count over all
    workers, so the schedule does not depend on the number of workers. (Keras' callback of this name works by epoch.)

    Args:
        schedule_fn: takes the model version that was pulled for the batch (int, from 0), and returns the learning rate
            (a finite number).

    Raises:
        ModelFileError: `schedule_fn` can't be called.

    Example:

        def callbacks():
            return [LearningRateScheduler(lambda version: 0.1 if version < 1000 else 0.01)]
    """

    def __init__(self, schedule_fn: Callable[[int], float]) -> None:
        super().__init__()
        if not callable(schedule_fn):
            raise ModelFileError(
                "LearningRateScheduler expects a function that takes the model version and returns a "
                f"learning rate. Received: {schedule_fn!r} of type {type(schedule_fn).__name__}."
            )
        self._schedule_fn = schedule_fn

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        # Setting the current rate again detects an optimizer that can't be scheduled before training starts.
        optimizer = self._optimizer()
        self._set(optimizer, float(keras.ops.convert_to_numpy(optimizer.learning_rate)))

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        optimizer = self._optimizer()
        self._set(optimizer, _as_rate(self._schedule_fn(batch), batch))

    def _optimizer(self) -> Any:
        optimizer = getattr(self.model, "optimizer", None)
        if not hasattr(optimizer, "learning_rate"):
            given = "no optimizer" if optimizer is None else f"an optimizer of type {type(optimizer).__name__}"
            raise CallbackError(
                f'The optimizer must have a "learning_rate" attribute. Received: {given}. Return a '
                "keras.optimizers.Optimizer from optimizer(), or remove LearningRateScheduler from callbacks()."
            )
        return optimizer

    def _set(self, optimizer: Any, rate: float) -> None:
        try:
            optimizer.learning_rate = rate
        except (AttributeError, TypeError) as error:
            raise CallbackError(
                "The learning rate of the optimizer can't be set, for example because it was created with a "
                "LearningRateSchedule. Create the optimizer with a number as its learning_rate, or remove "
                f"LearningRateScheduler from callbacks(). ({type(optimizer).__name__} reports: {error})"
            ) from error


def _as_rate(value: Any, version: int) -> float:
    """Converts `value` to a float; accepts Python and NumPy numbers and scalar tensors."""
    is_text_or_truth = isinstance(value, (bool, str, bytes, np.bool_))
    try:
        rate = None if is_text_or_truth or np.ndim(value) else float(value)
    except (TypeError, ValueError):
        rate = None
    if rate is None or not math.isfinite(rate):
        raise CallbackError(
            f"The output of the schedule function should be a finite number. Got: {value!r} of type "
            f"{type(value).__name__} for model version {version}. Return a float for every version."
        )
    return rate
