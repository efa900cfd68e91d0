"""The TensorFlow backend."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras

from elasticcb.compute.backend import (
    Backend,
    Exchange,
    GradientComputation,
    HeldModel,
    LocalComputation,
    PlacedComputation,
)
from elasticcb.compute.movable import movable
from elasticcb.compute.tensorflow.build import build
from elasticcb.compute.tensorflow.capture import TensorFlowCapture
from elasticcb.compute.tensorflow.gradient_computation import TensorFlowGradients
from elasticcb.compute.tensorflow.local_computation import TensorFlowLocal
from elasticcb.compute.tensorflow.placed import TensorFlowPlaced
from elasticcb.compute.tensorflow.table_uses import problems_of
from elasticcb.model.spec import Spec
from elasticcb.settings import Mode
from elasticcb.sharding.partition import VariableSpec
from elasticcb.sharding.table_spec import TableSpec


class TensorFlowBackend(Backend):
    """Keras on TensorFlow."""

    def build(
        self, spec: Spec, model: keras.Model, batch: Any, mode: Mode, local: bool = False
    ) -> dict[int, int] | None:
        return build(spec, model, batch, mode, local)

    def outputs(self, model: keras.Model, batch: Any) -> Any:
        return model.predict_step(batch)

    def find_tables(
        self,
        model: keras.Model,
        batch: Any,
        mode: Mode,
        threshold_bytes: int,
        allowed: Callable[[int], bool],
        local: bool = False,
    ) -> dict[int, TableSpec]:
        problems = functools.partial(problems_of, model)
        if mode is not Mode.TRAINING:
            step = model.test_step if mode is Mode.EVALUATION else model.predict_step
            return movable(model, step, batch, threshold_bytes, allowed, problems)
        capture = TensorFlowCapture(model, refuses=not local)
        try:
            return movable(model, capture.train_step, batch, threshold_bytes, allowed, problems)
        finally:
            capture.release()

    def computation(self, held: HeldModel) -> GradientComputation:
        return TensorFlowGradients(held)

    def local_computation(self, held: HeldModel) -> LocalComputation:
        return TensorFlowLocal(held)

    def placed(
        self, model: keras.Model, specs: Sequence[VariableSpec], num_ps: int, exchange: Exchange
    ) -> PlacedComputation:
        return TensorFlowPlaced(model, specs, num_ps, exchange)
