"""The JAX backend."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import keras
import numpy as np

from elasticcb.compute.backend import Backend
from elasticcb.compute.dense_batches import arrays_of
from elasticcb.compute.jax.build import build, sized
from elasticcb.compute.jax.capture import StatelessCapture
from elasticcb.compute.jax.gradient_computation import JAXGradients
from elasticcb.compute.jax.local_computation import JAXLocal
from elasticcb.compute.jax.steps import step_of, test_step, values
from elasticcb.compute.jax.tables import problems_of
from elasticcb.compute.movable import Allowed, movable
from elasticcb.layers.table_layers import without_rows
from elasticcb.settings import Mode
from elasticcb.sharding.table_spec import TableSpec
from elasticcb.tf.devices import leave_gpus


class JAXBackend(Backend):
    """Keras on JAX."""

    build = staticmethod(build)
    computation = JAXGradients
    local_computation = JAXLocal

    not_placed = (
        "Cluster.place needs Keras on TensorFlow or PyTorch, whose optimizers can be called from any code; on JAX a "
        "step is a pure function of its state. Use Cluster.fit, whose workers run the model's train_step."
    )

    def __init__(self) -> None:
        leave_gpus()

    def outputs(self, model: keras.Model, batch: Any) -> Any:
        state = values(model.trainable_variables, model.non_trainable_variables)
        with without_rows(model):
            outputs, _ = model.predict_step(state, self.data(model, batch))
        return jax.tree.map(np.asarray, outputs)

    def data(self, model: keras.Model, batch: Any) -> Any:
        return sized(model, arrays_of(batch))

    def find_tables(
        self,
        model: keras.Model,
        batch: Any,
        mode: Mode,
        allowed: Allowed,
        local: bool = False,
        validation: Callable[[], Any] | None = None,
    ) -> dict[int, TableSpec]:
        capture = StatelessCapture(model) if mode is Mode.TRAINING else None
        step: Any = step_of(model, mode, capture)
        found: Any = functools.partial(problems_of, model)
        passes: Any = None
        if validation is not None:
            passes = lambda: (test_step(model), sized(model, arrays_of(validation())))  # noqa: E731
        try:
            return movable(model, step, sized(model, arrays_of(batch)), allowed, found, passes)
        finally:
            if capture is not None:
                capture.release()
