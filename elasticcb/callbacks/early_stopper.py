"""Ends training when a function of the evaluation rounds so far says so."""

# mypy: allow-subclassing-any

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from elasticcb.errors import CallbackError, ModelFileError


class EarlyStopper(keras.callbacks.Callback):
    """Stops training by the metrics of the evaluation rounds, on the master.

    No new training task is handed out then; those that run are finished, and the last evaluation round
    and TRAIN_END follow.

    Args:
        stop_fn: takes the list of all rounds' metrics, oldest first, each as in `logs["metrics"]`
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
                "EarlyStopper expects a function that takes the list of all rounds' metrics and returns a "
                f"bool. Received: {stop_fn!r} of type {type(stop_fn).__name__}."
            )
        self._stop_fn = stop_fn
        self._rounds: list[dict[str, Any]] = []

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        # Copied: a stop_fn that edits its argument must not change what the next callback sees.
        self._rounds.append(copy.deepcopy((logs or {}).get("metrics", {})))
        answer = self._stop_fn(self._rounds)
        is_truth = isinstance(answer, (bool, np.bool_)) or (
            getattr(answer, "dtype", None) in (np.bool_, "bool") and not np.ndim(answer)
        )
        if not is_truth:
            raise CallbackError(
                f"The output of stop_fn should be a bool. Got: {answer!r} of type {type(answer).__name__} "
                f"after {len(self._rounds)} evaluation round(s). Return True to stop, False to go on."
            )
        if answer:
            self.model.stop_training = True
