"""One compiled function per kind of batch, around the model's own `train_step` and friends."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from elasticcb.compute.backend import Computation, HeldModel, Prepared, StepResult, TableRows
from elasticcb.compute.moving_averages import MovingAverages
from elasticcb.compute.optimizers import prepared
from elasticcb.compute.tensorflow.capture import TensorFlowCapture, rows_gradient
from elasticcb.compute.tensorflow.lookups import TensorFlowTables
from elasticcb.model.input_pipeline import records_in
from elasticcb.model.metric_messages import States, with_outputs
from elasticcb.model.metrics import to_number
from elasticcb.optimizers.state import LEARNING_RATE, OptimizerState
from elasticcb.rpc.shared_memory import aligned_copy
from elasticcb.rpc.tensors import Array
from elasticcb.settings import Mode
from elasticcb.sharding.flat_blocks import PlacedBlocks, pieces_of
from elasticcb.tf.batch_signatures import Fixed
from elasticcb.tf.compiled_step import CompiledStep
from elasticcb.tf.concrete_call import CompiledLater
from elasticcb.tf.convert import array_of, tensor_of

logger = logging.getLogger(__name__)

_FEW = 4  # variables that are read sooner one by one than by a compiled function
_NOT_COMPILABLE = re.compile(r"XLA|unsupported operations|compile-time constant|uncompilable", re.IGNORECASE)


@dataclass(frozen=True)
class _Steps:
    """Functions of tensors."""

    jit: bool
    model_step: Callable[..., Any]
    train: Callable[..., Any]
    test: Callable[..., Any]
    predict: Callable[..., Any]


class TensorFlowComputation(Computation):
    """For the arguments, see `Backend.computation`."""

    def __init__(self, held: HeldModel) -> None:
        self._model, self._metrics, self._specs, self._partition, self._trains = held
        self._capture = TensorFlowCapture(held.model, held.tables if held.trains else ())
        variables = OptimizerState()
        if held.trains:
            variables = prepared(held.model, held.specs, self._capture.optimizers)
        self._averages = MovingAverages(held.model)
        self._optimizer_names, self._optimizer_variables = variables.optimizers, _by_kind(variables)
        # Returned by a step, because a push of its row gradients needs it.
        self._shared: Mapping[str, Any] = variables.shared if held.tables else {}
        self._read_shared, self._read_all = _reader(variables.shared), _reader(self._optimizer_variables)
        self._set: dict[tuple[Any, ...], Callable[[Any], Any]] = {}  # by the variables that it sets
        self._assign: Callable[[Any], Any] | None = None
        self._read_weights = _reader(dict(enumerate(held.model.weights)))
        self._served = TensorFlowTables(held.model, held.tables)
        steps: dict[str, Callable[[Any], Any]] = {
            Mode.TRAINING: self._capture.train_step,
            Mode.EVALUATION: held.model.test_step,
            Mode.PREDICTION: held.model.predict_step,
        }
        self._fixed: dict[str, Fixed] = {}  # by mode, as in `CompiledStep`
        self._lookups = {mode: self._served.lookups(step, self._fixed_in(mode)) for mode, step in steps.items()}
        # The number of rows differs for each batch, and XLA would compile the step again.
        self._steps = self._compiled(jit=bool(getattr(held.model, "jit_compile", False)) and not held.tables)

    def _compiled(self, jit: bool) -> _Steps:
        test, predict = self._served_step(self._test_step), self._served_step(self._model.predict_step)
        if getattr(self._model, "run_eagerly", False):
            return _Steps(jit, self._model_step, self._train_step, test, predict)
        # XLA compiles only the model's own step: it can't compile the row lookup of an embedding.
        model_step = (
            tf.function(self._model_step, autograph=False, reduce_retracing=True, jit_compile=True)
            if jit
            else self._model_step
        )
        return _Steps(
            jit,
            model_step,
            CompiledStep(self._train_step, fixed=self._fixed_in(Mode.TRAINING)),
            CompiledStep(test, jit or None, self._fixed_in(Mode.EVALUATION)),
            CompiledStep(predict, jit or None, self._fixed_in(Mode.PREDICTION)),
        )

    def _fixed_in(self, mode: str) -> Callable[[], Fixed]:
        return lambda: self._fixed.get(mode, ())

    def _run(self, name: str, *args: Any) -> Any:
        """Runs a compiled step; stops using XLA the first time that it can't compile a step."""
        try:
            return getattr(self._steps, name)(*args)
        except (tf.errors.InvalidArgumentError, tf.errors.UnimplementedError) as error:
            if not self._steps.jit or not _NOT_COMPILABLE.search(error.message):
                raise
            logger.warning(
                "The model runs without jit_compile, because XLA can't compile it: %s", error.message.split("\n")[0]
            )
            self._steps = self._compiled(jit=False)
            return getattr(self._steps, name)(*args)

    def _served_step(self, step: Callable[[Any], Any]) -> Callable[..., Any]:
        """A step on the given rows."""

        def served(batch: Any, rows: Any, places: Any) -> Any:
            with self._served.serving(rows, places):
                return step(batch)

        return served

    def prepare(self, data: Any, mode: Mode, fixed: Fixed = ()) -> Prepared:
        # Keras traces `predict_step` for the first batch, and with a free size only when a batch of another size comes.
        self._fixed[mode] = [True] * len(tf.nest.flatten(data)) if mode is Mode.PREDICTION else fixed
        wanted = self._lookups[mode](data)
        ids = {table: array_of(found) for table, (found, _) in wanted.items()}
        return Prepared(data, records_in(data), ids, {table: places for table, (_, places) in wanted.items()})

    # ------------------------------------------------------------ training

    def train(self, batch: Prepared, rows: TableRows) -> StepResult:
        shared, logs, states, outputs, served = self._run("train", batch.data, _table_tensors(rows), batch.places)
        return StepResult(
            logs={name: to_number(value) for name, value in logs.items()},
            states=_states_of(states, outputs),
            rows={index: (batch.ids[index], array_of(values)) for index, values in served.items()},
            shared={name: array_of(value) for name, value in shared.items()},
        )

    def _train_step(self, batch: Any, rows: Any, places: Any) -> Any:
        """The function behind `train`, on tensors."""
        # Identities, because a read may share the variable's memory, which the step changes.
        shared = {name: tf.identity(variable.value) for name, variable in self._shared.items()}
        self._metrics.reset()
        logs, outputs, found = self._steps.model_step(batch, rows, places)
        served = {index: rows_gradient(found[index], rows[index]) for index in rows if index in found}
        return shared, logs, self._metric_states(), outputs, served

    def _model_step(self, batch: Any, rows: Any, places: Any) -> tuple[Any, Any, dict[int, Any]]:
        """The part of it that XLA may compile."""
        with (
            self._served.serving(rows, places),
            self._averages.counted(),
            self._metrics.kept_outputs(Mode.TRAINING) as outputs,
        ):
            logs, gradients = self._capture.train_step(batch)
        return logs, tuple(outputs), gradients

    def _metric_states(self) -> dict[str, list[Any]]:
        """The current states of all metrics, as tensors."""
        units = self._metrics.units().items()
        return {name: [tf.convert_to_tensor(variable.value) for variable in unit.variables] for name, unit in units}

    # ------------------------------------------------------------ evaluation and prediction

    def evaluate(self, batch: Prepared, rows: TableRows) -> tuple[dict[str, Any], Any]:
        logs, outputs = self._run("test", batch.data, _table_tensors(rows), batch.places)
        return {name: to_number(value) for name, value in logs.items()}, tf.nest.map_structure(_as_array, outputs)

    def predict(self, batch: Prepared, rows: TableRows) -> Any:
        return tf.nest.map_structure(_as_array, self._run("predict", batch.data, _table_tensors(rows), batch.places))

    def _test_step(self, batch: Any) -> Any:
        with self._metrics.kept_outputs(Mode.EVALUATION) as outputs:
            return self._model.test_step(batch), tuple(outputs)

    # ------------------------------------------------------------ weights

    def weights(self) -> Sequence[Array]:
        return [*self._read_weights().values()]

    def set_weights(self, weights: PlacedBlocks) -> None:
        if weights.partition != self._partition:
            self._partition, self._assign = weights.partition, None
        names = [sorted(server) for server in weights]
        blocks = [server[name] for server, own in zip(weights, names, strict=True) for name in own]
        # TensorFlow variables take over the memory of assigned values, and training writes to it.
        tensors = [tensor_of(aligned_copy(block) if self._trains else block) for block in blocks]
        if self._assign is None:

            def assign(*flat: Any) -> None:
                given = iter(flat)
                self._assign_blocks([{name: next(given) for name in own} for own in names])

            self._assign = CompiledLater(assign, [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in tensors])
        self._assign(tensors)

    def _assign_blocks(self, blocks: Any) -> None:
        for index, pieces in pieces_of(blocks, self._specs, self._partition).items():
            whole = pieces[0] if len(pieces) == 1 else tf.concat(pieces, 0)
            self._model.weights[index].assign(tf.reshape(whole, self._specs[index].shape))

    # ------------------------------------------------------------ optimizers

    def optimizer_state(self) -> OptimizerState:
        held: dict[str, dict[Any, Array]] = {"slots": {}, "extras": {}, "shared": {}}
        for (kind, key), array in self._read_all().items():
            held[kind][key] = array
        return OptimizerState(**held, optimizers=self._optimizer_names)

    def shared_optimizer_state(self) -> Mapping[str, Array]:
        return self._read_shared()

    def set_optimizer_state(self, state: OptimizerState) -> None:
        found = _by_kind(state).items()
        given = {key: value for key, value in found if key in self._optimizer_variables and key[1] != LEARNING_RATE}
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
    if len(variables) <= _FEW:
        return lambda: {key: array_of(tf.convert_to_tensor(variable.value)) for key, variable in variables.items()}
    read = CompiledLater(lambda: [tf.convert_to_tensor(variable.value) for variable in variables.values()])
    return lambda: dict(zip(variables, map(array_of, read()), strict=True))


def _table_tensors(rows: TableRows) -> dict[int, Any]:
    return {index: tensor_of(values) for index, values in rows.items()}


def _states_of(tensors: Mapping[str, Sequence[Any]], outputs: Any) -> States:
    """The metric states after a training step."""
    states = {name: [tensor.numpy() for tensor in own] for name, own in tensors.items()}
    return with_outputs(states, tf.nest.map_structure(_as_array, outputs))


def _as_array(tensor: Any) -> Any:
    composite = isinstance(tensor, (tf.RaggedTensor, tf.SparseTensor))
    return tensor.numpy() if hasattr(tensor, "numpy") and not composite else tensor
