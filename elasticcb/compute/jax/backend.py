"""The JAX backend."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import keras
import numpy as np

from elasticcb.compute.backend import Backend
from elasticcb.compute.dense_batches import arrays_of, repeated
from elasticcb.compute.first_batch import check_batch, fixed_batch_size, told_with_batch
from elasticcb.compute.jax.capture import StatelessCapture, one_optimizer
from elasticcb.compute.jax.computation import JAXComputation
from elasticcb.compute.jax.explain import explain
from elasticcb.compute.jax.lookups import problems_of
from elasticcb.compute.jax.steps import predict_step, step_of, test_step, train_step, values
from elasticcb.compute.movable import Allowed, movable
from elasticcb.keras_private import build_symbolically, layers_of
from elasticcb.layers.table_layers import without_rows
from elasticcb.model.model_file import building
from elasticcb.model.spec import Spec
from elasticcb.optimizers.step_logs import is_overridden
from elasticcb.optimizers.variables import StepVariables
from elasticcb.settings import Mode
from elasticcb.sharding.table_spec import TableSpec
from elasticcb.tf.devices import leave_gpus


def build(spec: Spec, model: keras.Model, batch: Any, mode: Mode) -> StepVariables | None:
    """See `Backend.build`."""
    check_batch(spec, model, batch, mode)
    with told_with_batch(spec, batch, mode, explain), building, without_rows(model):
        data = sized(model, arrays_of(batch))
        if mode is Mode.PREDICTION:
            _build_layers(model, data)
            predict_step(model).trace(data)
            return None
        _build_all(model, data)
        if mode is Mode.EVALUATION:
            test_step(model).trace(data)
            return None
        _build_scale(model)
        _trace_training(model, data)
        if not is_overridden(model, "train_step"):
            return None
        own = {index: 0 for index, variable in enumerate(model.weights) if variable.trainable}
        return StepVariables(own, own)


def sized(model: keras.Model, data: Any) -> Any:
    """The arrays of a batch, in the size that the model accepts."""
    size = fixed_batch_size(model)
    return data if size is None else repeated(data, size)


def _build_scale(model: keras.Model) -> None:
    """Builds an optimizer that scales the loss: its scale is a variable."""
    optimizer = one_optimizer(model)
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer) and not optimizer.built:
        optimizer.build(model.trainable_variables)


def _trace_training(model: keras.Model, data: Any) -> None:
    capture = StatelessCapture(model)
    try:
        train_step(model, capture).trace(data)
    finally:
        capture.release()


def _build_layers(model: keras.Model, data: Any) -> None:
    if not all(layer.built for layer in layers_of(model)):
        features = keras.utils.unpack_x_y_sample_weight(data)[0]
        with keras.StatelessScope():
            model(features)


def _build_all(model: keras.Model, data: Any) -> None:
    """Builds layers, loss and metrics, like `fit`, but not the optimizer, whose slots are as large as the model."""
    with _left_out(getattr(model, "optimizer", None)):
        build_symbolically(model, data)


@contextlib.contextmanager
def _left_out(optimizer: Any) -> Iterator[None]:
    if optimizer is None or optimizer.built:
        yield
        return
    optimizer.built = True
    try:
        yield
    finally:
        optimizer.built = False


class JAXBackend(Backend):
    """Keras on JAX."""

    build = staticmethod(build)
    computation = JAXComputation

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
