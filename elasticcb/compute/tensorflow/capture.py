"""Captures the gradients that a model's `train_step` passes to its optimizers, while TensorFlow traces or runs it."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import keras
import tensorflow as tf

from elasticcb.compute.capture import OptimizerCapture, Update, unchanged
from elasticcb.compute.tensorflow.gradients import WORKER_BYTES, made_dense
from elasticcb.compute.tensorflow.late_reads import LateReads
from elasticcb.compute.tensorflow.loss_scale import plain_gradient
from elasticcb.errors import ModelFileError
from elasticcb.optimizers.traits import is_own_class
from elasticcb.optimizers.variables import StepVariables


class TensorFlowCapture(OptimizerCapture):
    """For the arguments, see `OptimizerCapture`."""

    def __init__(self, model: keras.Model, variables: Collection[int] | None = None, refuses: bool = True) -> None:
        super().__init__(model, LateReads(), variables, refuses)

    def _plain(self, optimizer: keras.optimizers.Optimizer, gradient: Any) -> Any:
        return plain_gradient(optimizer, gradient)

    def _applied(self, optimizer: keras.optimizers.Optimizer, gradient: Any, variable: Any) -> Any:
        if is_own_class(optimizer):  # which may update only the rows given
            return gradient
        return made_dense(gradient, variable.shape, variable.dtype, WORKER_BYTES)

    def _place(self) -> Any:
        return _graph()

    def _check_place(self, optimizer: int, place: Any) -> None:
        if place is not _graph():
            raise ModelFileError(
                f"The optimizer {self.named(optimizer)} is applied inside a tf.cond, a loop or a separate function "
                "(@tf.function, keras.ops.cond), where its gradients can't be captured. Call it directly in "
                "train_step: remove the decorator (the whole step is compiled anyway), and instead of a condition "
                "multiply the gradients by 0 or 1."
            )


def step_variables(model: keras.Model, batch: Any, refuses: bool = True) -> StepVariables:
    """Which variables `train_step` gives to optimizers.

    The step is traced, not run; code run by `run_eagerly` leaves the model unchanged.
    """
    capture = TensorFlowCapture(model, refuses=refuses)
    found: dict[int, Update] = {}

    def step(data: Any) -> None:
        found.clear()
        found.update(capture.train_step(data)[1])

    try:
        if model.run_eagerly:
            with unchanged(model.variables):
                step(batch)
        else:
            tf.function(step, autograph=False).get_concrete_function(batch)
    finally:
        capture.release()
    return StepVariables({index: update.optimizer for index, update in found.items()}, capture.given)


def _graph() -> Any:
    """The graph being traced; None if there is none."""
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
