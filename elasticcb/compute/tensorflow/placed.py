"""A model whose optimizers exchange with the servers whenever they are applied, also within a tf.function."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from elasticcb.compute.backend import Applied, Exchange, PlacedComputation
from elasticcb.compute.clipping import clippings
from elasticcb.compute.tensorflow.gradients import sort_gradients
from elasticcb.compute.tensorflow.loss_scale import TensorFlowScale
from elasticcb.errors import ModelFileError
from elasticcb.optimizers.traits import model_optimizers
from elasticcb.rpc.tensors import Array
from elasticcb.sharding.partition import VariableSpec


class TensorFlowPlaced(PlacedComputation):
    """Takes the place of each optimizer's `apply`. For the arguments see `Backend.placed`."""

    def __init__(self, model: keras.Model, specs: Sequence[VariableSpec], num_ps: int, exchange: Exchange) -> None:
        self._model, self._specs, self._exchange = model, specs, exchange
        self._indices = {_key(variable): index for index, variable in enumerate(model.weights)}
        self._state = [index for index, spec in enumerate(specs) if not spec.trainable]
        optimizers = model_optimizers(model)
        self._clipped = clippings(model, specs, optimizers, num_ps)
        for optimizer in optimizers:
            apply = functools.partial(self._apply, optimizer, TensorFlowScale(optimizer))
            # Keras's own `apply_gradients` calls it. Around Keras's __setattr__, which tracks what it is given.
            object.__setattr__(optimizer, "apply", apply)

    def set_weights(self, weights: Sequence[Any]) -> None:
        for variable, value, spec in zip(self._model.weights, weights, self._specs, strict=True):
            variable.assign(tf.ensure_shape(value, spec.shape))

    def _apply(
        self,
        optimizer: Any,
        scale: TensorFlowScale,
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
        gradients, usable = scale.unscale(found)
        dense, rows, _ = sort_gradients(gradients, self._specs, self._clipped)
        # As inputs, so that in a graph the state is read after, and weights are set before what stands so there.
        state = [tf.identity(self._model.weights[index].value) for index in self._state]
        inputs = [usable, *state, *dense.values(), *(part for pair in rows.values() for part in pair)]
        exchange = functools.partial(self._exchanged, tuple(dense), tuple(rows))
        if tf.executing_eagerly():
            self.set_weights(exchange(*(tensor.numpy() for tensor in inputs)))
        else:
            self.set_weights(tf.numpy_function(exchange, inputs, [tf.as_dtype(spec.dtype) for spec in self._specs]))

    def _index(self, optimizer: Any, variable: Any) -> int:
        index = self._indices.get(_key(variable))
        if index is None or not self._specs[index].trainable:
            name = getattr(variable, "path", None) or variable.name
            raise ModelFileError(
                f"The optimizer {optimizer.name!r} was given a gradient of {name!r}, which is no trainable weight of "
                "the model that was placed, so that no server applies it."
            )
        return index

    def _exchanged(self, dense: tuple[int, ...], rows: tuple[int, ...], usable: Any, *inputs: Array) -> list[Array]:
        given = iter(inputs)
        state = dict(zip(self._state, given, strict=False))
        gradients = {index: next(given) for index in dense}
        pairs = {index: (next(given), next(given)) for index in rows}
        return list(self._exchange(Applied(gradients, pairs, state, bool(usable))))


def _key(variable: Any) -> int:
    """The same for a Keras variable and the tf.Variable within it, which a GradientTape lists."""
    return id(getattr(variable, "_value", variable))
