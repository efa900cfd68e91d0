"""Checks of the first batch that a model is built with, and what is told when the model can't take it."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import keras

from elasticcb.errors import ModelFileError, describe, user_traceback
from elasticcb.model.spec import Spec
from elasticcb.settings import Mode


def check_batch(spec: Spec, model: keras.Model, batch: Any, mode: Mode) -> None:
    """Raises `ModelFileError` when a batch of the input pipeline is of another structure than the model takes."""
    _check_structure(spec, batch, mode)
    features = keras.utils.unpack_x_y_sample_weight(batch)[0] if isinstance(batch, tuple) else batch
    inputs = _count_inputs(model)
    if inputs and isinstance(features, tuple) and len(features) > inputs:
        # Keras would take the first and pass over the others.
        raise ModelFileError(
            f"`feed` in {spec.path} gives {len(features)} features in {mode}, and the model has {inputs} "
            f"input{'s' if inputs > 1 else ''}.{_shown(batch, mode)}"
        )
    _allow_one_named_feature(model, features)


@contextlib.contextmanager
def told_with_batch(
    spec: Spec, batch: Any, mode: Mode, explain: Callable[[Exception], str] = lambda error: ""
) -> Iterator[None]:
    """What a model raises on its first batch becomes a `ModelFileError` that shows the batch.

    Args:
        explain: what to do about an error, where the backend knows it; "" where it does not.
    """
    try:
        yield
    except ModelFileError as error:
        raise ModelFileError(f"{error}{_shown(batch, mode)}", error.user_traceback) from error
    except Exception as error:
        if isinstance(error, ValueError) and "No loss to compute" in str(error):
            raise ModelFileError(f"The model of {spec.path} has no loss. {spec.loss_advice}") from error
        raise ModelFileError(
            f"The model of {spec.path} can't run on the first batch from `feed`: "
            f"{explain(error) or describe(error)}{_shown(batch, mode)}",
            user_traceback(error),
        ) from error


def fixed_batch_size(model: keras.Model) -> int | None:
    """How many records a batch must have, where the model takes batches of one size only."""
    try:
        size = model.inputs[0].shape[0]
    except (AttributeError, ValueError, TypeError, IndexError):
        return None
    return None if size is None else int(size)


def _check_structure(spec: Spec, batch: Any, mode: Mode) -> None:
    if mode is not Mode.PREDICTION and isinstance(batch, tuple) and not 1 <= len(batch) <= 3:
        raise ModelFileError(
            f"`feed` in {spec.path} gives tuples of {len(batch)} in {mode}; expected (features, labels) or "
            "(features, labels, sample_weight). Put several features into a dict, or into a tuple of their own."
        )


def _allow_one_named_feature(model: keras.Model, features: Any) -> None:
    """Keras warns when a dict of one feature is given to a model of one input, though nothing can be mixed up.

    The name is worth keeping: the exported signature takes the feature by it.
    """
    if not isinstance(features, dict) or len(features) != 1:
        return
    if _count_inputs(model) == 1:
        warnings.filterwarnings("ignore", message="The structure of `inputs` doesn't match")


def _count_inputs(model: keras.Model) -> int:
    """How many tensors a functional or Sequential model takes; 0 where that can't be told."""
    try:
        return len(model.inputs or ())
    except (AttributeError, ValueError):
        return 0


def _shown(batch: Any, mode: Mode) -> str:
    parts: dict[str, Any] = {"features": batch}
    if isinstance(batch, tuple):
        parts = dict(zip(("features", "labels", "sample_weight"), batch, strict=False))
    shown = "; ".join(f"{name} {keras.tree.map_structure(_shape, part)}" for name, part in parts.items())
    hint = ""
    if mode is Mode.PREDICTION and isinstance(batch, tuple) and len(batch) == 1:
        hint = " A step gets them as `(features,)`: there are no labels in prediction."
        if isinstance(batch[0], tuple):
            hint = " In prediction, `feed` must return features alone, without labels."
    return f"\nThe batch ({mode}): {shown}.{hint}"


def _shape(tensor: Any) -> str:
    return f"{type(tensor).__name__.replace('EagerTensor', 'tensor')}{tuple(tensor.shape)} {tensor.dtype.name}"
