"""A Keras model as a list of weights, the same in every process of a job."""

from __future__ import annotations

import json
import warnings
from typing import Any

import keras
import tensorflow as tf

from elasticcb.errors import ModelFileError, describe, user_traceback
from elasticcb.model_spec import ModelSpec, building
from elasticcb.ps.partition import VariableSpec


def variable_specs(model: keras.Model) -> list[VariableSpec]:
    """The weights that the servers hold, in the order of `model.weights`."""
    trainable = {id(variable) for variable in model.trainable_weights}
    return [
        VariableSpec(
            path=variable.path,
            shape=tuple(variable.shape),
            dtype=keras.backend.standardize_dtype(variable.dtype),
            trainable=id(variable) in trainable,
            constraint=_constraint(variable),
        )
        for variable in model.weights
    ]


def _constraint(variable: keras.Variable) -> str:
    if variable.constraint is None:
        return ""
    return json.dumps(keras.saving.serialize_keras_object(variable.constraint))


def prime(spec: ModelSpec, model: keras.Model, batch: Any, mode: str) -> None:
    """Builds what Keras builds lazily (weights of a subclass model, metrics), with one real batch.

    Metrics then hold that batch: reset them.

    Args:
        model: of `spec`, compiled unless `mode` is "prediction".
        batch: `(features, labels[, sample_weight])`, or features alone for "prediction".

    Raises:
        ModelFileError: `feed` gives something else, or the model, its loss or its metrics can't take it.
    """
    labelled = mode != "prediction"
    _check_structure(spec, batch, mode)
    features = batch[0] if labelled and isinstance(batch, tuple) else batch
    inputs = _count_inputs(model)
    if inputs and isinstance(features, tuple) and len(features) > inputs:
        # Keras would take the first and pass over the others.
        raise ModelFileError(
            f"`feed` in {spec.path} gives {len(features)} features in {mode}, and the model has {inputs} "
            f"input{'s' if inputs > 1 else ''}.{_shown(batch, mode)}"
        )
    _allow_one_named_feature(model, features)
    try:
        with building:
            if labelled:
                model.test_step(batch)
            else:
                model.predict_step((batch,))
    except ModelFileError as error:
        raise ModelFileError(f"{error}{_shown(batch, mode)}", error.user_traceback) from error
    except Exception as error:
        raise ModelFileError(
            f"The model of {spec.path} can't run on the first batch from `feed`: {describe(error)}"
            f"{_shown(batch, mode)}",
            user_traceback(error),
        ) from error


def _check_structure(spec: ModelSpec, batch: Any, mode: str) -> None:
    if mode != "prediction" and isinstance(batch, tuple) and not 1 <= len(batch) <= 3:
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


def _shown(batch: Any, mode: str) -> str:
    parts: dict[str, Any] = {"features": batch}
    if mode != "prediction" and isinstance(batch, tuple):
        parts = dict(zip(("features", "labels", "sample_weight"), batch, strict=False))
    shown = "; ".join(f"{name} {tf.nest.map_structure(_shape, part)}" for name, part in parts.items())
    hint = ""
    if mode == "prediction" and isinstance(batch, tuple):
        hint = " In prediction, `feed` must return features alone, without labels."
    return f"\nThe batch ({mode}): {shown}.{hint}"


def _shape(tensor: Any) -> str:
    return f"{type(tensor).__name__.replace('EagerTensor', 'tensor')}{tuple(tensor.shape)} {tensor.dtype.name}"
