"""A model whose optimizers exchange with the servers whenever they are applied, also inside a tf.function."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from elasticcb.compute.backend import Applied, Exchange
from elasticcb.compute.placed import PlacedOptimizers
from elasticcb.compute.tensorflow.gradients import sort_gradients
from elasticcb.compute.tensorflow.loss_scale import TensorFlowScale
from elasticcb.rpc.tensors import Array
from elasticcb.sharding.partition import VariableSpec


class TensorFlowPlaced(PlacedOptimizers):
    """For the arguments, see `Backend.placed`."""

    def __init__(self, model: keras.Model, specs: Sequence[VariableSpec], num_ps: int, exchange: Exchange) -> None:
        super().__init__(model, specs, num_ps, exchange, TensorFlowScale)
        self._state = [index for index, spec in enumerate(specs) if not spec.trainable]

    def set_weights(self, weights: Sequence[Any]) -> None:
        for variable, value, spec in zip(self._model.weights, weights, self._specs, strict=True):
            variable.assign(tf.ensure_shape(value, spec.shape))

    def _update(self, gradients: dict[int, Any], usable: Any) -> None:
        dense, rows, _ = sort_gradients(gradients, self._specs, self._clipped)
        # As inputs, so that in a graph the state is read after preceding operations, and weights are set before later
        # ones.
        state = [tf.identity(self._model.weights[index].value) for index in self._state]
        inputs = [usable, *state, *dense.values(), *(part for pair in rows.values() for part in pair)]
        exchange = functools.partial(self._exchanged, tuple(dense), tuple(rows))
        if tf.executing_eagerly():
            self.set_weights(exchange(*(tensor.numpy() for tensor in inputs)))
        else:
            self.set_weights(tf.numpy_function(exchange, inputs, [tf.as_dtype(spec.dtype) for spec in self._specs]))

    def _exchanged(self, dense: tuple[int, ...], rows: tuple[int, ...], usable: Any, *inputs: Array) -> list[Array]:
        given = iter(inputs)
        state = dict(zip(self._state, given, strict=False))
        gradients = {index: next(given) for index in dense}
        pairs = {index: (next(given), next(given)) for index in rows}
        return list(self._exchange(Applied(gradients, pairs, state, bool(usable))))
