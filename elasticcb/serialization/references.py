"""A placed model and its parts: functions, arguments and results refer to them instead of carrying them."""

from __future__ import annotations

from typing import Any

import keras

from elasticcb.optimizers.traits import model_optimizers


def references(model: keras.Model | None) -> list[Any]:
    """The model, its optimizers, layers and weights, in the same order in every process."""
    if model is None:
        return []
    return [model, *model_optimizers(model), *model._flatten_layers(include_self=False), *model.weights]
