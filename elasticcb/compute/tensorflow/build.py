"""Builds what Keras builds lazily, with one real batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from elasticcb.compute.first_batch import check_batch, fixed_batch_size, told_with_batch
from elasticcb.compute.priming import kept, prime_training
from elasticcb.compute.tensorflow.capture import step_variables
from elasticcb.keras_private import layers_of
from elasticcb.model.model_file import building
from elasticcb.model.spec import Spec
from elasticcb.optimizers.variables import StepVariables
from elasticcb.settings import Mode


def build(spec: Spec, model: keras.Model, batch: Any, mode: Mode, local: bool = False) -> StepVariables | None:
    """See `Backend.build`."""
    check_batch(spec, model, batch, mode)
    batch = _of_fixed_size(model, batch)
    with told_with_batch(spec, batch, mode), building:
        if mode is Mode.TRAINING:
            return prime_training(model, batch, local, _run_unchanged, step_variables)
        _run_unchanged(model, model.test_step if mode is Mode.EVALUATION else model.predict_step, batch)
    return None


def _run_unchanged(model: keras.Model, step: Callable[[Any], Any], batch: Any) -> None:
    """Runs a step and restores the model, including changes by layers in `call` and the seeds that they use."""
    failed: Exception | None = None
    if not model.run_eagerly and not all(layer.built for layer in layers_of(model)):
        try:  # builds lazily created variables without running it
            tf.function(step, autograph=False).get_concrete_function(batch)
        except Exception as error:
            failed = error
    with kept(model):
        try:
            step(batch)
        except Exception:
            if failed is None:
                raise
            raise failed from None  # the other error may be about variables left half built by the first


def _of_fixed_size(model: keras.Model, batch: Any) -> Any:
    """The batch; its records are repeated if the model only accepts batches of one size."""
    size = fixed_batch_size(model)
    if size is None:
        return batch

    def repeated(tensor: Any) -> Any:
        return tf.gather(tensor, tf.range(size) % tf.shape(tensor)[0])

    return tf.nest.map_structure(repeated, batch)
