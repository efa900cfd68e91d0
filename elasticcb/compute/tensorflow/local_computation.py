"""Training by the model's own optimizers, like Keras; only gradients of embedding rows are returned."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from elasticcb.compute.backend import HeldModel, LocalComputation, Prepared, StepResult, TableRows
from elasticcb.compute.local_optimizers import prepared
from elasticcb.compute.moving_averages import MovingAverages
from elasticcb.compute.tensorflow.capture import TensorFlowCapture
from elasticcb.compute.tensorflow.computation import TensorFlowComputation, table_tensors, to_arrays
from elasticcb.compute.tensorflow.gradients import sort_gradients
from elasticcb.model.metrics import to_number
from elasticcb.optimizers.state import OptimizerState
from elasticcb.rpc.shared_memory import aligned_copy
from elasticcb.rpc.tensors import Array
from elasticcb.settings import Mode
from elasticcb.sharding.array_names import STATE, WEIGHTS, named
from elasticcb.sharding.flat_blocks import PlacedBlocks
from elasticcb.sharding.partition import Slice
from elasticcb.tf.concrete_call import CompiledLater
from elasticcb.tf.convert import array_of, tensor_of


class TensorFlowLocal(TensorFlowComputation, LocalComputation):
    """For the arguments, see `Backend.local_computation`."""

    def __init__(self, held: HeldModel) -> None:
        capture = TensorFlowCapture(held.model, held.tables, refuses=False)
        variables = prepared(held, capture.optimizers)
        super().__init__(held, capture)
        self._averages = MovingAverages(held.model)
        self._optimizer_names, self._optimizer_variables = variables.optimizers, _by_kind(variables)
        # Returned by a step, because a push of its row gradients needs it.
        self._shared: Mapping[str, Any] = variables.shared if held.tables else {}
        self._read_shared, self._read_all = _reader(variables.shared), _reader(self._optimizer_variables)
        self._set: dict[tuple[Any, ...], Callable[[Any], Any]] = {}  # by the variables that it sets
        self._pack_all = CompiledLater(self._packed)

    def train(self, batch: Prepared, rows: TableRows) -> StepResult:
        shared, logs, states, outputs, served = self._run("train", batch.data, table_tensors(rows), batch.places)
        return StepResult(
            logs={name: to_number(value) for name, value in logs.items()},
            states=self._states(states, outputs),
            rows={index: (batch.ids[index], array_of(values)) for index, values in served.items()},
            shared={name: array_of(value) for name, value in shared.items()},
        )

    def _train_step(self, batch: Any, rows: Any, places: Any) -> Any:
        # Identities, because a read may share the variable's memory, which the step changes.
        shared = {name: tf.identity(variable.value) for name, variable in self._shared.items()}
        self._metrics.reset()
        logs, outputs, found = self._steps.model_step(batch, rows, places)
        _, _, served = sort_gradients(found, self._specs, (), rows)
        return shared, logs, self._metric_states(), outputs, served

    def _model_step(self, batch: Any, rows: Any, places: Any) -> tuple[Any, Any, dict[int, Any]]:
        with (
            self._served.serving(rows, places),
            self._averages.counted(),
            self._metrics.kept_outputs(Mode.TRAINING) as outputs,
        ):
            logs, updates = self._capture.train_step(batch)
        return logs, tuple(outputs), {index: update.gradient for index, update in updates.items()}

    def weights(self, partition: Sequence[Sequence[Slice]]) -> PlacedBlocks:
        self._follow(partition)
        weights, state = map(to_arrays, self._pack_all())
        blocks = (named(WEIGHTS, own) | named(STATE, others) for own, others in zip(weights, state, strict=True))
        return PlacedBlocks(blocks, partition)

    def _follow(self, partition: Sequence[Sequence[Slice]]) -> bool:
        is_another = super()._follow(partition)
        if is_another:
            self._pack_all = CompiledLater(self._packed)
        return is_another

    def _packed(self) -> Any:
        return tuple(self._pack(self._values(trainable), trainable) for trainable in (True, False))

    def set_weights(self, weights: PlacedBlocks) -> None:
        # TensorFlow variables take over the memory of assigned values, and training writes to it.
        copies = ({name: aligned_copy(block) for name, block in server.items()} for server in weights)
        super().set_weights(PlacedBlocks(copies, weights.partition))

    def optimizer_state(self) -> OptimizerState:
        held: dict[str, dict[Any, Array]] = {"slots": {}, "extras": {}, "shared": {}}
        for (kind, key), array in self._read_all().items():
            held[kind][key] = array
        return OptimizerState(**held, optimizers=self._optimizer_names)

    def shared_optimizer_state(self) -> Mapping[str, Array]:
        return self._read_shared()

    def set_optimizer_state(self, state: OptimizerState) -> None:
        given = {key: value for key, value in _by_kind(state).items() if key in self._optimizer_variables}
        given = {key: value for key, value in given.items() if not str(key[1]).endswith("learning_rate")}
        targets = [self._optimizer_variables[key] for key in given]

        def assign(*values: Any) -> None:
            for target, value in zip(targets, values, strict=True):
                target.assign(value)

        if tuple(given) not in self._set:
            signature = [tf.TensorSpec(value.shape, value.dtype) for value in given.values()]
            self._set[tuple(given)] = CompiledLater(assign, signature)
        # TensorFlow variables take over the memory of assigned values, and training writes to it.
        self._set[tuple(given)]([tensor_of(aligned_copy(value)) for value in given.values()])


def _by_kind(state: OptimizerState) -> dict[tuple[str, Any], Any]:
    """All optimizer variables, by attribute and key."""
    return {(kind, key): value for kind in ("slots", "extras", "shared") for key, value in getattr(state, kind).items()}


def _reader(variables: Mapping[Any, Any]) -> Callable[[], dict[Any, Array]]:
    """Reads all variables at once, as arrays that do not change later."""
    read = CompiledLater(lambda: [tf.convert_to_tensor(variable.value) for variable in variables.values()])
    return lambda: dict(zip(variables, map(array_of, read()), strict=True))
