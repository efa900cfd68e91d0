"""A model whose optimizers exchange with the servers whenever they are applied."""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import keras

from elasticcb.compute.backend import Exchange, PlacedComputation
from elasticcb.compute.capture import key_of, path_of
from elasticcb.compute.clipping import clippings
from elasticcb.compute.loss_scale import LossScale
from elasticcb.errors import ModelFileError
from elasticcb.optimizers.traits import model_optimizers
from elasticcb.sharding.partition import VariableSpec


class PlacedOptimizers(PlacedComputation):
    """Replaces each optimizer's `apply`."""

    def __init__(
        self,
        model: keras.Model,
        specs: Sequence[VariableSpec],
        num_ps: int,
        exchange: Exchange,
        scale: type[LossScale],
    ) -> None:
        self._model, self._specs, self._exchange = model, specs, exchange
        self._indices = {key_of(variable): index for index, variable in enumerate(model.weights)}
        optimizers = model_optimizers(model)
        self._clipped = clippings(model, specs, optimizers, num_ps)
        for optimizer in optimizers:
            apply = functools.partial(self._apply, optimizer, scale(optimizer))
            # Keras's own `apply_gradients` calls it. Bypasses Keras's __setattr__, which tracks values.
            object.__setattr__(optimizer, "apply", apply)

    @abstractmethod
    def _update(self, gradients: dict[int, Any], usable: Any) -> None:
        """Exchanges gradients of the plain loss, by variable; `usable` as in `LossScale.unscale`."""

    def _apply(
        self,
        optimizer: Any,
        scale: LossScale,
        grads: Sequence[Any],
        trainable_variables: Sequence[Any] | None = None,
    ) -> None:
        if trainable_variables is None:
            trainable_variables = getattr(optimizer, "_trainable_variables", None) or self._model.trainable_weights
        found = {
            self._index(optimizer, variable): gradient
            for gradient, variable in zip(grads, trainable_variables, strict=True)
            if gradient is not None
        }
        if not found:
            raise ModelFileError(f"The optimizer {optimizer.name!r} was given no gradients: all of them are None.")
        self._update(*scale.unscale(found))

    def _index(self, optimizer: Any, variable: Any) -> int:
        index = self._indices.get(key_of(variable))
        if index is None or not self._specs[index].trainable:
            raise ModelFileError(
                f"The optimizer {optimizer.name!r} was given a gradient of {path_of(variable)!r}, which is not a "
                "trainable weight of the model that was placed, so no server applies it."
            )
        return index
