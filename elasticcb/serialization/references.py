"""A placed model and its parts: functions, arguments and results refer to them instead of carrying them."""

from __future__ import annotations

from typing import Any

import keras

from elasticcb.keras_private import layers_of
from elasticcb.optimizers.traits import model_optimizers


def references(model: keras.Model | None) -> list[Any]:
    """The model, its optimizers, layers and weights, in the same order in every process."""
    if model is None:
        return []
    return [model, *model_optimizers(model), *layers_of(model)[1:], *model.weights]
