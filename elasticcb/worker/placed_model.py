"""A worker's copy of the model given to `Cluster.place`, whose weights and optimizers are those of the servers."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from elasticcb.clients.master import MasterClient, places_of
from elasticcb.clients.ps import PSClient
from elasticcb.clients.ps_servers import ServerGroup
from elasticcb.compute.optimizers import HoldsOptimizers, prepared
from elasticcb.errors import ModelFileError, NonFiniteError
from elasticcb.model.weights import assign_dense, variable_specs
from elasticcb.optimizers.state import OptimizerState
from elasticcb.optimizers.traits import model_optimizers, sets_final_weights, steps_made
from elasticcb.rpc.tensors import Array
from elasticcb.settings import JobSettings, NonFinite
from elasticcb.sharding.flat_blocks import PlacedBlocks, pack_weights
from elasticcb.sharding.partition import VariableSpec
from elasticcb.worker.learning_rate import WorkerRate
from elasticcb.worker.local_updates import LocalUpdates, NotFiniteError
from elasticcb.worker.window_length import WindowLength

logger = logging.getLogger(__name__)


class _FreeModel(HoldsOptimizers):
    """A model that any code trains, with any framework."""

    decays: Mapping[int, float] = {}  # what a function does to moving averages is not known

    def __init__(self, model: keras.Model, specs: Sequence[VariableSpec]) -> None:
        super().__init__(prepared(model, specs, model_optimizers(model)))
        self._model, self._specs = model, specs

    def weights(self) -> Sequence[Array]:
        return [keras.ops.convert_to_numpy(variable.value) for variable in self._model.weights]

    def set_weights(self, weights: PlacedBlocks) -> None:
        assign_dense(self._model, self._specs, weights)


class PlacedModel:
    """Merges what functions change in `model` into the servers' model.

    Raises:
        ModelFileError: the weights of `model` differ from the caller's.
    """

    def __init__(self, model: keras.Model, cluster: Any, client: MasterClient, settings: JobSettings) -> None:
        self._non_finite = settings.training.non_finite
        specs = [VariableSpec.from_message(message) for message in cluster.variables]
        own = [(spec.shape, spec.dtype) for spec in variable_specs(model)]
        if own != [(spec.shape, spec.dtype) for spec in specs]:
            raise ModelFileError(
                f"The model has {len(own)} weights here, but {len(specs)} (or different ones) where it was "
                "placed. Layers must be fully built by the model's get_config() and build(), as for "
                "keras.models.clone_model."
            )
        servers = ServerGroup(
            places_of(cluster),
            specs,
            cluster.split,
            settings.cluster.patience_seconds,
            client.access,
            find=client.find_server,
        )
        self._ps = PSClient(servers, client.id, client.measures)
        self._ps.pull()
        assign_dense(model, specs, self._ps.blocks)  # some optimizers are built on the weights
        self._model, self._optimizers = _FreeModel(model, specs), model_optimizers(model)
        self._updates = LocalUpdates(
            self._model, self._ps, WindowLength(1), client.measures, any(map(sets_final_weights, self._optimizers))
        )
        self._rate = WorkerRate(model, self._ps)
        # Until the first merge, which also sends the optimizers' slots, the servers may lack these.
        self._initial: OptimizerState | None = self._model.optimizer_state()
        self._steps = 0  # of the optimizers, when the function began
        self._is_merged = True

    @property
    def version(self) -> int:
        """Version of the weights."""
        return self._ps.version

    def begin(self) -> None:
        """A function begins: sets the model to the newest weights, without what a failed function did."""
        if not self._is_merged:
            self._updates.forget()
            if self._initial is not None:
                self._model.set_optimizer_state(self._initial)
        self._is_merged = False
        self._updates.follow()
        self._rate.adopt_base()
        self._steps = steps_made(self._optimizers)

    def merge(self) -> None:
        """The function has ended: merges what it changed.

        Raises `NonFiniteError` if the weights are not finite, and the job does not skip that.
        """
        steps = steps_made(self._optimizers) - self._steps
        if steps <= 0 and not self._has_moved():
            self._is_merged = True
            return
        for _ in range(max(1, steps)):
            self._updates.count()
        try:
            self._updates.merge(ends_task=True)
        except NotFiniteError as error:
            if self._non_finite is NonFinite.STOP:
                raise NonFiniteError.of(str(error)) from None
            logger.warning("What a function changed is dropped: %s", error)
            return
        self._is_merged, self._initial = True, None

    def _has_moved(self) -> bool:
        """Whether the weights are others than the servers'."""
        known, specs, present = self._ps.blocks, self._ps.servers.specs, self._model.weights()
        return any(
            not np.array_equal(block, before[name])
            for slices, before in zip(known.partition, known, strict=True)
            for name, block in pack_weights(present, specs, slices).items()
        )

    def close(self) -> None:
        self._ps.servers.close()
