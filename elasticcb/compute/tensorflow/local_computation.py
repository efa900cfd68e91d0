"""Training by the model's own optimizers, as Keras does it; only gradients of the rows of embedding tables come out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from elasticcb.compute.backend import LocalComputation, Prepared, StepResult, TableRows
from elasticcb.compute.moving_averages import MovingAverages
from elasticcb.compute.tensorflow.capture import OptimizerCapture
from elasticcb.compute.tensorflow.computation import TensorFlowComputation, table_tensors, to_arrays
from elasticcb.compute.tensorflow.gradients import sort_gradients
from elasticcb.errors import ModelFileError
from elasticcb.model.metrics import ModelMetrics, to_number
from elasticcb.optimizers.state import OptimizerState, read_optimizers, set_optimizers, shared_variables
from elasticcb.optimizers.traits import unwrapped
from elasticcb.rpc.shared_memory import aligned_copy
from elasticcb.rpc.tensors import Array
from elasticcb.sharding.array_names import STATE, WEIGHTS, named
from elasticcb.sharding.flat_blocks import PlacedBlocks
from elasticcb.sharding.partition import Slice, VariableSpec
from elasticcb.tf.convert import array_of


class TensorFlowLocal(TensorFlowComputation, LocalComputation):
    """For the arguments see `Backend.local_computation`."""

    def __init__(
        self,
        model: keras.Model,
        metrics: ModelMetrics,
        specs: Sequence[VariableSpec],
        partition: Sequence[Sequence[Slice]],
    ) -> None:
        tables = [index for index, spec in enumerate(specs) if spec.table]
        capture = OptimizerCapture(model, tables, refuses=False)
        if tables:
            _check_clipping(capture.optimizers)
        super().__init__(model, metrics, specs, partition, capture)
        self._averages = MovingAverages(model)
        self._owners = [spec.optimizer for spec in specs]
        self.optimizer_state()  # builds the optimizers
        self._shared = shared_variables(capture.optimizers, model.weights, self._owners)
        for optimizer in map(unwrapped, capture.optimizers):
            # What `exclude_from_weight_decay` was told, the master has worked out.
            optimizer._exclude_from_weight_decay_cache = {
                optimizer._var_key(variable): not spec.no_weight_decay
                for variable, spec in zip(model.weights, specs, strict=True)
            }
        self._pack_all = tf.function(self._packed, autograph=False)

    def train(self, batch: Prepared, rows: TableRows) -> StepResult:
        logs, states, served = self._run("train", batch.data, table_tensors(rows), batch.places)
        return StepResult(
            logs={name: to_number(value) for name, value in logs.items()},
            states=tf.nest.map_structure(lambda tensor: tensor.numpy(), states),
            rows={index: (batch.ids[index], array_of(values)) for index, values in served.items()},
        )

    def _train_step(self, batch: Any, rows: Any, places: Any) -> Any:
        self._metrics.reset()
        logs, found = self._steps.model_step(batch, rows, places)
        _, _, served = sort_gradients(found, self._specs, (), rows)
        return logs, self._metrics.state_tensors(), served

    def _model_step(self, batch: Any, rows: Any, places: Any) -> tuple[Any, dict[int, Any]]:
        with self._served.serving(rows, places), self._averages.counted():
            logs, updates = self._capture.train_step(batch)
        return logs, {index: update.gradient for index, update in updates.items()}

    @property
    def decays(self) -> Mapping[int, float]:
        return self._averages.decays

    def weights(self, partition: Sequence[Sequence[Slice]]) -> PlacedBlocks:
        self._follow(partition)
        weights, state = map(to_arrays, self._pack_all())
        blocks = (named(WEIGHTS, own) | named(STATE, others) for own, others in zip(weights, state, strict=True))
        return PlacedBlocks(blocks, partition)

    def _follow(self, partition: Sequence[Sequence[Slice]]) -> bool:
        is_another = super()._follow(partition)
        if is_another:
            self._pack_all = tf.function(self._packed, autograph=False)
        return is_another

    def _packed(self) -> Any:
        values = {index: variable.value for index, variable in enumerate(self._model.weights)}
        weights = [self._pack(slices, values) for slices in self._partition]
        return weights, [self._pack_state(slices) for slices in self._partition]

    def set_weights(self, weights: PlacedBlocks) -> None:
        # TensorFlow gives variables the memory of what they are set to, and training writes to it.
        copies = ({name: aligned_copy(block) for name, block in server.items()} for server in weights)
        super().set_weights(PlacedBlocks(copies, weights.partition))

    def optimizer_state(self) -> OptimizerState:
        return read_optimizers(self._capture.optimizers, self._model.weights, self._owners)

    def shared_optimizer_state(self) -> Mapping[str, Array]:
        return {name: np.array(variable.value.numpy()) for name, variable in self._shared.items()}

    def set_optimizer_state(self, state: OptimizerState) -> None:
        set_optimizers(state, self._capture.optimizers, self._model.weights, self._owners)


def _check_clipping(optimizers: Sequence[Any]) -> None:
    for optimizer in map(unwrapped, optimizers):
        if optimizer.global_clipnorm:
            raise ModelFileError(
                f"The optimizer {optimizer.name!r} has global_clipnorm, and the model has embedding tables on the "
                "servers. With --updates=local a worker applies all gradients but those of their rows, so it can't "
                "clip them together. Use clipnorm or clipvalue, keras.layers.Embedding, or --updates=async."
            )
