"""A model whose optimizers exchange with the servers whenever they are applied."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import keras

from elasticcb.compute.backend import Applied, Exchange, PlacedComputation
from elasticcb.compute.clipping import clippings
from elasticcb.compute.torch.arrays import as_array
from elasticcb.compute.torch.gradients import sort_gradients
from elasticcb.compute.torch.loss_scale import TorchScale
from elasticcb.errors import ModelFileError
from elasticcb.optimizers.traits import model_optimizers
from elasticcb.rpc.tensors import Array
from elasticcb.sharding.partition import VariableSpec


class TorchPlaced(PlacedComputation):
    """Takes the place of each optimizer's `apply`. For the arguments see `Backend.placed`."""

    def __init__(self, model: keras.Model, specs: Sequence[VariableSpec], num_ps: int, exchange: Exchange) -> None:
        self._model, self._specs, self._exchange = model, specs, exchange
        self._indices = {id(variable): index for index, variable in enumerate(model.weights)}
        optimizers = model_optimizers(model)
        self._clipped = clippings(model, specs, optimizers, num_ps)
        for optimizer in optimizers:
            apply = functools.partial(self._apply, optimizer, TorchScale(optimizer))
            # Keras's own `apply_gradients` calls it. Around Keras's __setattr__, which tracks what it is given.
            object.__setattr__(optimizer, "apply", apply)

    def set_weights(self, weights: Sequence[Array]) -> None:
        for variable, value in zip(self._model.weights, weights, strict=True):
            variable.assign(value)

    def _apply(
        self, optimizer: Any, scale: TorchScale, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None
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
        gradients, usable = scale.unscale(found)
        dense, rows = sort_gradients(gradients, self._specs, self._clipped)
        state = {
            index: as_array(variable.value)
            for index, (variable, spec) in enumerate(zip(self._model.weights, self._specs, strict=True))
            if not spec.trainable
        }
        self.set_weights(self._exchange(Applied(dense, rows, state, usable)))

    def _index(self, optimizer: Any, variable: Any) -> int:
        index = self._indices.get(id(variable))
        if index is None or not self._specs[index].trainable:
            name = getattr(variable, "path", None) or variable.name
            raise ModelFileError(
                f"The optimizer {optimizer.name!r} was given a gradient of {name!r}, which is no trainable weight of "
                "the model that was placed, so that no server applies it."
            )
        return index
