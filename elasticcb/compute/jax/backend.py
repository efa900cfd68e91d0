"""The JAX backend."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import keras
import numpy as np

from elasticcb.compute.backend import Backend, HeldModel, Prepared, StepResult, TableRows
from elasticcb.compute.dense_batches import arrays_of
from elasticcb.compute.jax.build import build, sized
from elasticcb.compute.jax.capture import StatelessCapture
from elasticcb.compute.jax.computation import JAXComputation, Metrics, numbers, put, rows_of, states_of
from elasticcb.compute.jax.gradient_computation import JAXGradients
from elasticcb.compute.jax.steps import step_of, test_step, values
from elasticcb.compute.jax.tables import problems_of
from elasticcb.compute.local_optimizers import HoldsOptimizers, prepared
from elasticcb.compute.movable import Allowed, movable
from elasticcb.compute.moving_averages import MovingAverages
from elasticcb.errors import ModelFileError
from elasticcb.layers.table_layers import without_rows
from elasticcb.settings import Mode
from elasticcb.sharding.flat_blocks import PlacedBlocks, pack_weights
from elasticcb.sharding.partition import Slice
from elasticcb.sharding.table_spec import TableSpec
from elasticcb.tf.devices import leave_gpus


class JAXLocal(JAXComputation, HoldsOptimizers):
    """For the arguments, see `Backend.local_computation`."""

    def __init__(self, held: HeldModel) -> None:
        capture = StatelessCapture(held.model, held.tables)
        if held.tables:
            _check_scale(capture.optimizer)
        HoldsOptimizers.__init__(self, prepared(held, [capture.optimizer]))
        JAXComputation.__init__(self, held, capture)
        self._averages = MovingAverages(held.model)
        self._state: Sequence[Any] = capture.optimizer.variables
        # The previous state is not needed after a step, whose results replace it.
        self._train = self._compiled(self._train_step, donated=(0, 1, 2))

    def train(self, batch: Prepared, rows: TableRows) -> StepResult:
        # Values before the step, which a push of row gradients needs.
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

    def weights(self, partition: Sequence[Sequence[Slice]]) -> PlacedBlocks:
        arrays = jax.device_get([variable.value for variable in self._model.weights])
        return PlacedBlocks((pack_weights(arrays, self._specs, slices) for slices in partition), partition)


def _check_scale(optimizer: Any) -> None:
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise ModelFileError(
            f"The optimizer {optimizer.name!r} scales the loss, as with mixed_float16, and the model has embedding "
            "tables on the servers. JAX does not support this: use mixed_bfloat16, or keras.layers.Embedding."
        )


class JAXBackend(Backend):
    """Keras on JAX."""

    build = staticmethod(build)
    computation = JAXGradients
    local_computation = JAXLocal

    not_placed = (
        "Cluster.place needs Keras on TensorFlow or PyTorch, whose optimizers can be called from any code; on JAX a "
        "step is a pure function of its state. Use Cluster.fit, whose workers run the model's train_step."
    )

    def __init__(self) -> None:
        leave_gpus()

    def outputs(self, model: keras.Model, batch: Any) -> Any:
        state = values(model.trainable_variables, model.non_trainable_variables)
        with without_rows(model):
            outputs, _ = model.predict_step(state, self.data(model, batch))
        return jax.tree.map(np.asarray, outputs)

    def data(self, model: keras.Model, batch: Any) -> Any:
        return sized(model, arrays_of(batch))

    def find_tables(
        self,
        model: keras.Model,
        batch: Any,
        mode: Mode,
        allowed: Allowed,
        local: bool = False,
        validation: Callable[[], Any] | None = None,
    ) -> dict[int, TableSpec]:
        capture = StatelessCapture(model) if mode is Mode.TRAINING else None
        step: Any = step_of(model, mode, capture)
        found: Any = functools.partial(problems_of, model)
        passes: Any = None
        if validation is not None:
            passes = lambda: (test_step(model), sized(model, arrays_of(validation())))  # noqa: E731
        try:
            return movable(model, step, sized(model, arrays_of(batch)), allowed, found, passes)
        finally:
            if capture is not None:
                capture.release()
