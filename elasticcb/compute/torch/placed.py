"""A model whose optimizers exchange with the servers whenever they are applied."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from elasticcb.compute.backend import Applied, Exchange
from elasticcb.compute.placed import PlacedOptimizers
from elasticcb.compute.torch.arrays import as_array
from elasticcb.compute.torch.gradients import sort_gradients
from elasticcb.compute.torch.loss_scale import TorchScale
from elasticcb.rpc.tensors import Array
from elasticcb.sharding.partition import VariableSpec


class TorchPlaced(PlacedOptimizers):
    """For the arguments, see `Backend.placed`."""

    def __init__(self, model: keras.Model, specs: Sequence[VariableSpec], num_ps: int, exchange: Exchange) -> None:
        super().__init__(model, specs, num_ps, exchange, TorchScale)

    def set_weights(self, weights: Sequence[Array]) -> None:
        for variable, value in zip(self._model.weights, weights, strict=True):
            variable.assign(value)

    def _update(self, gradients: dict[int, Any], usable: bool) -> None:
        dense, rows = sort_gradients(gradients, self._specs, self._clipped)
        state = {
            index: as_array(variable.value)
            for index, (variable, spec) in enumerate(zip(self._model.weights, self._specs, strict=True))
            if not spec.trainable
        }
        self.set_weights(self._exchange(Applied(dense, rows, state, usable)))
