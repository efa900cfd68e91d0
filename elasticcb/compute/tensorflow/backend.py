"""The TensorFlow backend."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import keras
import tensorflow as tf

from elasticcb.compute.backend import Backend
from elasticcb.compute.first_batch import check_batch, fixed_batch_size, told_with_batch
from elasticcb.compute.movable import Allowed, Step, movable
from elasticcb.compute.priming import kept, make_variables, prime_training
from elasticcb.compute.tensorflow.capture import TensorFlowCapture, step_variables
from elasticcb.compute.tensorflow.computation import TensorFlowComputation
from elasticcb.compute.tensorflow.id_graph import Recording, id_function
from elasticcb.keras_private import layers_of
from elasticcb.layers.table_layers import TableLayer, answered
from elasticcb.model.model_file import building
from elasticcb.model.spec import Spec
from elasticcb.optimizers.variables import StepVariables
from elasticcb.settings import Mode
from elasticcb.sharding.table_spec import TableSpec
from elasticcb.tf.batch_signatures import specs_of


def build(spec: Spec, model: keras.Model, batch: Any, mode: Mode) -> StepVariables | None:
    """See `Backend.build`."""
    check_batch(spec, model, batch, mode)
    batch = _of_fixed_size(model, batch)
    with told_with_batch(spec, batch, mode), building:
        if model.run_eagerly:  # else the step is traced first
            make_variables(model, batch)
        if mode is Mode.TRAINING:
            return prime_training(model, batch, _run_unchanged, step_variables)
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


def problems_of(model: keras.Model, step: Step, batch: Any, layers: Mapping[int, TableLayer]) -> dict[int, str]:
    """Why rows can't be determined before a step of `batch`, which is traced, by variable; see `FindProblems`."""
    recording: Recording

    def recorded(batch: Any) -> Recording:
        nonlocal recording
        recording = Recording(layers)
        step(batch)
        return recording

    with answered(layers, lambda index, ids: recording.lookup(index, ids)):
        id_function(model, recorded, specs_of(batch, [True] * len(tf.nest.flatten(batch))))
    return recording.problems()


class TensorFlowBackend(Backend):
    """Keras on TensorFlow."""

    build = staticmethod(build)
    computation = TensorFlowComputation

    def outputs(self, model: keras.Model, batch: Any) -> Any:
        return model.predict_step(batch)

    def find_tables(
        self,
        model: keras.Model,
        batch: Any,
        mode: Mode,
        allowed: Allowed,
        validation: Callable[[], Any] | None = None,
    ) -> dict[int, TableSpec]:
        problems = functools.partial(problems_of, model)
        if mode is not Mode.TRAINING:
            step = model.test_step if mode is Mode.EVALUATION else model.predict_step
            return movable(model, step, batch, allowed, problems)
        capture = TensorFlowCapture(model)
        try:
            passes = None if validation is None else (lambda: (model.test_step, validation()))
            return movable(model, capture.train_step, batch, allowed, problems, passes)
        finally:
            capture.release()
