"""The TensorFlow backend: one compiled function per kind of batch, around the model's own `train_step` and friends."""

from __future__ import annotations

import functools
import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from elasticcb.compute.backend import (
    Backend,
    Computation,
    HeldModel,
    MovingAverages,
    Prepared,
    Step,
    StepResult,
    TableRows,
    model_step,
)
from elasticcb.compute.capture import OptimizerCapture
from elasticcb.compute.first_batch import (
    check_batch,
    fixed_batch_size,
    forward,
    kept,
    make_variables,
    told_with_batch,
    unchanged,
)
from elasticcb.compute.optimizers import prepared
from elasticcb.compute.served_tables import ServedTables, not_servable
from elasticcb.compute.tensorflow.id_graph import Recording, id_function
from elasticcb.errors import ModelFileError
from elasticcb.keras_private import embeddings_of, layers_of, value_of
from elasticcb.layers.table_layers import TableLayer, answered
from elasticcb.model.input_pipeline import records_in
from elasticcb.model.metric_messages import States, with_outputs
from elasticcb.model.metrics import to_number
from elasticcb.model.model_file import building
from elasticcb.model.spec import Spec
from elasticcb.optimizers.state import LEARNING_RATE, OptimizerState
from elasticcb.optimizers.step_logs import flat_logs, is_overridden
from elasticcb.optimizers.traits import is_own_class
from elasticcb.optimizers.variables import StepVariables
from elasticcb.rpc.shared_frames import aligned_copy
from elasticcb.rpc.tensors import Array
from elasticcb.settings import Mode
from elasticcb.sharding.flat_blocks import PlacedBlocks, pieces_of
from elasticcb.sharding.partition import Slice
from elasticcb.tf.batch_signatures import CompiledLater, Fixed, Signatures, flat_tensors, quick_call, specs_of
from elasticcb.tf.tensors import array_of, tensor_of

logger = logging.getLogger(__name__)

_FEW = 4  # variables that are read sooner one by one than by a compiled function
_NOT_COMPILABLE = re.compile(r"XLA|unsupported operations|compile-time constant|uncompilable", re.IGNORECASE)

_Call = Callable[[Sequence[Any]], Any]
# By table: the unique ids, int64 [n]; for each call of the layer, the positions of its ids among them, int32 of their
# shape.
Wanted = dict[int, tuple[tf.Tensor, list[tf.Tensor]]]
# Row gradients of variables up to this size in bytes are made dense: for gradients of rows, Keras's optimizers also
# read the whole variable, with conditions that TensorFlow runs slowly.
_SMALL_BYTES = 2 << 20


def build(spec: Spec, model: keras.Model, batch: Any, mode: Mode, fixed: Fixed = ()) -> StepVariables | None:
    """See `Backend.build`."""
    check_batch(spec, model, batch, mode)
    batch = traced = _of_fixed_size(model, batch)
    if fixed_batch_size(model) is None and mode is not Mode.PREDICTION:  # else lazy layers get the size, as in Keras
        traced = specs_of(batch, fixed)
    with told_with_batch(spec, batch, mode), building:
        if model.run_eagerly:  # else the step is traced first
            make_variables(model, batch)
        if mode is Mode.TRAINING and is_overridden(model, "train_step"):
            return step_variables(model, batch, traced)
        step = functools.partial(forward, model) if mode is Mode.TRAINING else model_step(model, mode)
        _run_unchanged(model, step, batch, traced)
    return None


def _run_unchanged(model: keras.Model, step: Callable[[Any], Any], batch: Any, traced: Any) -> None:
    """Runs a step and restores the model, including changes by layers in `call` and the seeds that they use."""
    failed: Exception | None = None
    if not model.run_eagerly and not all(layer.built for layer in layers_of(model)):
        try:  # builds lazily created variables without running it
            tf.function(step, autograph=False).get_concrete_function(traced)
        except Exception as error:
            failed = error
    with kept(model):
        try:
            step(batch)
        except Exception:
            if failed is None:
                raise
            raise failed from None  # the other error may be about variables left half built by the first


def _of_fixed_size(model: keras.Model, batch: Any) -> Any:
    """The batch; its records are repeated if the model only accepts batches of one size."""
    size = fixed_batch_size(model)
    if size is None:
        return batch

    def repeated(tensor: Any) -> Any:
        return tf.gather(tensor, tf.range(size) % tf.shape(tensor)[0])

    return tf.nest.map_structure(repeated, batch)


def problems_of(model: keras.Model, step: Step, batch: Any, layers: Mapping[int, TableLayer]) -> dict[int, str]:
    """Why rows can't be determined before a step of `batch`, which is traced, by variable; see `FindProblems`."""
    recording: Recording

    def recorded(batch: Any) -> Recording:
        nonlocal recording
        recording = Recording(layers)
        step(batch)
        return recording

    with answered(layers, lambda index, ids: recording.lookup(index, ids)):
        id_function(model, recorded, specs_of(batch, [True] * len(tf.nest.flatten(batch))))
    return recording.problems()


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
        self._model, self._metrics, self._specs, self._trains = held
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
        self._assigned: Any = None  # partition and names of the blocks that `_assign` takes
        self._assign: Callable[[Any], Any] | None = None
        self._read_weights = _reader(dict(enumerate(held.model.weights)))
        self._served = TensorFlowTables(held.model, held.tables)
        steps: dict[str, Callable[[Any], Any]] = {
            Mode.TRAINING: self._capture.train_step,
            Mode.EVALUATION: held.model.test_step,
            Mode.PREDICTION: held.model.predict_step,
        }
        self._fixed: dict[str, Fixed] = {}  # by mode, as in `_CompiledStep`
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
            _CompiledStep(self._train_step, fixed=self._fixed_in(Mode.TRAINING)),
            _CompiledStep(test, jit or None, self._fixed_in(Mode.EVALUATION)),
            _CompiledStep(predict, jit or None, self._fixed_in(Mode.PREDICTION)),
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
        self._metrics.begin_part(Mode.TRAINING)
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
        logs = {name: to_number(value) for name, value in flat_logs(logs).items()}
        return logs, tf.nest.map_structure(_as_array, outputs)

    def predict(self, batch: Prepared, rows: TableRows) -> Any:
        return tf.nest.map_structure(_as_array, self._run("predict", batch.data, _table_tensors(rows), batch.places))

    def _test_step(self, batch: Any) -> Any:
        with self._metrics.kept_outputs(Mode.EVALUATION) as outputs:
            return self._model.test_step(batch), tuple(outputs)

    # ------------------------------------------------------------ weights

    def weights(self) -> Sequence[Array]:
        return [*self._read_weights().values()]

    def set_weights(self, weights: PlacedBlocks) -> None:
        names = [sorted(server) for server in weights]
        if (weights.partition, names) != self._assigned:
            self._assigned, self._assign = (weights.partition, names), None
        blocks = [server[name] for server, own in zip(weights, names, strict=True) for name in own]
        # TensorFlow variables take over the memory of assigned values, and training writes to it.
        tensors = [tensor_of(aligned_copy(block) if self._trains else block) for block in blocks]
        if self._assign is None:

            def assign(*flat: Any) -> None:
                given = iter(flat)
                blocks = [{name: next(given) for name in own} for own in names]
                self._assign_blocks(blocks, weights.partition)

            self._assign = CompiledLater(assign, [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in tensors])
        self._assign(tensors)

    def _assign_blocks(self, blocks: Any, partition: Sequence[Sequence[Slice]]) -> None:
        for index, pieces in pieces_of(blocks, self._specs, partition).items():
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
    return {(kind, key): value for kind, key, value in state.items()}


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


class _CompiledStep:
    """A function of a batch and of structures of tensors, traced once per kind of batch.

    A `tf.function` compares the shapes of all inputs with those of every earlier call. That takes longer than a small
    step if shapes always differ, as with batches that use different numbers of rows.

    Args:
        fixed: which tensors of the batch have a fixed number of rows, as in `specs_of`; called for each batch.
    """

    def __init__(
        self, step: Callable[..., Any], jit_compile: bool | None = None, fixed: Callable[[], Fixed] = tuple
    ) -> None:
        self._step, self._fixed = step, fixed
        self._jit_compile = jit_compile
        self._signatures: Signatures[_Call] = Signatures(self._trace)

    def __call__(self, *args: Any) -> Any:
        """The step of `args`: the batch, and structures of tensors."""
        fixed = self._fixed()
        leaves, key = flat_tensors(args, fixed)
        return self._signatures.function(args, key, fixed)(leaves)

    def _trace(self, specs: Any) -> _Call:
        flat_specs = tf.nest.flatten(specs, expand_composites=True)

        def step(*leaves: Any) -> Any:
            given = iter(leaves)
            flat = [None if spec is None else next(given) for spec in flat_specs]
            return self._step(*tf.nest.pack_sequence_as(specs, flat, expand_composites=True))

        signature = [tf.TensorSpec(spec.shape, spec.dtype) for spec in flat_specs if spec is not None]
        return quick_call(step, signature, self._jit_compile)


class TensorFlowTables(ServedTables):
    """Determines which rows a batch needs before it is computed; and runs the step on these rows.

    The model's step is traced once while its embedding layers record the requested ids. The part of the graph that
    leads to ids then runs for each batch: it uses no weight, metric or seed.

    For the arguments, see `ServedTables`.
    """

    def lookups(self, step: Step, fixed: Callable[[], Fixed] = tuple) -> Callable[[Any], Wanted]:
        """A function that returns the lookups of `step` for a batch.

        It may be called in another thread than the step.

        Args:
            step: a function of a batch, of any structure; traced once for each structure and kind of batch, never run.
            fixed: as in `_CompiledStep`.

        The function raises:
            NotServableError: ids depend on rows, weights or randomness, or are looked up inside a loop or function.
            ModelFileError: an id is out of range.
        """
        if not self._layers:
            return lambda batch: {}

        def trace(specs: Any) -> Callable[..., Wanted]:
            def recorded(batch: Any) -> Recording:
                recording = Recording(self._layers)
                with self._answered_by(recording):
                    step(batch)
                return recording

            with self.tracing:
                function, recording = id_function(self._model, recorded, specs)
            for index, problem in recording.problems().items():
                raise not_servable(self._layers[index], problem)
            calls = recording.calls()
            order = sorted(calls)

            def wanted(leaves: Sequence[tf.Tensor]) -> Wanted:
                bad, *found = function(leaves)
                result, at = {}, 0
                for index in order:
                    end = at + 1 + calls[index]
                    result[index] = (found[at], found[at + 1 : end])
                    at = end
                if bad.numpy().any():
                    for index, (ids, _) in result.items():
                        self.check_range(index, ids.numpy())
                return result

            return wanted

        signatures = Signatures(trace)

        def look_up(batch: Any) -> Wanted:
            leaves, key = flat_tensors(batch, fixed())
            wanted: Wanted = signatures.function(batch, key, fixed())(leaves)
            return wanted

        return look_up

    def _hold(self, layer: TableLayer, rows: Any) -> None:
        value_of(embeddings_of(layer)).assign(rows)

    def _gather(self, layer: TableLayer, places: Any, ids: Any) -> Any:
        rows = tf.gather(value_of(embeddings_of(layer)), places)
        if not tf.executing_eagerly() and ids.shape.rank is not None:
            rows.set_shape([*ids.shape, layer.output_dim])
        return rows


class TensorFlowCapture(OptimizerCapture):
    """For the arguments, see `OptimizerCapture`."""

    def _plain(self, optimizer: keras.optimizers.Optimizer, gradient: Any) -> Any:
        dynamic = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
        scale = tf.convert_to_tensor(optimizer.dynamic_scale.value) if dynamic else optimizer.loss_scale_factor
        if scale is None:
            return gradient
        # At least in single precision, like Keras: a scale may exceed the range of float16.
        if isinstance(gradient, tf.IndexedSlices):
            values = keras.ops.divide(gradient.values, scale)
            return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
        return keras.ops.divide(tf.convert_to_tensor(gradient), scale)

    def _applied(self, optimizer: keras.optimizers.Optimizer, gradient: Any, variable: Any) -> Any:
        if is_own_class(optimizer):  # which may update only the rows given
            return gradient
        return _made_dense(gradient, variable.shape, variable.dtype)

    def _place(self) -> Any:
        return _graph()

    def _check_place(self, optimizer: int, place: Any) -> None:
        if place is not _graph():
            raise ModelFileError(
                f"The optimizer {self.named(optimizer)} is applied inside a tf.cond, a loop or a separate function "
                "(@tf.function, keras.ops.cond), where gradients of rows of an embedding table can't be captured. Call "
                "it directly in train_step: remove the decorator (the whole step is compiled anyway), and instead of a "
                "condition multiply the gradients by 0 or 1. Or use keras.layers.Embedding."
            )


def rows_gradient(gradient: Any, rows: Any) -> Any:
    """The gradient of each of the rows [n, dim] of a table that were given to a step."""
    if isinstance(gradient, tf.IndexedSlices):
        places = tf.reshape(gradient.indices, [-1])
        gradient = tf.math.unsorted_segment_sum(gradient.values, places, tf.shape(rows)[0])
    return tf.cast(gradient, rows.dtype)


def _made_dense(gradient: Any, shape: Sequence[int], dtype: Any) -> Any:
    """The dense gradient of a small variable, if `gradient` is one of rows; those of equal rows are summed. Any other
    gradient is returned as it is."""
    kind = tf.as_dtype(dtype)
    if not isinstance(gradient, tf.IndexedSlices) or math.prod(shape) * kind.size > _SMALL_BYTES:
        return gradient
    rows = tf.reshape(gradient.indices, [-1])
    return tf.math.unsorted_segment_sum(tf.cast(gradient.values, kind), rows, shape[0])


def step_variables(model: keras.Model, batch: Any, traced: Any) -> StepVariables:
    """Which variables `train_step` gives to optimizers.

    The step is traced for the specs `traced`, not run; code run by `run_eagerly` leaves the model unchanged.
    """
    capture = TensorFlowCapture(model)
    try:
        if model.run_eagerly:
            with unchanged(model.variables), kept(model):
                capture.train_step(batch)
        else:
            tf.function(lambda data: capture.train_step(data)[0], autograph=False).get_concrete_function(traced)
    finally:
        capture.release()
    return capture.variables


def _graph() -> Any:
    """The graph being traced; None if there is none."""
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


class TensorFlowBackend(Backend):
    """Keras on TensorFlow."""

    build = staticmethod(build)
    computation = TensorFlowComputation
    problems_of = staticmethod(problems_of)

    def outputs(self, model: keras.Model, batch: Any) -> Any:
        return model.predict_step(batch)
