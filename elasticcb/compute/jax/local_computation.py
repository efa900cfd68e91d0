"""Training by the model's own optimizer, as Keras does it; only gradients of the rows of embedding tables come out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from elasticcb.compute.backend import HeldModel, LocalComputation, Prepared, StepResult, TableRows
from elasticcb.compute.jax.build import values
from elasticcb.compute.jax.capture import OptimizerCapture
from elasticcb.compute.jax.computation import JAXComputation, Metrics, numbers, put, states_of
from elasticcb.compute.moving_averages import MovingAverages
from elasticcb.optimizers.state import OptimizerState, held_variables
from elasticcb.rpc.tensors import Array
from elasticcb.sharding.flat_blocks import PlacedBlocks, pack_weights
from elasticcb.sharding.partition import Slice


class JAXLocal(JAXComputation, LocalComputation):
    """For the arguments see `Backend.local_computation`."""

    def __init__(self, held: HeldModel) -> None:
        model, specs = held.model, held.specs
        capture = OptimizerCapture(model, [index for index, spec in enumerate(specs) if spec.table])
        super().__init__(held, capture)
        self._optimizer = capture.optimizer
        self._averages = MovingAverages(model)
        self._held = held_variables([self._optimizer], model.weights, [spec.optimizer for spec in specs])
        self._state: Sequence[Any] = self._optimizer.variables
        # The last state is of no use after a step, whose results are put in its place.
        self._train = self._compiled(self._train_step, donated=(0, 1, 2))

    def train(self, batch: Prepared, rows: TableRows) -> StepResult:
        state = values(self._trained, self._others, self._state)
        logs, (trained, others, optimizer), states = self._train(*state, self._fresh_metrics(), batch.data)
        for variables, found in ((self._trained, trained), (self._others, others), (self._state, optimizer)):
            put(variables, found)
        logs, states = jax.device_get((logs, states))
        return StepResult(logs=numbers(logs), states=states_of(states), rows={})

    def _train_step(self, trained: Any, others: Any, optimizer: Any, metrics: Metrics, data: Any) -> Any:
        with self._averages.counted():
            return self._traced_train_step(trained, others, optimizer, metrics, data)

    @property
    def decays(self) -> Mapping[int, float]:
        return self._averages.decays

    def weights(self, partition: Sequence[Sequence[Slice]]) -> PlacedBlocks:
        arrays = jax.device_get([variable.value for variable in self._model.weights])
        return PlacedBlocks((pack_weights(arrays, self._specs, slices) for slices in partition), partition)

    def optimizer_state(self) -> OptimizerState:
        held = self._held
        return OptimizerState(_read(held.slots), _read(held.extras), _read(held.shared), held.optimizers)

    def shared_optimizer_state(self) -> Mapping[str, Array]:
        return _read(self._held.shared)

    def set_optimizer_state(self, state: OptimizerState) -> None:
        for kind in ("slots", "extras", "shared"):
            targets = getattr(self._held, kind)
            for key, value in getattr(state, kind).items():
                name = key if isinstance(key, str) else key[1]
                if key in targets and not name.endswith("learning_rate"):
                    targets[key].assign(np.array(value))


def _read(variables: Mapping[Any, Any]) -> dict[Any, Array]:
    """Copies, since the next step takes the memory."""
    return {key: np.array(variable.value) for key, variable in variables.items()}
