"""Training by the model's own optimizers, as Keras does it; only gradients of the rows of embedding tables come out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from elasticcb.compute.backend import HeldModel, LocalComputation, Prepared, StepResult, TableRows
from elasticcb.compute.clipping import check_local_clipping
from elasticcb.compute.moving_averages import MovingAverages
from elasticcb.compute.torch.arrays import as_array, held_arrays
from elasticcb.compute.torch.capture import TorchCapture
from elasticcb.compute.torch.computation import TorchComputation, numbers
from elasticcb.compute.torch.gradients import sort_gradients
from elasticcb.optimizers.state import OptimizerState, held_variables
from elasticcb.optimizers.traits import unwrapped
from elasticcb.rpc.tensors import Array
from elasticcb.sharding.array_names import STATE, WEIGHTS, named
from elasticcb.sharding.flat_blocks import PlacedBlocks
from elasticcb.sharding.partition import Slice, pack


class TorchLocal(TorchComputation, LocalComputation):
    """For the arguments see `Backend.local_computation`."""

    def __init__(self, held: HeldModel) -> None:
        model, specs = held.model, held.specs
        tables = [index for index, spec in enumerate(specs) if spec.table]
        capture = TorchCapture(model, tables, refuses=False)
        if tables:
            check_local_clipping(capture.optimizers)
        super().__init__(held, capture)
        self._averages = MovingAverages(model)
        self._held = held_variables(capture.optimizers, model.weights, [spec.optimizer for spec in specs])
        # What a step tells, because a push of its gradients of rows needs it.
        self._shared: Mapping[str, Any] = self._held.shared if tables else {}
        for optimizer in map(unwrapped, capture.optimizers):
            # What `exclude_from_weight_decay` was told, the master has worked out.
            optimizer._exclude_from_weight_decay_cache = {
                optimizer._var_key(variable): not spec.no_weight_decay
                for variable, spec in zip(model.weights, specs, strict=True)
            }

    def train(self, batch: Prepared, rows: TableRows) -> StepResult:
        shared = _copied(self._shared)
        self._metrics.reset()
        with self._step_of(batch, rows, training=True), self._averages.counted():
            logs, updates = self._capture.train_step(batch.data)
        found = {index: update.gradient for index, update in updates.items() if index in batch.ids}
        _, pairs = sort_gradients(found, self._specs, (), batch.ids)
        return StepResult(logs=numbers(logs), states=self._states(), rows=pairs, shared=shared)

    @property
    def decays(self) -> Mapping[int, float]:
        return self._averages.decays

    def weights(self, partition: Sequence[Sequence[Slice]]) -> PlacedBlocks:
        values = {kind: held_arrays(self._model, self._specs, kind) for kind in (True, False)}
        blocks = (
            named(WEIGHTS, pack(values[True], self._specs, slices, True))
            | named(STATE, pack(values[False], self._specs, slices, False))
            for slices in partition
        )
        return PlacedBlocks(blocks, partition)

    def optimizer_state(self) -> OptimizerState:
        held = self._held
        return OptimizerState(_copied(held.slots), _copied(held.extras), _copied(held.shared), held.optimizers)

    def shared_optimizer_state(self) -> Mapping[str, Array]:
        return _copied(self._held.shared)

    def set_optimizer_state(self, state: OptimizerState) -> None:
        for kind in ("slots", "extras", "shared"):
            own = getattr(self._held, kind)
            for key, value in getattr(state, kind).items():
                if key in own and not str(key).endswith("learning_rate"):
                    own[key].assign(value)


def _copied(variables: Mapping[Any, Any]) -> dict[Any, Array]:
    return {key: as_array(variable.value) for key, variable in variables.items()}
