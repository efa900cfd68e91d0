"""The JAX backend: passes state from Keras's variables to a model's compiled steps, and their results back."""

from __future__ import annotations

import contextlib
import functools
import os
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import keras
import numpy as np
import tensorflow as tf

from elasticcb.compute.backend import (
    Backend,
    Computation,
    HeldModel,
    MovingAverages,
    Prepared,
    RowGradients,
    StepResult,
    TableRows,
)
from elasticcb.compute.dense_batches import arrays_of, records_in, repeated
from elasticcb.compute.first_batch import check_batch, fixed_batch_size, told_with_batch
from elasticcb.compute.jax.lookups import JAXTables, problems_of
from elasticcb.compute.jax.steps import (
    StatelessCapture,
    one_optimizer,
    predict_step,
    step_of,
    test_step,
    train_step,
    values,
)
from elasticcb.compute.optimizers import HoldsOptimizers, prepared
from elasticcb.errors import ElasticCBError, ModelFileError, describe, user_traceback
from elasticcb.keras_private import build_symbolically, layers_of, set_value_of
from elasticcb.layers.table_layers import without_rows
from elasticcb.model.metric_messages import States, with_outputs
from elasticcb.model.metrics import to_number
from elasticcb.model.model_file import building
from elasticcb.model.spec import Spec
from elasticcb.model.weights import assign_dense
from elasticcb.optimizers.state import OptimizerState
from elasticcb.optimizers.step_logs import flat_logs, is_overridden
from elasticcb.optimizers.variables import StepVariables
from elasticcb.rpc.tensors import Array
from elasticcb.settings import Mode
from elasticcb.sharding.flat_blocks import PlacedBlocks
from elasticcb.tf.tensors import leave_gpus

Step = Callable[..., Any]
_TENSORFLOW = os.path.dirname(tf.__file__) + os.sep
_NOT_TRACEABLE = (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError)


def build(spec: Spec, model: keras.Model, batch: Any, mode: Mode, fixed: Sequence[bool] = ()) -> StepVariables | None:
    """See `Backend.build`."""
    check_batch(spec, model, batch, mode)
    with told_with_batch(spec, batch, mode, _explain), building, without_rows(model):
        data = sized(model, arrays_of(batch))
        if mode is Mode.PREDICTION:
            _build_layers(model, data)
            predict_step(model).trace(data)
            return None
        _build_all(model, data)
        if mode is Mode.EVALUATION:
            test_step(model).trace(data)
            return None
        _build_scale(model)
        _trace_training(model, data)
        if not is_overridden(model, "train_step"):
            return None
        own = {index: 0 for index, variable in enumerate(model.weights) if variable.trainable}
        return StepVariables(own, own)


def sized(model: keras.Model, data: Any) -> Any:
    """The arrays of a batch, in the size that the model accepts."""
    size = fixed_batch_size(model)
    return data if size is None else repeated(data, size)


def _build_scale(model: keras.Model) -> None:
    """Builds an optimizer that scales the loss: its scale is a variable."""
    optimizer = one_optimizer(model)
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer) and not optimizer.built:
        optimizer.build(model.trainable_variables)


def _trace_training(model: keras.Model, data: Any) -> None:
    capture = StatelessCapture(model)
    try:
        train_step(model, capture).trace(data)
    finally:
        capture.release()


def _build_layers(model: keras.Model, data: Any) -> None:
    if not all(layer.built for layer in layers_of(model)):
        features = keras.utils.unpack_x_y_sample_weight(data)[0]
        with keras.StatelessScope():
            model(features)


def _build_all(model: keras.Model, data: Any) -> None:
    """Builds layers, loss and metrics, like `fit`, but not the optimizer, whose slots are as large as the model."""
    with _left_out(getattr(model, "optimizer", None)):
        build_symbolically(model, data)


@contextlib.contextmanager
def _left_out(optimizer: Any) -> Iterator[None]:
    if optimizer is None or optimizer.built:
        yield
        return
    optimizer.built = True
    try:
        yield
    finally:
        optimizer.built = False


class Metrics(NamedTuple):
    """Values of metric variables: those that Keras counts as the model's, and the others by unit."""

    of_model: list[Any]
    carried: dict[str, list[Any]]


class JAXComputation(HoldsOptimizers, Computation):
    """For the arguments, see `Backend.computation`.

    Its Keras variables hold the results of the last step; each step gets these values, and its results are written
    back.
    """

    def __init__(self, held: HeldModel) -> None:
        self._model, self._metrics, self._specs = held.model, held.metrics, held.specs
        self._capture = capture = StatelessCapture(held.model, held.tables) if held.trains else None
        variables, self._state = OptimizerState(), ()
        if capture is not None:
            if held.tables:
                _check_scale(capture.optimizer)
            variables = prepared(held.model, held.specs, [capture.optimizer])
            self._state = capture.optimizer.variables
        super().__init__(variables)
        self._averages = MovingAverages(held.model)
        self._trained: Sequence[keras.Variable] = held.model.trainable_variables
        self._others: Sequence[keras.Variable] = held.model.non_trainable_variables
        self._served: JAXTables = JAXTables(held.model, held.tables)
        self._lookups = {mode: self._served.lookups(step_of(held.model, mode, capture)) for mode in Mode}
        indices = {id(variable): index for index, variable in enumerate(held.model.weights)}
        self._trained_places = [indices[id(variable)] for variable in self._trained]  # positions in `model.weights`
        pairs = zip(self._trained, self._trained_places, strict=True)
        self._dense = [variable for variable, index in pairs if not held.specs[index].table]
        # The previous state is not needed after a step, whose results replace it.
        self._train = self._compiled(self._train_step, donated=(0, 1, 2))
        self._test, self._predict = self._compiled(self._test_step), self._compiled(self._predict_step)
        self._fresh: Metrics | None = None  # states without any batch
        self._has_traced = False

    def _compiled(self, step: Step, donated: Sequence[int] = ()) -> Step:
        """A compiled step, unless the model must not be compiled."""
        model = self._model
        compiled = not model.run_eagerly and model.jit_compile
        inner = jax.jit(step, donate_argnums=donated) if compiled else step

        def run(*args: Any) -> Any:
            # Variables created in the step get their values after it, not traced ones.
            with _explained(), keras.StatelessScope():
                return inner(*args)

        return run

    def prepare(self, data: Any, mode: Mode, fixed: Sequence[bool] = ()) -> Prepared:
        arrays = arrays_of(data)
        wanted = self._lookups[mode](arrays)
        ids = {table: found for table, (found, _) in wanted.items()}
        places = {table: found for table, (_, found) in wanted.items()}
        # Copied ahead of the step on accelerators; CPUs use arrays directly.
        batch = arrays if jax.default_backend() == "cpu" else jax.device_put(arrays)
        return Prepared(batch, records_in(arrays), ids, places)

    def _with_rows(self, rows: TableRows) -> list[Any]:
        """The values of the trained variables in a step: for tables, the rows of its batch."""
        padded = self._served.padded(rows)
        return [
            padded.get(index, variable.value)
            for index, variable in zip(self._trained_places, self._trained, strict=True)
        ]

    def _rows_in(self, trained: Sequence[Any]) -> dict[int, Any]:
        """The rows of tables among the values of the trained variables."""
        found = dict(zip(self._trained_places, trained, strict=True))
        return {index: found[index] for index, spec in enumerate(self._specs) if spec.table and index in found}

    # ------------------------------------------------------------ evaluation and prediction

    def evaluate(self, batch: Prepared, rows: TableRows) -> tuple[dict[str, Any], Any]:
        model_metrics, before = self._model.metrics_variables, self._present_metrics()
        others = [variable.value for variable in self._others]
        logs, outputs, others, after = self._test(self._with_rows(rows), others, before, batch.places, batch.data)
        put(self._others, others)
        put(model_metrics, after.of_model)
        for name, unit in self._metrics.carried_units().items():
            put(unit.variables, after.carried.get(name, ()))
        return {name: to_number(value) for name, value in logs.items()}, jax.tree.map(np.asarray, outputs)

    def predict(self, batch: Prepared, rows: TableRows) -> Any:
        others = [variable.value for variable in self._others]
        outputs, others = self._predict(self._with_rows(rows), others, batch.places, batch.data)
        put(self._others, others)
        return jax.tree.map(np.asarray, outputs)

    def _predict_step(self, trained: Any, others: Any, places: Any, data: Any) -> Any:
        with self._served.serving(self._rows_in(trained), places):
            return self._model.predict_step((trained, others), data)

    def _test_step(self, trained: Any, others: Any, metrics: Metrics, places: Any, data: Any) -> Any:
        with (
            self._served.serving(self._rows_in(trained), places),
            self._metrics.kept_outputs(Mode.EVALUATION) as outputs,
            self._metrics.carried(metrics.carried) as carried,
        ):
            logs, (_, others, of_model) = self._model.test_step((trained, others, metrics.of_model), data)
            return flat_logs(logs), tuple(outputs), others, Metrics(of_model, carried)

    # ------------------------------------------------------------ training

    def train(self, batch: Prepared, rows: TableRows) -> StepResult:
        # Values before the step, which a push of row gradients needs.
        shared = self.shared_optimizer_state() if batch.ids else {}
        others, optimizer = values(self._others, self._state)
        given = self._with_rows(rows), others, optimizer
        logs, (trained, others, optimizer), states, gradients = self._train(
            *given, self._fresh_metrics(), batch.places, batch.data
        )
        own = [each for index, each in zip(self._trained_places, trained, strict=True) if not self._specs[index].table]
        put(self._dense, own)
        put(self._others, others)
        put(self._state, optimizer)
        units = self._metrics.units()
        for name in self._metrics.replayed:
            put(units[name].variables, states[0][name])
        logs, states, gradients = jax.device_get((logs, states, gradients))
        return StepResult(
            logs={name: to_number(value) for name, value in logs.items()},
            states=_states_of(states),
            rows=_rows_of(gradients, batch.ids),
            shared=shared,
        )

    def _train_step(
        self, trained: Any, others: Any, optimizer: Any, metrics: Metrics, places: Any, data: Any
    ) -> tuple[Any, ...]:
        """The model's own train step, to be traced.

        Returns:
            Its logs, the state after it, metric states by unit with `(labels, predictions[, weight])` if metrics need
            these, and gradients of rows.
        """
        assert self._capture is not None
        with (
            self._averages.counted(),
            self._served.serving(self._rows_in(trained), places),
            self._metrics.kept_outputs(Mode.TRAINING) as outputs,
            self._metrics.carried(metrics.carried) as carried,
        ):
            self._has_traced = True
            self._capture.begin()
            logs, (*state, of_model) = self._model.train_step((trained, others, optimizer, metrics.of_model), data)
            states = self._by_unit(of_model, carried), tuple(outputs)
            return flat_logs(logs), state, states, self._capture.gradients()

    def _by_unit(self, of_model: Sequence[Any], carried: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
        found = {id(variable): value for variable, value in zip(self._model.metrics_variables, of_model, strict=True)}
        for name, unit in self._metrics.carried_units().items():
            found |= {
                id(variable): value for variable, value in zip(unit.variables, carried.get(name, ()), strict=False)
            }
        return {
            name: [found.get(id(variable), variable.value) for variable in unit.variables]
            for name, unit in self._metrics.units().items()
        }

    def _fresh_metrics(self) -> Metrics:
        """The metric states at the start of a training step."""
        if self._fresh is None or self._has_traced:  # a step may have new logs
            self._has_traced = False
            self._metrics.begin_part(Mode.TRAINING)
            self._fresh = self._present_metrics()
        if not self._metrics.replayed:
            return self._fresh
        units = self._metrics.units()
        going_on = {id(each) for name in self._metrics.replayed for each in units[name].variables}
        model_metrics = self._model.metrics_variables
        of_model = [
            each.value if id(each) in going_on else fresh
            for each, fresh in zip(model_metrics, self._fresh.of_model, strict=True)
        ]
        carried = {
            name: [each.value for each in units[name].variables] if name in self._metrics.replayed else own
            for name, own in self._fresh.carried.items()
        }
        return Metrics(of_model, carried)

    def _present_metrics(self) -> Metrics:
        carried = self._metrics.carried_units()
        of_model, *units = values(self._model.metrics_variables, *(unit.variables for unit in carried.values()))
        return Metrics(of_model, dict(zip(carried, units, strict=True)))

    # ------------------------------------------------------------ weights

    def weights(self) -> Sequence[Array]:
        arrays: list[Array] = jax.device_get([variable.value for variable in self._model.weights])
        return arrays

    def set_weights(self, weights: PlacedBlocks) -> None:
        assign_dense(self._model, self._specs, weights)


def put(variables: Iterable[keras.Variable], found: Iterable[Any]) -> None:
    """Sets variables to a step's results, like Keras's `fit` at the end of an epoch.

    Bypasses `assign`, which for all variables of a model takes longer than a small step.
    """
    for variable, value in zip(variables, found, strict=False):
        set_value_of(variable, value)


def _check_scale(optimizer: Any) -> None:
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise ModelFileError(
            f"The optimizer {optimizer.name!r} scales the loss, as with mixed_float16, and the model has embedding "
            "tables on the servers. JAX does not support this: use mixed_bfloat16, or keras.layers.Embedding."
        )


def _states_of(fetched: tuple[Mapping[str, Sequence[Any]], Any]) -> States:
    by_unit, outputs = fetched
    return with_outputs({name: [np.asarray(value) for value in found] for name, found in by_unit.items()}, outputs)


def _rows_of(gradients: Mapping[int, Array], ids: Mapping[int, Array]) -> RowGradients:
    """Converts gradients of padded rows to those of the rows of `ids`, by table."""
    return {index: (ids[index], gradient[: len(ids[index])]) for index, gradient in gradients.items() if index in ids}


def _explain(error: Exception) -> str:
    """What happened, and what to do; "" if the error is clear by itself."""
    if isinstance(error, jax.errors.UnexpectedTracerError):
        return (
            f"it keeps an array of a traced step beyond the step: {_first_line(error)}. State that a step "
            "changes must be in a keras.Variable of the model, or of one of its layers or metrics."
        )
    if _goes_through_tensorflow(error):
        return (
            f"it calls TensorFlow with a JAX array ({_first_line(error)}). With KERAS_BACKEND=jax the model, its "
            "loss and its metrics are traced by JAX: use keras.ops or jax.numpy in them instead of tf. "
            "The input pipeline can keep using TensorFlow: tf.data works with every backend."
        )
    if isinstance(error, _NOT_TRACEABLE):
        return (
            f"it can't be traced by JAX ({_first_line(error)}). Use keras.ops (keras.ops.cond, keras.ops.where) or "
            "jax.numpy where Python's `if`, float() or NumPy reads array values; or compile the model with "
            "run_eagerly=True, or jit_compile=False, which is slow."
        )
    return ""


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Converts errors of a step to a `ModelFileError` with advice, if known."""
    try:
        yield
    except ElasticCBError:
        raise
    except Exception as error:
        found = _explain(error)
        if not found:
            raise
        raise ModelFileError(f"The model's step can't run: {found}", user_traceback(error)) from error


def _goes_through_tensorflow(error: BaseException | None) -> bool:
    while error is not None:
        if any(frame.filename.startswith(_TENSORFLOW) for frame in traceback.extract_tb(error.__traceback__)):
            return True
        error = error.__cause__
    return False


def _first_line(error: Exception) -> str:
    lines = describe(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__


class JAXBackend(Backend):
    """Keras on JAX."""

    build = staticmethod(build)
    computation = JAXComputation
    problems_of = staticmethod(problems_of)

    def __init__(self) -> None:
        leave_gpus()

    def outputs(self, model: keras.Model, batch: Any) -> Any:
        state = values(model.trainable_variables, model.non_trainable_variables)
        with without_rows(model):
            outputs, _ = model.predict_step(state, self.data(model, batch))
        return jax.tree.map(np.asarray, outputs)

    def data(self, model: keras.Model, batch: Any) -> Any:
        return sized(model, arrays_of(batch))

    @contextlib.contextmanager
    def _steps(self, model: keras.Model, mode: Mode) -> Iterator[Callable[[Mode], Any]]:
        capture = StatelessCapture(model) if mode is Mode.TRAINING else None
        try:
            yield functools.partial(step_of, model, capture=capture)
        finally:
            if capture is not None:
                capture.release()
