"""A Keras model as a list of weights, the same in every process of a job."""

from __future__ import annotations

import json
from typing import Any

import keras

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


def prime(model: keras.Model, batch: Any, labelled: bool) -> None:
    """Builds what Keras builds lazily (weights of a subclass model, metrics), with one real batch.

    Metrics then hold that batch: reset them.

    Args:
        model: compiled if `labelled`.
        batch: `(features, labels[, sample_weight])` if `labelled`, else features.
    """
    if labelled:
        model.test_step(batch)
    else:
        model.predict_step((batch,))
