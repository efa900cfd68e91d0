"""A worker's copy of the model given to `Cluster.place`: its weights are those of the parameter servers."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import keras

from elasticcb.clients.master import MasterClient, places_of
from elasticcb.clients.ps import PSClient
from elasticcb.clients.ps_servers import ServerGroup
from elasticcb.compute.backend import Applied
from elasticcb.compute.registry import backend
from elasticcb.errors import ElasticCBError, ModelFileError, NonFiniteError
from elasticcb.model.weights import variable_specs
from elasticcb.proto import elasticcb_pb2 as pb
from elasticcb.rpc.tensors import Array, all_finite
from elasticcb.settings import JobSettings, NonFinite
from elasticcb.sharding.flat_blocks import state_moves, unpack_weights
from elasticcb.sharding.partition import VariableSpec, pack
from elasticcb.sharding.push import Movement as Gradients

logger = logging.getLogger(__name__)


class PlacedModel:
    """Makes the optimizers of `model` send their gradients to the servers, and pull the weights after that.

    Raises:
        ModelFileError: the weights of `model` differ from the caller's.
    """

    def __init__(self, model: keras.Model, cluster: Any, client: MasterClient, settings: JobSettings) -> None:
        self._non_finite = settings.training.non_finite
        self._specs = [VariableSpec.from_message(message) for message in cluster.variables]
        own = [(spec.shape, spec.dtype) for spec in variable_specs(model)]
        if own != [(spec.shape, spec.dtype) for spec in self._specs]:
            raise ModelFileError(
                f"The model has {len(own)} weights here, but {len(self._specs)} (or different ones) where it was "
                "placed. Layers must be fully built by the model's get_config() and build(), as for "
                "keras.models.clone_model."
            )
        servers = ServerGroup(
            places_of(cluster),
            self._specs,
            cluster.split,
            settings.cluster.patience_seconds,
            client.access,
            find=client.find_server,
        )
        self._ps = PSClient(servers, client.id)
        self.error: Exception | None = None
        self._computation = backend().placed(model, self._specs, len(cluster.ps_addresses), self._exchange)

    @property
    def version(self) -> int:
        """Version of the weights."""
        return self._ps.version

    def pull(self) -> None:
        """Sets the model to the newest weights."""
        self._ps.pull()
        self._computation.set_weights(self._weights())

    def close(self) -> None:
        self._ps.servers.close()

    def _weights(self) -> list[Array]:
        return unpack_weights(self._ps.blocks, self._specs, self._ps.servers.partition)

    def _exchange(self, applied: Applied) -> list[Array]:
        """Pushes; returns all weights after that."""
        try:
            if applied.usable:
                self._push(applied)
            else:
                logger.info("Step skipped: gradients of the scaled loss are not finite")
            return self._weights()
        except Exception as error:
            self.error = error
            raise

    def _push(self, applied: Applied) -> None:
        gradients, rows, parts = applied.gradients, applied.rows, self._ps.servers.partition
        now = [pack(applied.state, self._specs, slices, trainable=False) for slices in parts]
        state, shares = state_moves(self._ps.blocks, now, self._specs, parts, {})
        push = Gradients(
            gradients=[pack(gradients, self._specs, slices, True, gradients) for slices in parts],
            dense_variables=tuple(gradients),
            rows=rows,
            state=state,
            shares=shares,
            loss=0.0,
            non_finite=self._find_non_finite(gradients | {index: values for index, (_, values) in rows.items()}),
        )
        answer = self._ps.push(push, None)
        if answer.status == pb.NON_FINITE and self._non_finite is NonFinite.STOP:
            raise NonFiniteError.of(answer.reason)
        if answer.status == pb.NON_FINITE:
            logger.warning("Step skipped: %s", answer.reason)
        elif answer.status != pb.ACCEPTED:
            raise ElasticCBError(f"A parameter server refused gradients: {answer.reason}")

    def _find_non_finite(self, gradients: Mapping[int, Array]) -> str:
        for index, gradient in gradients.items():
            if not all_finite(gradient):
                return f"the gradient of {self._specs[index].path!r}"
        return ""
