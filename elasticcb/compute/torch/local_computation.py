"""Training by the model's own optimizers, like Keras; only gradients of embedding rows are returned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from elasticcb.compute.backend import HeldModel, Prepared, StepResult, TableRows
from elasticcb.compute.local_optimizers import HoldsOptimizers, copied, prepared
from elasticcb.compute.moving_averages import MovingAverages
from elasticcb.compute.torch.arrays import array_of
from elasticcb.compute.torch.capture import TorchCapture
from elasticcb.compute.torch.computation import TorchComputation, numbers
from elasticcb.compute.torch.gradients import sort_gradients
from elasticcb.settings import Mode
from elasticcb.sharding.flat_blocks import PlacedBlocks, pack_weights
from elasticcb.sharding.partition import Slice


class TorchLocal(TorchComputation, HoldsOptimizers):
    """For the arguments, see `Backend.local_computation`."""

    def __init__(self, held: HeldModel) -> None:
        capture = TorchCapture(held.model, held.tables, refuses=False)
        HoldsOptimizers.__init__(self, prepared(held, capture.optimizers))
        TorchComputation.__init__(self, held, capture)
        self._averages = MovingAverages(held.model)
        # Returned by a step, because a push of its row gradients needs it.
        self._shared: Mapping[str, Any] = self._held.shared if held.tables else {}

    def train(self, batch: Prepared, rows: TableRows) -> StepResult:
        shared = copied(self._shared)
        self._metrics.reset()
        keeps = self._metrics.kept_outputs(Mode.TRAINING)
        with self._step_of(batch, rows, training=True), self._averages.counted(), keeps as outputs:
            logs, updates = self._capture.train_step(batch.data)
        found = {index: update.gradient for index, update in updates.items() if index in batch.ids}
        _, pairs = sort_gradients(found, self._specs, (), batch.ids)
        return StepResult(logs=numbers(logs), states=self._states(outputs), rows=pairs, shared=shared)

    def weights(self, partition: Sequence[Sequence[Slice]]) -> PlacedBlocks:
        arrays = [array_of(variable.value) for variable in self._model.weights]
        return PlacedBlocks((pack_weights(arrays, self._specs, slices) for slices in partition), partition)
