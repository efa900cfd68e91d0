"""Builds what Keras builds lazily, with one real batch."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from elasticcb.compute.capture import unchanged
from elasticcb.compute.first_batch import check_batch, fixed_batch_size, told_with_batch
from elasticcb.compute.tensorflow.capture import updated_variables
from elasticcb.model.model_file import building
from elasticcb.model.spec import Spec
from elasticcb.optimizers.step_logs import is_overridden
from elasticcb.optimizers.traits import model_optimizers
from elasticcb.settings import Mode


def build(spec: Spec, model: keras.Model, batch: Any, mode: Mode, local: bool) -> dict[int, int] | None:
    """Builds what Keras builds lazily (weights of a subclass model, metrics), with one real batch.

    Metrics then hold that batch: reset them.

    Args:
        model: of `spec`, compiled unless `mode` is `PREDICTION`.
        batch: what the step takes: `(features, labels[, sample_weight])`, or `(features,)` for `PREDICTION`.
        local: in training, workers apply gradients themselves.

    Returns:
        In training, for a model whose step is its own or that has several optimizers: the index of the optimizer that
        updates a variable, by index in `model.weights`.

    Raises:
        ModelFileError: `feed` gives something else, or the model, its loss or its metrics can't take it.
    """
    check_batch(spec, model, batch, mode)
    batch = _of_fixed_size(model, batch)
    with told_with_batch(spec, batch, mode), building:
        if mode is Mode.TRAINING:
            return _prime_training(model, batch, local)
        _run_unchanged(model, model.test_step if mode is Mode.EVALUATION else model.predict_step, batch)
    return None


def _prime_training(model: keras.Model, batch: Any, local: bool) -> dict[int, int] | None:
    own_step = is_overridden(model, "train_step")
    if not own_step:
        # Does all that the stock train_step does to the model, and changes no weights.
        _run_unchanged(model, functools.partial(keras.Model.test_step, model), batch)
    updated = updated_variables(model, batch, not local) if own_step or len(model_optimizers(model)) > 1 else None
    if own_step or is_overridden(model, "test_step"):
        # Evaluation rounds need its metrics. A model that can't do it may train: `fit` asks for it as late as that.
        with contextlib.suppress(Exception):
            _run_unchanged(model, model.test_step, batch)
    return updated


def _run_unchanged(model: keras.Model, step: Callable[[Any], Any], batch: Any) -> None:
    """Runs a step and leaves the model as it is, also what layers change in `call` and the seeds they draw from."""
    failed: Exception | None = None
    if not model.run_eagerly and not all(layer.built for layer in model._flatten_layers()):
        try:  # makes what is built late, without running it
            tf.function(step, autograph=False).get_concrete_function(batch)
        except Exception as error:
            failed = error
    with unchanged([*model.non_trainable_variables, *_rnn_states(model)]):
        try:
            step(batch)
        except Exception:
            if failed is None:
                raise
            raise failed from None  # the other one may be about variables that the first one left half made


def _of_fixed_size(model: keras.Model, batch: Any) -> Any:
    """The batch; its records repeated where the model takes batches of one size only."""
    size = fixed_batch_size(model)
    if size is None:
        return batch

    def repeated(tensor: Any) -> Any:
        return tf.gather(tensor, tf.range(size) % tf.shape(tensor)[0])

    return tf.nest.map_structure(repeated, batch)


def _rnn_states(model: keras.Model) -> list[keras.Variable]:
    layers = [layer for layer in model._flatten_layers() if isinstance(layer, keras.layers.RNN) and layer.stateful]
    return [state for layer in layers for state in keras.tree.flatten(layer.states) if state is not None]
