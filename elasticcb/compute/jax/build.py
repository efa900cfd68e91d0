"""Builds what Keras builds lazily, by tracing one real batch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras

from elasticcb.compute.dense_batches import arrays_of, repeated
from elasticcb.compute.first_batch import check_batch, fixed_batch_size, told_with_batch
from elasticcb.compute.jax.capture import StatelessCapture, one_optimizer
from elasticcb.compute.jax.explain import explain
from elasticcb.compute.jax.steps import predict_step, test_step, train_step
from elasticcb.errors import ModelFileError
from elasticcb.keras_private import build_symbolically, layers_of
from elasticcb.layers.table_layers import without_rows
from elasticcb.model.model_file import building
from elasticcb.model.spec import Spec
from elasticcb.optimizers.step_logs import is_overridden
from elasticcb.optimizers.variables import StepVariables
from elasticcb.settings import Mode


def build(spec: Spec, model: keras.Model, batch: Any, mode: Mode, local: bool = False) -> StepVariables | None:
    """See `Backend.build`."""
    check_batch(spec, model, batch, mode)
    with told_with_batch(spec, batch, mode, explain), building, without_rows(model):
        data = sized(model, arrays_of(batch))
        if mode is Mode.PREDICTION:
            _build_layers(model, data)
            predict_step(model).trace(data)
            return None
        if mode is Mode.TRAINING:
            _check_optimizer(model, local)
        _build_all(model, data)
        if mode is Mode.EVALUATION:
            test_step(model).trace(data)
            return None
        _trace_training(model, data)
        if not is_overridden(model, "train_step"):
            return None
        own = {index: 0 for index, variable in enumerate(model.weights) if variable.trainable}
        return StepVariables(own, own)


def sized(model: keras.Model, data: Any) -> Any:
    """The arrays of a batch, in the size that the model accepts."""
    size = fixed_batch_size(model)
    return data if size is None else repeated(data, size)


def _check_optimizer(model: keras.Model, local: bool) -> None:
    optimizer = one_optimizer(model)
    if not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return
    if not local:
        raise ModelFileError(
            f"The optimizer {optimizer.name!r} scales the loss, as with mixed_float16. On JAX this needs "
            "--updates=local. Or use mixed_bfloat16, which needs no loss scaling."
        )
    if not optimizer.built:  # its scale is a variable
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
