"""Builds what Keras builds lazily, with one real batch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import keras
import torch

from elasticcb.compute.dense_batches import arrays_of, repeated
from elasticcb.compute.first_batch import check_batch, fixed_batch_size, told_with_batch
from elasticcb.compute.priming import kept, prime_training
from elasticcb.compute.torch.arrays import tensors_of
from elasticcb.compute.torch.capture import step_variables
from elasticcb.keras_private import compute_output_spec, layers_of
from elasticcb.model.model_file import building
from elasticcb.model.spec import Spec
from elasticcb.optimizers.variables import StepVariables
from elasticcb.settings import Mode


def build(spec: Spec, model: keras.Model, batch: Any, mode: Mode, local: bool = False) -> StepVariables | None:
    """See `Backend.build`."""
    check_batch(spec, model, batch, mode)
    with told_with_batch(spec, batch, mode), building:
        _make_variables(model, tensors_of(batch))
        size = fixed_batch_size(model)
        tensors = tensors_of(batch if size is None else repeated(arrays_of(batch), size))
        if mode is Mode.TRAINING:
            return prime_training(model, tensors, local, _run_unchanged, step_variables)
        _run_unchanged(model, model.test_step if mode is Mode.EVALUATION else model.predict_step, tensors)
    return None


def _make_variables(model: keras.Model, batch: Any) -> None:
    """Builds lazily created variables without running the step. Errors are ignored: they recur when it runs."""
    if not all(layer.built for layer in layers_of(model)):
        with contextlib.suppress(Exception):
            compute_output_spec(model, keras.utils.unpack_x_y_sample_weight(batch)[0])


def _run_unchanged(model: keras.Model, step: Callable[[Any], Any], batch: Any) -> None:
    """Runs a step and restores the model, including changes by layers in `call` and the seeds that they use."""
    model.eval()
    with kept(model), torch.no_grad():
        step(batch)
