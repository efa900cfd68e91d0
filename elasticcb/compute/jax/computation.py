"""Passes state from Keras's variables to a model's compiled steps, and their results back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import keras
import numpy as np

from elasticcb.compute.backend import Computation, HeldModel, Prepared, RowGradients, StepResult, TableRows
from elasticcb.compute.dense_batches import arrays_of, records_in
from elasticcb.compute.jax.capture import StatelessCapture
from elasticcb.compute.jax.explain import explained
from elasticcb.compute.jax.lookups import JAXTables
from elasticcb.compute.jax.steps import step_of, values
from elasticcb.compute.moving_averages import MovingAverages
from elasticcb.compute.optimizers import HoldsOptimizers, prepared
from elasticcb.errors import ModelFileError
from elasticcb.keras_private import set_value_of
from elasticcb.model.metric_messages import States, with_outputs
from elasticcb.model.metrics import to_number
from elasticcb.model.weights import assign_dense
from elasticcb.optimizers.state import OptimizerState
from elasticcb.optimizers.step_logs import flat_logs
from elasticcb.rpc.tensors import Array
from elasticcb.settings import Mode
from elasticcb.sharding.flat_blocks import PlacedBlocks

Step = Callable[..., Any]


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
            with explained(), keras.StatelessScope():
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
        model_metrics, carried = self._model.metrics_variables, self._metrics.carried_units()
        before = Metrics(
            [variable.value for variable in model_metrics],
            {name: [variable.value for variable in unit.variables] for name, unit in carried.items()},
        )
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
            self._metrics.reset()
            carried = {
                name: [variable.value for variable in unit.variables]
                for name, unit in self._metrics.carried_units().items()
            }
            self._fresh = Metrics([variable.value for variable in self._model.metrics_variables], carried)
        return self._fresh

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
