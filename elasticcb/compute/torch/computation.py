"""Runs the model's own `train_step` and similar steps eagerly in PyTorch."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import torch

from elasticcb.compute.backend import Computation, HeldModel, Prepared, TableRows
from elasticcb.compute.capture import OptimizerCapture
from elasticcb.compute.dense_batches import records_in
from elasticcb.compute.torch.arrays import as_array, assign_weights, tensors_of
from elasticcb.compute.torch.lookups import TorchTables
from elasticcb.model.metric_messages import States, with_outputs
from elasticcb.model.metrics import to_number
from elasticcb.optimizers.step_logs import flat_logs
from elasticcb.settings import Mode
from elasticcb.sharding.flat_blocks import PlacedBlocks

logger = logging.getLogger(__name__)


class TorchComputation(Computation):
    """Runs batches of one model."""

    def __init__(self, held: HeldModel, capture: OptimizerCapture) -> None:
        self._model, self._metrics, self._specs, self._partition = held
        self._capture = capture
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

    def evaluate(self, batch: Prepared, rows: TableRows) -> tuple[dict[str, Any], Any]:
        keeps = self._metrics.kept_outputs(Mode.EVALUATION)
        with self._step_of(batch, rows, training=False), torch.no_grad(), keeps as outputs:
            logs = self._model.test_step(batch.data)
        return numbers(flat_logs(logs)), keras.tree.map_structure(as_array, tuple(outputs))

    def predict(self, batch: Prepared, rows: TableRows) -> Any:
        with self._step_of(batch, rows, training=False), torch.no_grad():
            return keras.tree.map_structure(as_array, self._model.predict_step(batch.data))

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


def numbers(logs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: to_number(as_array(value)) for name, value in logs.items()}
