"""A worker's copy of the model that `Cluster.place` was given: its weights are the parameter servers'."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from elasticcb.clients.master import MasterClient
from elasticcb.clients.ps import PSClient
from elasticcb.errors import ElasticCBError, ModelFileError, NonFiniteError
from elasticcb.model.weights import variable_specs
from elasticcb.optimizers.loss_scale import LossScale
from elasticcb.optimizers.traits import model_optimizers
from elasticcb.proto import elasticcb_pb2 as pb
from elasticcb.rpc.tensors import Array
from elasticcb.settings import JobSettings, NonFinite
from elasticcb.sharding.flat_blocks import state_moves, unpack_weights
from elasticcb.sharding.partition import VariableSpec, pack
from elasticcb.sharding.push import Gradients
from elasticcb.worker.gradients import clippings, sort_gradients

logger = logging.getLogger(__name__)


class PlacedModel:
    """Makes the optimizers of `model` hand their gradients to the servers, and fetch the weights after that.

    Args:
        model: built, with the weights of the caller's.
        cluster: the master's `GetClusterResponse`.
        client: of the master.
        settings: of the job.

    Attributes:
        error: what happened in the last call of an optimizer, if it failed.

    Raises:
        ModelFileError: `model` has other weights than the caller's.
    """

    def __init__(self, model: keras.Model, cluster: Any, client: MasterClient, settings: JobSettings) -> None:
        self._model = model
        self._non_finite = settings.training.non_finite
        self._specs = [VariableSpec.from_message(message) for message in cluster.variables]
        own = [(spec.shape, spec.dtype) for spec in variable_specs(model)]
        if own != [(spec.shape, spec.dtype) for spec in self._specs]:
            raise ModelFileError(
                f"The model has {len(own)} weights here and {len(self._specs)} where it was placed, or others. Layers "
                "must be built from the model's get_config() and build() alone, as keras.models.clone_model needs it."
            )
        self._ps = PSClient(
            cluster.ps_addresses,
            self._specs,
            cluster.split,
            client_id=client.id,
            patience_seconds=settings.cluster.patience_seconds,
            access=client.access,
            ids=cluster.ps_ids,
            find=client.find_server,
        )
        self._indices = {_key(variable): index for index, variable in enumerate(model.weights)}
        self._state = [index for index, spec in enumerate(self._specs) if not spec.trainable]
        self.error: Exception | None = None
        optimizers = model_optimizers(model)
        self._clipped = clippings(model, self._specs, optimizers, len(cluster.ps_addresses))
        for optimizer in optimizers:
            apply = functools.partial(self._apply, optimizer, LossScale(optimizer))
            # Keras's own `apply_gradients` calls it. Around Keras's __setattr__, which tracks what it is given.
            object.__setattr__(optimizer, "apply", apply)

    @property
    def version(self) -> int:
        """Of the weights."""
        return self._ps.version

    def pull(self) -> None:
        """Makes the model hold the newest weights."""
        self._ps.pull()
        self._assign(self._weights())

    def close(self) -> None:
        self._ps.close()

    def _weights(self) -> list[Array]:
        return unpack_weights(self._ps.blocks, self._specs, self._ps.partition)

    def _assign(self, values: Sequence[Any]) -> None:
        for variable, value, spec in zip(self._model.weights, values, self._specs, strict=True):
            variable.assign(tf.ensure_shape(value, spec.shape))

    # ------------------------------------------------------------ instead of an optimizer's `apply`

    def _apply(
        self, optimizer: Any, scale: LossScale, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None
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
        exchange = functools.partial(self._exchange, tuple(dense), tuple(rows))
        if tf.executing_eagerly():
            self._assign(exchange(*(tensor.numpy() for tensor in inputs)))
        else:
            self._assign(tf.numpy_function(exchange, inputs, [tf.as_dtype(spec.dtype) for spec in self._specs]))

    def _index(self, optimizer: Any, variable: Any) -> int:
        index = self._indices.get(_key(variable))
        if index is None or not self._specs[index].trainable:
            name = getattr(variable, "path", None) or variable.name
            raise ModelFileError(
                f"The optimizer {optimizer.name!r} was given a gradient of {name!r}, which is no trainable weight of "
                "the model that was placed, so that no server applies it."
            )
        return index

    def _exchange(self, dense: tuple[int, ...], rows: tuple[int, ...], usable: Any, *inputs: Array) -> list[Array]:
        """Pushes; returns all weights after that."""
        try:
            if usable:
                self._push(dense, rows, inputs)
            else:
                logger.info("A step is skipped: gradients of the scaled loss are not finite")
            return self._weights()
        except Exception as error:
            self.error = error
            raise

    def _push(self, dense: tuple[int, ...], rows: tuple[int, ...], inputs: Sequence[Array]) -> None:
        given = iter(inputs)
        new = dict(zip(self._state, given, strict=False))
        gradients = {index: next(given) for index in dense}
        pairs = {index: (next(given), next(given)) for index in rows}
        now = [pack(new, self._specs, slices, trainable=False) for slices in self._ps.partition]
        state, shares = state_moves(self._ps.blocks, now, self._specs, self._ps.partition, {})
        push = Gradients(
            gradients=[pack(gradients, self._specs, slices, True, dense) for slices in self._ps.partition],
            dense_variables=dense,
            rows=pairs,
            state=state,
            shares=shares,
            loss=0.0,
            non_finite=self._find_non_finite(gradients | {index: values for index, (_, values) in pairs.items()}),
        )
        answer = self._ps.push(push, None)
        if answer.status == pb.NON_FINITE and self._non_finite is NonFinite.STOP:
            raise NonFiniteError(answer.reason)
        if answer.status == pb.NON_FINITE:
            logger.warning("A step is skipped: %s", answer.reason)
        elif answer.status != pb.ACCEPTED:
            raise ElasticCBError(f"A parameter server refused gradients: {answer.reason}")

    def _find_non_finite(self, gradients: dict[int, Array]) -> str:
        for index, gradient in gradients.items():
            if not np.isfinite(gradient.astype(np.float64)).all():
                return f"the gradient of {self._specs[index].path!r}"
        return ""


def _key(variable: Any) -> int:
    """The same for a Keras variable and the tf.Variable within it, which a GradientTape lists."""
    return id(getattr(variable, "_value", variable))
