"""Checks the first batch, with which a model is built, and explains errors."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import keras

from elasticcb.errors import ModelFileError, describe, user_traceback
from elasticcb.model.spec import Spec, words_of
from elasticcb.process.wording import how_many
from elasticcb.settings import Mode


def check_batch(spec: Spec, model: keras.Model, batch: Any, mode: Mode) -> None:
    """Raises `ModelFileError` when a batch of the input pipeline does not have the structure that the model expects."""
    _check_structure(spec, batch, mode)
    features = keras.utils.unpack_x_y_sample_weight(batch)[0] if isinstance(batch, tuple) else batch
    inputs = _count_inputs(model)
    if inputs and isinstance(features, tuple) and len(features) > inputs:
        # Keras would use the first and ignore the others.
        raise ModelFileError(
            f"{words_of(spec).data} returns {len(features)} features in {mode}, but the model has "
            f"{how_many(inputs, 'input')}.{_shown(batch, mode)}"
        )
    _allow_one_named_feature(model, features)


@contextlib.contextmanager
def told_with_batch(
    spec: Spec, batch: Any, mode: Mode, explain: Callable[[Exception], str] = lambda error: ""
) -> Iterator[None]:
    """Converts an error of the model on its first batch to a `ModelFileError` that shows the batch."""
    try:
        yield
    except ModelFileError as error:
        raise ModelFileError(f"{error}{_shown(batch, mode)}", error.user_traceback) from error
    except Exception as error:
        if isinstance(error, ValueError) and "No loss to compute" in str(error):
            raise ModelFileError(f"{words_of(spec).model} has no loss. {spec.loss_advice}") from error
        raise ModelFileError(
            f"{words_of(spec).model} can't run on the first batch: "
            f"{explain(error) or describe(error)}{_shown(batch, mode)}",
            user_traceback(error),
        ) from error


def fixed_batch_size(model: keras.Model) -> int | None:
    """The number of records that a batch must have, if the model only accepts batches of one size."""
    try:
        size = model.inputs[0].shape[0]
    except (AttributeError, ValueError, TypeError, IndexError):
        return None
    return None if size is None else int(size)


def _check_structure(spec: Spec, batch: Any, mode: Mode) -> None:
    if mode is not Mode.PREDICTION and isinstance(batch, tuple) and not 1 <= len(batch) <= 3:
        raise ModelFileError(
            f"{words_of(spec).data} returns tuples of {len(batch)} in {mode}; expected (features, labels) or "
            "(features, labels, sample_weight). Put several features into a dict or a nested tuple."
        )


def _allow_one_named_feature(model: keras.Model, features: Any) -> None:
    """Keras warns when a model with one input is given a dict with one feature, although this is unambiguous.

    The name is useful: the exported signature uses it.
    """
    if not isinstance(features, dict) or len(features) != 1:
        return
    if _count_inputs(model) == 1:
        warnings.filterwarnings("ignore", message="The structure of `inputs` doesn't match")


def _count_inputs(model: keras.Model) -> int:
    """Number of input tensors of a functional or Sequential model; 0 if unknown."""
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
            hint = " In prediction, the data must be only features, without labels."
    return f"\nThe batch ({mode}): {shown}.{hint}"


def _shape(tensor: Any) -> str:
    return f"{type(tensor).__name__.replace('EagerTensor', 'tensor')}{tuple(tensor.shape)} {tensor.dtype.name}"
