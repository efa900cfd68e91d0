"""JAX as a backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import keras
import numpy as np

from elasticcb.compute.backend import (
    Backend,
    Exchange,
    GradientComputation,
    HeldModel,
    LocalComputation,
    PlacedComputation,
)
from elasticcb.compute.dense_batches import arrays_of
from elasticcb.compute.jax.build import build, sized, values
from elasticcb.compute.jax.gradient_computation import JAXGradients
from elasticcb.compute.jax.local_computation import JAXLocal
from elasticcb.errors import UsageError
from elasticcb.model.spec import Spec
from elasticcb.settings import Mode
from elasticcb.sharding.partition import VariableSpec
from elasticcb.sharding.table_spec import TableSpec
from elasticcb.tf.devices import leave_gpus


class JAXBackend(Backend):
    """Keras on JAX."""

    def __init__(self) -> None:
        leave_gpus()

    def build(
        self, spec: Spec, model: keras.Model, batch: Any, mode: Mode, local: bool = False
    ) -> dict[int, int] | None:
        return build(spec, model, batch, mode, local)

    def outputs(self, model: keras.Model, batch: Any) -> Any:
        state = values(model.trainable_variables, model.non_trainable_variables)
        outputs, _ = model.predict_step(state, sized(model, arrays_of(batch)))
        return jax.tree.map(np.asarray, outputs)

    def find_tables(
        self,
        model: keras.Model,
        batch: Any,
        mode: Mode,
        threshold_bytes: int,
        allowed: Callable[[int], bool],
        local: bool = False,
    ) -> dict[int, TableSpec]:
        return {}

    def computation(self, held: HeldModel) -> GradientComputation:
        return JAXGradients(held)

    def local_computation(self, held: HeldModel) -> LocalComputation:
        return JAXLocal(held)

    def placed(
        self, model: keras.Model, specs: Sequence[VariableSpec], num_ps: int, exchange: Exchange
    ) -> PlacedComputation:
        raise UsageError(
            "Cluster.place needs Keras on TensorFlow, whose optimizers can be called from any code; on JAX a step is a "
            "pure function of its state. Use Cluster.fit, whose workers run the model's train_step, or "
            "KERAS_BACKEND=tensorflow."
        )
