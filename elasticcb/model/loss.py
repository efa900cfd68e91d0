"""Adapts a model file's `loss(labels, predictions[, sample_weight])` to a Keras model's `compute_loss`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import keras

from elasticcb.errors import ModelFileError


def make_compute_loss(model: keras.Model, loss: Callable[..., Any], path: str) -> Callable[..., Any]:
    """Creates `model.compute_loss`: the mean of `loss` over the batch, plus `model.losses`.

    Args:
        loss: returns one number for the batch or one per example; weighted here unless it takes a third argument, the
            sample weights (None if `feed` returns none).

    Raises:
        ModelFileError: `loss` has another signature.
    """
    call = _with_weight(loss, path)

    def compute_loss(
        x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, training: bool = True
    ) -> Any:
        del x, training
        if y is None:
            raise ModelFileError(
                f"`feed` in {path} gives no labels, which `loss` needs. In training and evaluation, return a dataset "
                "of (features, labels) or (features, labels, sample_weight)."
            )
        total = keras.ops.mean(call(y, y_pred, sample_weight))
        for extra in model.losses:
            total = total + keras.ops.sum(keras.ops.cast(extra, total.dtype))
        return total

    return compute_loss


def _with_weight(loss: Callable[..., Any], path: str) -> Callable[[Any, Any, Any], Any]:
    """Wraps `loss` as a function of labels, predictions and sample weights that checks its result."""
    by_name = by_position = False
    try:
        signature = inspect.signature(loss)
    except TypeError as error:
        raise ModelFileError(
            f"`loss` in {path} is {loss!r}. Expected a function of (labels, predictions), a keras.losses.Loss or its "
            "name."
        ) from error
    except ValueError:
        pass  # some functions written in C have none
    else:
        by_name = "sample_weight" in signature.parameters
        by_position = not by_name and _can_be_called(signature, 3) and not _can_be_called(signature, 2)
        if not by_name and not by_position and not _can_be_called(signature, 2):
            raise ModelFileError(
                f"`loss` in {path} takes {signature}. Expected loss(labels, predictions) or loss(labels, "
                "predictions, sample_weight)."
            )

    def call(labels: Any, predictions: Any, sample_weight: Any) -> Any:
        if by_name:
            return _checked(loss(labels, predictions, sample_weight=sample_weight), path)
        if by_position:
            return _checked(loss(labels, predictions, sample_weight), path)
        value = _checked(loss(labels, predictions), path)
        return value if sample_weight is None else _weigh(value, sample_weight, path)

    return call


def _can_be_called(signature: inspect.Signature, count: int) -> bool:
    """Whether it accepts `count` positional arguments."""
    try:
        signature.bind(*range(count))
    except TypeError:
        return False
    return True


def _checked(value: Any, path: str) -> Any:
    try:
        if value is None or isinstance(value, Mapping):
            raise TypeError("no tensor")
        tensor = keras.ops.convert_to_tensor(value)
        dtype = keras.backend.standardize_dtype(tensor.dtype)
        if not keras.backend.is_float_dtype(dtype):
            raise TypeError(f"of dtype {dtype}")
    except (TypeError, ValueError) as error:
        raise ModelFileError(
            f"`loss` in {path} returned {value!r} ({error}). Expected a floating-point tensor: one number for "
            "the batch, or one per example."
        ) from error
    return tensor


def _weigh(value: Any, sample_weight: Any, path: str) -> Any:
    if isinstance(sample_weight, Mapping):
        raise ModelFileError(
            f"`feed` in {path} returns sample weights by output ({', '.join(map(str, sample_weight))}), but `loss` "
            "takes none, so it is unclear which to apply. Add a third argument `sample_weight` to `loss`."
        )
    if not len(value.shape):
        raise ModelFileError(
            f"`feed` in {path} returns sample weights, but `loss` returns one number for the whole batch, so they "
            "can't be applied. Return one loss per example, or add a third argument `sample_weight`."
        )
    weight = keras.ops.cast(sample_weight, value.dtype)
    while len(weight.shape) > len(value.shape):
        weight = keras.ops.squeeze(weight, -1)
    while len(weight.shape) < len(value.shape):
        weight = keras.ops.expand_dims(weight, -1)
    return value * weight
