"""Training by the model's own optimizer, as Keras does it; only gradients of the rows of embedding tables come out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import keras
import numpy as np

from elasticcb.compute.backend import HeldModel, LocalComputation, Prepared, StepResult, TableRows
from elasticcb.compute.clipping import check_local_clipping
from elasticcb.compute.jax.capture import StatelessCapture
from elasticcb.compute.jax.computation import JAXComputation, Metrics, numbers, put, rows_of, states_of
from elasticcb.compute.jax.steps import values
from elasticcb.compute.moving_averages import MovingAverages
from elasticcb.errors import ModelFileError
from elasticcb.optimizers.state import OptimizerState, held_variables
from elasticcb.rpc.tensors import Array
from elasticcb.sharding.flat_blocks import PlacedBlocks, pack_weights
from elasticcb.sharding.partition import Slice


class JAXLocal(JAXComputation, LocalComputation):
    """For the arguments see `Backend.local_computation`."""

    def __init__(self, held: HeldModel) -> None:
        model, specs = held.model, held.specs
        tables = [index for index, spec in enumerate(specs) if spec.table]
        capture = StatelessCapture(model, tables)
        if tables:
            check_local_clipping([capture.optimizer])
            _check_scale(capture.optimizer)
        super().__init__(held, capture)
        self._optimizer = capture.optimizer
        self._averages = MovingAverages(model)
        self._held = held_variables([self._optimizer], model.weights, [spec.optimizer for spec in specs])
        self._state: Sequence[Any] = self._optimizer.variables
        # The last state is of no use after a step, whose results are put in its place.
        self._train = self._compiled(self._train_step, donated=(0, 1, 2))

    def train(self, batch: Prepared, rows: TableRows) -> StepResult:
        # What a push of gradients of rows needs, as it was before the step.
        shared = self.shared_optimizer_state() if batch.ids else {}
        others, optimizer = values(self._others, self._state)
        given = self._with_rows(rows), others, optimizer
        logs, given, states, gradients = self._train(*given, self._fresh_metrics(), batch.places, batch.data)
        self._put_trained(given[0])
        put(self._others, given[1])
        put(self._state, given[2])
        logs, states, gradients = jax.device_get((logs, states, gradients))
        return StepResult(
            logs=numbers(logs), states=states_of(states), rows=rows_of(gradients, batch.ids), shared=shared
        )

    def _train_step(
        self, trained: Any, others: Any, optimizer: Any, metrics: Metrics, places: Any, data: Any
    ) -> tuple[Any, ...]:
        with self._averages.counted():
            found: tuple[Any, ...] = self._traced_train_step((trained, others, optimizer), metrics, places, data)
        return found

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


def _check_scale(optimizer: Any) -> None:
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise ModelFileError(
            f"The optimizer {optimizer.name!r} scales the loss, as of mixed_float16, and the model has embedding "
            "tables on the servers. On JAX that can't be: use mixed_bfloat16, or keras.layers.Embedding."
        )


def _read(variables: Mapping[Any, Any]) -> dict[Any, Array]:
    """Copies, since the next step takes the memory."""
    return {key: np.array(variable.value) for key, variable in variables.items()}
