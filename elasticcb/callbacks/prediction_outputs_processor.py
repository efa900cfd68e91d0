"""Passes the outputs of every predicted batch to a function."""

# mypy: allow-subclassing-any

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import keras

from elasticcb.errors import CallbackError, ModelFileError


class PredictionOutputsProcessor(keras.callbacks.Callback):
    """Calls a function with the outputs of each prediction batch, on the worker that ran the batch.

    Pass a function, or derive a class and override `process`. Workers run concurrently, so each must write to its own
    destination, which `worker_id` identifies. If a worker dies, its unfinished task is predicted again from the start.
    Results that a function keeps in memory are lost with its worker: derive a class with an `on_predict_end` as well
    (docs/callbacks.md).

    Args:
        process_fn: `process_fn(predictions, worker_id)` or `process_fn(predictions)`. `predictions` has the
            structure of the model's outputs, with the batch on axis 0; `worker_id` is an int.

    Raises:
        ModelFileError: `process_fn` is not callable, or it is missing and `process` is not overridden.

    Example:

        def callbacks():
            return [PredictionOutputsProcessor(lambda predictions: print(predictions.shape))]
    """

    _call: Callable[[Any, int], Any] | None = None  # on the class: a subclass may not call our __init__

    def __init__(self, process_fn: Callable[..., Any] | None = None) -> None:
        super().__init__()
        if process_fn is not None:
            self._call = _with_worker_id(process_fn)
        elif type(self).process is PredictionOutputsProcessor.process:
            raise ModelFileError(
                "PredictionOutputsProcessor has nothing to call. Expected: a function, as in "
                "PredictionOutputsProcessor(process_fn), or a subclass with "
                "`def process(self, predictions, worker_id)`. Received: None."
            )

    def process(self, predictions: Any, worker_id: int) -> None:
        """Processes the outputs of one batch; override it, or pass `process_fn`."""
        if self._call is not None:
            self._call(predictions, worker_id)

    def on_predict_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if not logs or "predictions" not in logs:
            raise CallbackError(f'Expected the outputs of the batch in logs["predictions"]. Received logs: {logs!r}.')
        self.process(logs["predictions"], int((self.params or {}).get("worker_id", 0)))


BasePredictionOutputsProcessor = PredictionOutputsProcessor  # ElasticDL's name of the base class for users


def _with_worker_id(process_fn: Callable[..., Any]) -> Callable[[Any, int], Any]:
    """Adapts `process_fn` to a function of predictions and worker_id."""
    if not callable(process_fn):
        raise ModelFileError(
            "PredictionOutputsProcessor expects a function of (predictions, worker_id) or of (predictions). "
            f"Received: {process_fn!r} of type {type(process_fn).__name__}."
        )
    try:
        signature = inspect.signature(process_fn)
    except ValueError:  # some functions written in C have none
        return lambda predictions, worker_id: process_fn(predictions)
    named = signature.parameters.get("worker_id")
    if named is not None and named.kind is not named.POSITIONAL_ONLY:
        return lambda predictions, worker_id: process_fn(predictions, worker_id=worker_id)
    required = [
        parameter
        for parameter in signature.parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    if len(required) == 2:
        return process_fn
    try:
        signature.bind(None)
    except TypeError as error:
        raise ModelFileError(
            "PredictionOutputsProcessor calls process_fn(predictions, worker_id) or process_fn(predictions). "
            f"Received a function that takes {signature}, which matches neither."
        ) from error
    return lambda predictions, worker_id: process_fn(predictions)
