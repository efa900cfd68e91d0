"""Runs the model's own `train_step` and similar steps eagerly in PyTorch."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import torch

from elasticcb.compute.backend import Computation, HeldModel, Prepared, StepResult, TableRows
from elasticcb.compute.capture import OptimizerCapture
from elasticcb.compute.dense_batches import records_in
from elasticcb.compute.moving_averages import MovingAverages
from elasticcb.compute.optimizers import HoldsOptimizers, copied, prepared
from elasticcb.compute.priming import unchanged
from elasticcb.compute.torch.arrays import array_of, as_array, assign_weights, tensors_of
from elasticcb.compute.torch.lookups import TorchTables
from elasticcb.model.metric_messages import States, with_outputs
from elasticcb.model.metrics import to_number
from elasticcb.optimizers.state import OptimizerState
from elasticcb.optimizers.step_logs import flat_logs
from elasticcb.optimizers.variables import StepVariables
from elasticcb.rpc.tensors import Array, dtype_of
from elasticcb.settings import Mode
from elasticcb.sharding.flat_blocks import PlacedBlocks

logger = logging.getLogger(__name__)


class TorchCapture(OptimizerCapture):
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


def step_variables(model: keras.Model, batch: Any) -> StepVariables:
    """Which variables `train_step` gives to optimizers.

    The step is run, and the model is restored.
    """
    capture = TorchCapture(model)
    try:
        with unchanged(model.variables):
            capture.train_step(batch)
    finally:
        capture.release()
    return capture.variables


class TorchComputation(HoldsOptimizers, Computation):
    """For the arguments, see `Backend.computation`."""

    def __init__(self, held: HeldModel) -> None:
        self._model, self._metrics, self._specs = held.model, held.metrics, held.specs
        self._capture = TorchCapture(held.model, held.tables if held.trains else ())
        variables = OptimizerState()
        if held.trains:
            variables = prepared(held.model, held.specs, self._capture.optimizers)
        super().__init__(variables)
        self._averages = MovingAverages(held.model)
        # Returned by a step, because a push of its row gradients needs it.
        self._shared: Mapping[str, Any] = variables.shared if held.tables else {}
        if getattr(held.model, "jit_compile", False):
            logger.warning("The model runs without jit_compile: on PyTorch, steps run eagerly.")
        self._served = TorchTables(held.model, held.tables)
        steps = {
            Mode.TRAINING: held.model.train_step,
            Mode.EVALUATION: held.model.test_step,
            Mode.PREDICTION: held.model.predict_step,
        }
        self._lookups = {mode: self._served.lookups(step) for mode, step in steps.items()}

    def prepare(self, data: Any, mode: Mode, fixed: Sequence[bool] = ()) -> Prepared:
        tensors = tensors_of(data)
        wanted = self._lookups[mode](tensors)
        ids = {table: found for table, (found, _) in wanted.items()}
        return Prepared(tensors, records_in(tensors), ids, {table: places for table, (_, places) in wanted.items()})

    def train(self, batch: Prepared, rows: TableRows) -> StepResult:
        shared = copied(self._shared)
        self._metrics.reset()
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
