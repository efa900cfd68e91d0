"""The PyTorch backend: runs the model's own `train_step` and similar steps eagerly."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import ml_dtypes
import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from elasticcb.compute import served_tables
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
from elasticcb.compute.dense_batches import arrays_of, records_in, repeated
from elasticcb.compute.first_batch import (
    check_batch,
    fixed_batch_size,
    forward,
    kept,
    make_variables,
    told_with_batch,
    unchanged,
)
from elasticcb.compute.optimizers import HoldsOptimizers, prepared
from elasticcb.compute.served_tables import ServedTables, not_servable
from elasticcb.keras_private import embeddings_of, set_value_of, value_of
from elasticcb.layers.table_layers import NotServableError, TableLayer, answered
from elasticcb.model.metric_messages import States, with_outputs
from elasticcb.model.metrics import to_number
from elasticcb.model.model_file import building
from elasticcb.model.spec import Spec
from elasticcb.optimizers.state import OptimizerState
from elasticcb.optimizers.step_logs import flat_logs, is_overridden
from elasticcb.optimizers.traits import model_optimizers
from elasticcb.optimizers.variables import StepVariables
from elasticcb.process.devices import THREADS_VARIABLE
from elasticcb.rpc.tensors import Array, dtype_of
from elasticcb.settings import Mode
from elasticcb.sharding.array_names import STATE, WEIGHTS, of_kind
from elasticcb.sharding.flat_blocks import PlacedBlocks
from elasticcb.sharding.partition import VariableSpec, unpack
from elasticcb.tf.tensors import leave_gpus

logger = logging.getLogger(__name__)

_OWN_THREADS = "OMP_NUM_THREADS"  # read by PyTorch itself
# By table: the unique ids, int64 [n]; for each call of the layer, the positions of its ids among them, int64 of their
# shape.
Wanted = dict[int, tuple[Array, list[torch.Tensor]]]
# Called with an operation, its input tensors, and its outputs.
_Note = Callable[[Any, Sequence[torch.Tensor], Sequence[torch.Tensor]], None]
_ROWS, _RANDOM = "rows", "random"  # what a tensor depends on; otherwise the path of a variable


def build(spec: Spec, model: keras.Model, batch: Any, mode: Mode, fixed: Sequence[bool] = ()) -> StepVariables | None:
    """See `Backend.build`."""
    check_batch(spec, model, batch, mode)
    with told_with_batch(spec, batch, mode), building:
        make_variables(model, tensors_of(batch))
        size = fixed_batch_size(model)
        tensors = tensors_of(batch if size is None else repeated(arrays_of(batch), size))
        if mode is Mode.TRAINING and is_overridden(model, "train_step"):
            return _step_variables(model, tensors)
        step = functools.partial(forward, model) if mode is Mode.TRAINING else model_step(model, mode)
        _run_unchanged(model, step, tensors)
    return None


def _run_unchanged(model: keras.Model, step: Callable[[Any], Any], batch: Any) -> None:
    """Runs a step and restores the model, including changes by layers in `call` and the seeds that they use."""
    model.eval()
    with kept(model), torch.no_grad():
        step(batch)


class TorchComputation(HoldsOptimizers, Computation):
    """For the arguments, see `Backend.computation`."""

    def __init__(self, held: HeldModel) -> None:
        self._model, self._metrics, self._specs = held.model, held.metrics, held.specs
        self._capture = _TorchCapture(held.model, held.tables if held.trains else ())
        variables = OptimizerState()
        if held.trains:
            variables = prepared(held.model, held.specs, self._capture.optimizers)
        super().__init__(variables)
        self._averages = MovingAverages(held.model)
        if getattr(held.model, "jit_compile", False):
            logger.warning("The model runs without jit_compile: on PyTorch, steps run eagerly.")
        self._served = TorchTables(held.model, held.tables)
        self._lookups = {mode: self._served.lookups(model_step(held.model, mode)) for mode in Mode}

    def prepare(self, data: Any, mode: Mode, fixed: Sequence[bool] = ()) -> Prepared:
        tensors = tensors_of(data)
        wanted = self._lookups[mode](tensors)
        ids = {table: found for table, (found, _) in wanted.items()}
        return Prepared(tensors, records_in(tensors), ids, {table: places for table, (_, places) in wanted.items()})

    def train(self, batch: Prepared, rows: TableRows) -> StepResult:
        # Values before the step, which a push of row gradients needs.
        shared = self.shared_optimizer_state() if batch.ids else {}
        self._metrics.begin_part(Mode.TRAINING)
        keeps = self._metrics.kept_outputs(Mode.TRAINING)
        with self._step_of(batch, rows, training=True), self._averages.counted(), keeps as outputs:
            logs, gradients = self._capture.train_step(batch.data)
        found = {
            index: (batch.ids[index], array_of(gradient).astype(dtype_of(self._specs[index].dtype), copy=False))
            for index, gradient in gradients.items()
            if index in batch.ids
        }
        return StepResult(logs=_numbers(logs), states=self._states(outputs), rows=found, shared=shared)

    def evaluate(self, batch: Prepared, rows: TableRows) -> tuple[dict[str, Any], Any]:
        keeps = self._metrics.kept_outputs(Mode.EVALUATION)
        with self._step_of(batch, rows, training=False), torch.no_grad(), keeps as outputs:
            logs = self._model.test_step(batch.data)
        return _numbers(flat_logs(logs)), keras.tree.map_structure(as_array, tuple(outputs))

    def predict(self, batch: Prepared, rows: TableRows) -> Any:
        with self._step_of(batch, rows, training=False), torch.no_grad():
            return keras.tree.map_structure(as_array, self._model.predict_step(batch.data))

    def weights(self) -> Sequence[Array]:
        return [array_of(variable.value) for variable in self._model.weights]

    def set_weights(self, weights: PlacedBlocks) -> None:
        assign_weights(self._model, self._specs, weights)

    @contextlib.contextmanager
    def _step_of(self, batch: Prepared, rows: TableRows, training: bool) -> Iterator[None]:
        """Inside the context, a step of the model uses the rows of the batch."""
        with self._served.serving(rows, batch.places):
            if self._model.training is not training:  # the mode of PyTorch layers; Keras layers get it as an argument
                self._model.train(training)
            yield

    def _states(self, outputs: Any) -> States:
        units = self._metrics.units().items()
        states = {name: [as_array(variable.value) for variable in metric.variables] for name, metric in units}
        return with_outputs(states, keras.tree.map_structure(as_array, tuple(outputs)))


def _numbers(logs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: to_number(as_array(value)) for name, value in logs.items()}


class _TorchCapture(OptimizerCapture):
    """For the arguments, see `OptimizerCapture`."""

    def _plain(self, optimizer: keras.optimizers.Optimizer, gradient: torch.Tensor) -> torch.Tensor:
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            # An unbuilt optimizer has used the initial scale.
            scale = float(optimizer.dynamic_scale.value if optimizer.built else optimizer.initial_scale)
        elif optimizer.loss_scale_factor is not None:
            scale = optimizer.loss_scale_factor
        else:
            return gradient
        # At least in single precision, like Keras: a scale may exceed the range of float16.
        return gradient.to(torch.promote_types(gradient.dtype, torch.float32)) / scale


def _step_variables(model: keras.Model, batch: Any) -> StepVariables:
    """Which variables `train_step` gives to optimizers.

    The step is run, and the model is restored.
    """
    capture = _TorchCapture(model)
    try:
        with unchanged(model.variables), kept(model):
            capture.train_step(batch)
    finally:
        capture.release()
    return capture.variables


class TorchTables(ServedTables):
    """Determines which rows a batch needs before it is computed; and runs the step on these rows.

    The ids that a step will look up are recorded by running it up to its last lookup, without side effects.

    For the arguments, see `ServedTables`.
    """

    def __init__(self, model: keras.Model, tables: Iterable[int]) -> None:
        super().__init__(model, tables)
        # PyTorch lists these as the model's parameters; the tensors of a step are not among them.
        self._listed = {index: value_of(embeddings_of(layer)) for index, layer in self._layers.items()}

    def release(self) -> None:
        for index, layer in self._layers.items():
            set_value_of(embeddings_of(layer), self._listed[index])
        super().release()

    def lookups(self, step: Step) -> Callable[[Any], Wanted]:
        """A function that returns the lookups of `step` for a batch.

        It may be called in another thread than the step.

        Args:
            step: a function of a batch, of any structure. It is run completely once for each structure and kind of
                batch, and up to its last lookup for each batch; this changes nothing.

        The function raises:
            NotServableError: ids depend on rows, weights or randomness.
            ModelFileError: an id is out of range.
        """
        if not self._layers:
            return lambda batch: {}
        known: dict[Any, dict[int, int]] = {}  # by kind of batch, how often each table is looked up

        def look_up(batch: Any) -> Wanted:
            kind = _kind(batch)
            with self.tracing:
                if kind not in known:
                    known[kind] = self._calls(step, batch)
                calls = known[kind]
                recording = _IdRecording(self._layers, calls)
                if calls:
                    with self._answered_by(recording):
                        recording.run(self._model, step, batch)
            if {index: len(asked) for index, asked in recording.asked.items()} != calls:
                raise NotServableError(
                    "The step does not call its embedding layers as often as before. The number of calls must "
                    "not change."
                )
            wanted = {index: _unique(recording.asked[index]) for index in sorted(calls)}
            for index, (ids, _) in wanted.items():
                self.check_range(index, ids)
            return wanted

        return look_up

    def _calls(self, step: Step, batch: Any) -> dict[int, int]:
        uses = _Uses(self._model, self._layers)
        with self._answered_by(uses):
            uses.run(self._model, step, batch)
        for index, problem in uses.problems().items():
            raise not_servable(self._layers[index], problem)
        return {index: len(asked) for index, asked in uses.asked.items()}

    def _hold(self, layer: TableLayer, rows: Array) -> None:
        variable: Any = embeddings_of(layer)
        set_value_of(variable, torch.nn.Parameter(tensor_of(rows), requires_grad=variable.trainable))

    def _gather(self, layer: TableLayer, places: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.embedding(places, value_of(embeddings_of(layer)))


def problems_of(model: keras.Model, step: Step, batch: Any, layers: Mapping[int, TableLayer]) -> dict[int, str]:
    """Why rows can't be determined before a step of `batch`, which is run, by variable; see `FindProblems`."""
    uses = _Uses(model, layers)
    try:
        with answered(layers, uses.lookup):
            uses.run(model, step, batch)
    except Exception:
        if not uses.problems():  # otherwise they explain why it fails with placeholder rows
            raise
    return uses.problems()


def _unique(asked: list[torch.Tensor]) -> tuple[Array, list[torch.Tensor]]:
    flat = torch.cat([ids.reshape(-1).to(torch.int64) for ids in asked])
    unique, places = torch.unique(flat, return_inverse=True)
    parts = places.split([ids.numel() for ids in asked])
    return array_of(unique), [part.reshape(ids.shape) for part, ids in zip(parts, asked, strict=True)]


def _kind(batch: Any) -> Any:
    """A key for batches whose steps may call other layers."""
    leaves, structure = torch.utils._pytree.tree_flatten(batch)
    return str(structure), tuple((leaf.dtype, leaf.ndim) for leaf in leaves if leaf is not None)


class _Done(BaseException):
    """The last lookup was made. Not an Exception, because Keras would wrap it."""


class _IdRecording:
    """Records the layers' lookups while a step runs, and returns placeholder rows.

    Args:
        calls: how often each is looked up, after which the step ends; None: run it completely.
    """

    def __init__(self, layers: Mapping[int, TableLayer], calls: Mapping[int, int] | None = None) -> None:
        self._layers = layers
        self.asked: dict[int, list[torch.Tensor]] = {}
        self._left = -1 if calls is None else sum(calls.values())

    def lookup(self, index: int, ids: torch.Tensor) -> torch.Tensor:
        """A placeholder for the rows of `ids`."""
        self.asked.setdefault(index, []).append(ids.detach())
        self._left -= 1
        if not self._left:
            raise _Done
        return self._stand_in(self._layers[index], ids)

    def _stand_in(self, layer: TableLayer, ids: torch.Tensor) -> torch.Tensor:
        return embeddings_of(layer).value.new_zeros(()).expand(*ids.shape, layer.output_dim)

    def run(self, model: keras.Model, step: Step, batch: Any) -> None:
        with _unaffected(model), contextlib.suppress(_Done), torch.no_grad():
            step(batch)


class _Uses(_IdRecording):
    """Also determines why rows can't be known beforehand, by running a step completely."""

    def __init__(self, model: keras.Model, layers: Mapping[int, TableLayer]) -> None:
        super().__init__(layers)
        self._model = model
        self._depends: Any = WeakTensorKeyDictionary()  # tensor -> dependencies of its values
        self._ids_depend: dict[int, frozenset[str]] = {}  # by table
        self._other_uses: set[int] = set()
        self._answers = False
        self._sources: dict[int, int | str] = {}  # by address of a variable: its table, or its path
        self._changed: set[str] = set()  # paths of variables

    def lookup(self, index: int, ids: torch.Tensor) -> torch.Tensor:
        self._ids_depend[index] = self._ids_depend.get(index, frozenset()) | self._depends.get(ids, frozenset())
        return super().lookup(index, ids)

    def _stand_in(self, layer: TableLayer, ids: torch.Tensor) -> torch.Tensor:
        self._answers = True
        # through which gradients reach the layer's variable
        rows = (embeddings_of(layer).value.sum() * 0).expand(*ids.shape, layer.output_dim)
        self._answers = False
        self._depends[rows] = frozenset({_ROWS})
        return rows

    def run(self, model: keras.Model, step: Step, batch: Any) -> None:
        with contextlib.ExitStack() as stack:
            for layer in self._layers.values():
                stack.enter_context(_one_row(layer))
            scope = stack.enter_context(_unaffected(model))
            tables = {id(embeddings_of(layer)): index for index, layer in self._layers.items()}
            self._sources = {}
            for variable in model.variables:
                self._sources[_memory_of(variable.value)] = tables.get(id(variable), variable.path)
            stack.enter_context(_Operations(self._note))
            step(batch)
            self._changed = {
                variable.path for variable in model.variables if scope.get_current_value(variable) is not None
            }

    def _note(self, operation: Any, given: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> None:
        if _tells_nothing(operation) or self._answers:
            return
        found = frozenset({_RANDOM} if _is_random(operation) else ())
        for tensor in given:
            source = self._sources.get(_memory_of(tensor))
            if isinstance(source, str):
                found |= {source}
            elif source is not None and not _is_view(operation):
                self._other_uses.add(source)
            found |= self._depends.get(tensor, frozenset())
        if found:
            for tensor in results:
                self._depends[tensor] = self._depends.get(tensor, frozenset()) | found

    def problems(self) -> dict[int, str]:
        """Why rows can't be determined beforehand, by table."""
        found = {}
        trainable = {variable.path for variable in self._model.trainable_variables}
        for index in self._layers:
            depends = self._ids_depend.get(index, frozenset())
            if index in self._other_uses:
                found[index] = served_tables.OTHER_USES
            elif _ROWS in depends:
                found[index] = served_tables.BY_ROWS
            elif _RANDOM in depends:
                found[index] = (
                    "its ids depend on random numbers, which may be others when the step runs. Compute ids "
                    "only from the features; draw random ids in the input pipeline."
                )
            elif depends & trainable:
                found[index] = served_tables.by_weights(min(depends & trainable))
            elif depends & self._changed:
                found[index] = served_tables.by_changed(min(depends & self._changed))
        return found


@contextlib.contextmanager
def _unaffected(model: keras.Model) -> Iterator[keras.StatelessScope]:
    """Undoes changes of variables and random state by a step in the context. Optimizers do nothing."""
    before = {optimizer: vars(optimizer).get("apply") for optimizer in model_optimizers(model)}
    for optimizer in before:
        vars(optimizer)["apply"] = lambda *args, **kwargs: None
    try:
        with torch.random.fork_rng(devices=()), keras.StatelessScope() as scope:
            yield scope
    finally:
        for optimizer, apply in before.items():
            if apply is None:
                del vars(optimizer)["apply"]
            else:
                vars(optimizer)["apply"] = apply
        model.zero_grad()


@contextlib.contextmanager
def _one_row(layer: TableLayer) -> Iterator[None]:
    """The layer's variable has a single row, so its gradient needs little memory."""
    variable: Any = embeddings_of(layer)
    before = value_of(variable)
    set_value_of(
        variable, torch.nn.Parameter(before.new_zeros((1, layer.output_dim)), requires_grad=variable.trainable)
    )
    try:
        yield
    finally:
        set_value_of(variable, before)


class _Operations(TorchDispatchMode):
    """Reports each operation in the context, including those that compute gradients."""

    def __init__(self, note: _Note) -> None:
        super().__init__()
        self._note = note

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._note(func, _tensors((args, kwargs)), _tensors(result))
        return result


def _memory_of(tensor: torch.Tensor) -> int:
    """The address of a tensor's memory: the same for views."""
    return int(tensor.untyped_storage().data_ptr())


def _tells_nothing(operation: Any) -> bool:
    """Whether an operation's result does not depend on its inputs' values, like a shape."""
    return operation.overloadpacket in _SHAPES


def _is_view(operation: Any) -> bool:
    """Whether it only creates a view of its input's memory, without reading it."""
    return operation.overloadpacket in _NAMES


def _is_random(operation: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in operation.tags


def _tensors(structure: Any) -> list[torch.Tensor]:
    return [value for value in torch.utils._pytree.tree_leaves(structure) if isinstance(value, torch.Tensor)]


_SHAPES = {
    torch.ops.aten.zeros_like, torch.ops.aten.ones_like, torch.ops.aten.full_like, torch.ops.aten.empty_like,
    torch.ops.aten.new_zeros, torch.ops.aten.new_ones, torch.ops.aten.new_full, torch.ops.aten.new_empty,
}  # fmt: skip
_NAMES = {torch.ops.aten.detach, torch.ops.aten.alias}


def array_of(tensor: torch.Tensor) -> Array:
    """The tensor's array, sharing its CPU memory: changes of one affect the other."""
    tensor = tensor.detach().cpu()
    if tensor.dtype == torch.bfloat16:  # not supported by NumPy
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    array: Array = tensor.numpy()
    return array


def tensor_of(array: Array) -> torch.Tensor:
    """A copy of an array, on the device that Keras uses."""
    tensor: torch.Tensor = keras.ops.convert_to_tensor(array)
    return tensor


def tensors_of(batch: Any) -> Any:
    """A copy of a batch: PyTorch layers may modify their inputs. Raises the same errors as `arrays_of`."""
    return keras.tree.map_structure(tensor_of, arrays_of(batch), none_is_leaf=False)


def as_array(value: Any) -> Array:
    """A copy of a tensor, or of anything that NumPy accepts."""
    array: Array = keras.ops.convert_to_numpy(value)
    return array


def assign_weights(model: keras.Model, specs: Sequence[VariableSpec], weights: PlacedBlocks) -> None:
    """Sets the model to `weights`, without intermediate copies if its variables are in CPU memory."""
    apart: dict[int, Array] = {}
    targets: list[Array] = []
    for index, (variable, spec) in enumerate(zip(model.weights, specs, strict=True)):
        value, dtype = variable.value, dtype_of(spec.dtype)
        target = array_of(value) if value.device.type == "cpu" and value.is_contiguous() else None
        if target is None or target.dtype != dtype:
            target = apart[index] = np.empty(() if spec.table else spec.shape, dtype)
        targets.append(target)
    for server, slices in zip(weights, weights.partition, strict=True):
        unpack(of_kind(WEIGHTS, server), specs, slices, True, targets)
        unpack(of_kind(STATE, server), specs, slices, False, targets)
    for index, array in apart.items():
        if not specs[index].table:
            model.weights[index].assign(array)


class TorchBackend(Backend):
    """Keras on PyTorch."""

    build = staticmethod(build)
    computation = TorchComputation
    problems_of = staticmethod(problems_of)
    forks_with_gpus = False

    def __init__(self) -> None:
        leave_gpus()
        # Otherwise PyTorch starts a thread for each core, in each of several workers on one machine.
        if _OWN_THREADS not in os.environ and THREADS_VARIABLE in os.environ:
            torch.set_num_threads(int(os.environ[THREADS_VARIABLE]))

    def outputs(self, model: keras.Model, batch: Any) -> Any:
        model.eval()
        with torch.no_grad():
            return keras.tree.map_structure(as_array, model.predict_step(tensors_of(batch)))

    def data(self, model: keras.Model, batch: Any) -> Any:
        return tensors_of(batch)
