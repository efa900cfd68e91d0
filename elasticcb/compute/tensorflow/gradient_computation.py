"""Training steps whose gradients go to servers.

The optimizers store their gradients (capture.py), so that the traced function returns them instead of applying them.
Pulled weights are assigned, and gradients packed into one flat array per server and dtype, inside the same function.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from elasticcb.compute.backend import GradientComputation, GradientResult, HeldModel, Prepared, TableRows
from elasticcb.compute.capture import check_updated
from elasticcb.compute.clipping import Clipping, clippings
from elasticcb.compute.loss_scale import explain_overflow, unscaled
from elasticcb.compute.moving_averages import MovingAverages
from elasticcb.compute.tensorflow.assignments import refused_assignments
from elasticcb.compute.tensorflow.capture import TensorFlowCapture
from elasticcb.compute.tensorflow.computation import TensorFlowComputation, table_tensors, to_arrays, to_tensors
from elasticcb.compute.tensorflow.gradients import sort_gradients
from elasticcb.compute.tensorflow.loss_scale import TensorFlowScale
from elasticcb.keras_private import updates_of
from elasticcb.model.metrics import to_number
from elasticcb.optimizers.traits import unwrapped
from elasticcb.rpc.tensors import aligned
from elasticcb.settings import Mode
from elasticcb.sharding.flat_blocks import PlacedBlocks
from elasticcb.tf.convert import array_of, tensor_of


class TensorFlowGradients(TensorFlowComputation, GradientComputation):
    """For the arguments, see `Backend.computation`."""

    def __init__(self, held: HeldModel) -> None:
        super().__init__(held, TensorFlowCapture(held.model))
        self._clipped = self._clippings()
        self._scales = [TensorFlowScale(optimizer) for optimizer in self._capture.optimizers]
        self._averages = MovingAverages(held.model)

    def _clippings(self) -> list[Clipping]:
        return clippings(self._model, self._specs, self._capture.optimizers, len(self._partition))

    def train(self, batch: Prepared, weights: PlacedBlocks, version: int, rows: TableRows) -> GradientResult:
        if self._follow(weights.partition):
            self._clipped = self._clippings()
            self._steps = self._compiled(self._steps.jit)
        logs, states, outputs, dense, gradients, pairs, state, usable, served = self._run(
            "train",
            batch.data,
            to_tensors(weights),
            _tensor_of(version),
            table_tensors(rows),
            batch.places,
        )
        return GradientResult(
            logs={name: to_number(value) for name, value in logs.items()},
            states=self._states(states, outputs),
            gradients=to_arrays(gradients),
            dense_variables=tuple(dense),
            rows={index: (array_of(ids), array_of(values)) for index, (ids, values) in pairs.items()}
            | {index: (batch.ids[index], array_of(values)) for index, values in served.items()},
            state=to_arrays(state),
            decays=self._averages.decays,
            overflow=explain_overflow(zip(self._scales, usable.numpy(), strict=True)),
        )

    def _model_step(self, batch: Any, rows: Any, positions: Any) -> tuple[Any, Any, dict[int, Any], Any]:
        """The model's own step: its logs, labels and predictions if metrics need them, gradients of the plain loss by
        variable, and by optimizer whether they are usable."""
        pairs = zip(self._model.weights, self._specs, strict=True)
        with (
            self._served.serving(rows, positions),
            self._averages.counted(),
            refused_assignments([variable for variable, spec in pairs if spec.trainable]),
            self._metrics.kept_outputs(Mode.TRAINING) as outputs,
        ):
            logs, updates = self._capture.train_step(batch)
        gradients, usable = unscaled(self._scales, updates)
        return logs, tuple(outputs), gradients, tf.stack(usable)

    def _train_step(self, batch: Any, blocks: Any, version: Any, rows: Any, positions: Any) -> Any:
        self._assign_blocks(blocks)
        for optimizer in self._capture.optimizers:
            updates_of(unwrapped(optimizer)).assign(version)
        self._metrics.reset()
        logs, outputs, found, usable = self._steps.model_step(batch, rows, positions)
        states = self._metric_states()
        check_updated(found, self._specs)
        dense, pairs, served = sort_gradients(found, self._specs, self._clipped, rows)
        gradients = self._pack(dense, True)
        state = self._pack(self._values(False), False)
        # Keys, because a function for another kind of batch may have other variables.
        return logs, states, outputs, dict.fromkeys(dense, ()), gradients, pairs, state, usable, served


def _tensor_of(number: int) -> tf.Tensor:
    """int64 [], created without an operation: `tf.constant` runs one, which takes 0.1 ms per step."""
    array = aligned((), np.int64)
    array[...] = number
    return tensor_of(array)
