"""Stops training when a function of all evaluation results returns True."""

# mypy: allow-subclassing-any

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from elasticcb.errors import CallbackError, ModelFileError


class EarlyStopper(keras.callbacks.Callback):
    """Stops training depending on the metrics of the evaluation passes; runs on the master.

    No new training tasks are started then; running ones finish, and the last evaluation pass and TRAIN_END follow.

    Args:
        stop_fn: takes the list of the metrics of all evaluation passes, oldest first, each as in `logs["metrics"]`
            (`{name: value}`, or `{output: {name: value}}`), and returns a bool: whether to stop.

    Raises:
        ModelFileError: `stop_fn` can't be called.

    Example:

        def callbacks():
            return [EarlyStopper(lambda rounds: rounds[-1]["accuracy"] > 0.99)]
    """

    def __init__(self, stop_fn: Callable[[list[dict[str, Any]]], bool]) -> None:
        super().__init__()
        if not callable(stop_fn):
            raise ModelFileError(
                "EarlyStopper expects a function that takes the list of all evaluation metrics and returns a bool. "
                f"Received: {stop_fn!r} of type {type(stop_fn).__name__}."
            )
        self._stop_fn = stop_fn
        self._rounds: list[dict[str, Any]] = []

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        # Copied, so that a stop_fn that modifies its argument does not affect other callbacks.
        self._rounds.append(copy.deepcopy((logs or {}).get("metrics", {})))
        answer = self._stop_fn(self._rounds)
        is_truth = isinstance(answer, (bool, np.bool_)) or (
            getattr(answer, "dtype", None) in (np.bool_, "bool") and not np.ndim(answer)
        )
        if not is_truth:
            raise CallbackError(
                f"The output of stop_fn should be a bool. Got: {answer!r} of type {type(answer).__name__} after "
                f"evaluation pass {len(self._rounds)}. Return True to stop, False to continue."
            )
        if answer:
            self.model.stop_training = True
