"""The JAX backend."""

from __future__ import annotations

from collections.abc import Mapping
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
from elasticcb.compute.jax.steps import predict_step, test_step, train_step, values
from elasticcb.compute.jax.tables import problems_of
from elasticcb.compute.movable import Allowed, movable
from elasticcb.layers.table_layers import TableLayer, without_rows
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
            outputs, _ = model.predict_step(state, sized(model, arrays_of(batch)))
        return jax.tree.map(np.asarray, outputs)

    def find_tables(
        self, model: keras.Model, batch: Any, mode: Mode, allowed: Allowed, local: bool = False
    ) -> dict[int, TableSpec]:
        capture = StatelessCapture(model) if mode is Mode.TRAINING else None
        steps = {model.test_step: test_step(model), model.predict_step: predict_step(model)}

        def found(step: Any, data: Any, layers: Mapping[int, TableLayer]) -> dict[int, str]:
            return problems_of(model, steps.get(step, step), data, layers)

        step: Any = model.test_step if mode is Mode.EVALUATION else model.predict_step
        try:
            if capture is not None:
                step = train_step(model, capture)
            return movable(model, step, sized(model, arrays_of(batch)), allowed, found)
        finally:
            if capture is not None:
                capture.release()
