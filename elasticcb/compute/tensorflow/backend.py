"""The TensorFlow backend."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras

from elasticcb.compute.backend import Backend
from elasticcb.compute.movable import Allowed, movable
from elasticcb.compute.tensorflow.build import build
from elasticcb.compute.tensorflow.capture import TensorFlowCapture
from elasticcb.compute.tensorflow.gradient_computation import TensorFlowGradients
from elasticcb.compute.tensorflow.local_computation import TensorFlowLocal
from elasticcb.compute.tensorflow.placed import TensorFlowPlaced
from elasticcb.compute.tensorflow.table_uses import problems_of
from elasticcb.settings import Mode
from elasticcb.sharding.table_spec import TableSpec


class TensorFlowBackend(Backend):
    """Keras on TensorFlow."""

    build = staticmethod(build)
    computation = TensorFlowGradients
    local_computation = TensorFlowLocal
    placed = TensorFlowPlaced

    def outputs(self, model: keras.Model, batch: Any) -> Any:
        return model.predict_step(batch)

    def find_tables(
        self,
        model: keras.Model,
        batch: Any,
        mode: Mode,
        allowed: Allowed,
        local: bool = False,
        validation: Callable[[], Any] | None = None,
    ) -> dict[int, TableSpec]:
        problems = functools.partial(problems_of, model)
        if mode is not Mode.TRAINING:
            step = model.test_step if mode is Mode.EVALUATION else model.predict_step
            return movable(model, step, batch, allowed, problems)
        capture = TensorFlowCapture(model, refuses=not local)
        try:
            passes = None if validation is None else (lambda: (model.test_step, validation()))
            return movable(model, capture.train_step, batch, allowed, problems, passes)
        finally:
            capture.release()
