"""Steps that run once on the first batch, to build what Keras builds lazily; for frameworks with mutable variables."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import keras

from elasticcb.compute.capture import unchanged
from elasticcb.keras_private import layers_of
from elasticcb.optimizers.step_logs import is_overridden
from elasticcb.optimizers.traits import model_optimizers


def prime_training(
    model: keras.Model,
    batch: Any,
    local: bool,
    run_unchanged: Callable[[keras.Model, Callable[[Any], Any], Any], None],
    updated_variables: Callable[[keras.Model, Any, bool], dict[int, int]],
) -> dict[int, int] | None:
    """Builds everything needed for training and evaluation; returns the result of `Backend.build`.

    Args:
        run_unchanged: runs a step of a model on a batch, inside `kept`.
        updated_variables: called with a model, a batch, and whether to refuse steps that can't be done by gradients on
            servers; returns the optimizer to which `train_step` gives the gradient of a variable, by index in
            `model.weights`.
    """
    own_step = is_overridden(model, "train_step")
    if not own_step:
        # Does everything that the stock train_step does to the model, without changing weights.
        run_unchanged(model, functools.partial(keras.Model.test_step, model), batch)
    updated = updated_variables(model, batch, not local) if own_step or len(model_optimizers(model)) > 1 else None
    if own_step or is_overridden(model, "test_step"):
        # Evaluation passes need its metrics. A model without an evaluation step may still be trained, as in `fit`.
        with contextlib.suppress(Exception):
            run_unchanged(model, model.test_step, batch)
    return updated


def kept(model: keras.Model) -> contextlib.AbstractContextManager[None]:
    """Undoes lasting changes of a step in the context: those by layers in `call`, and the seeds that they use."""
    return unchanged([*model.non_trainable_variables, *_rnn_states(model)])


def _rnn_states(model: keras.Model) -> list[keras.Variable]:
    layers = [layer for layer in layers_of(model) if isinstance(layer, keras.layers.RNN) and layer.stateful]
    return [state for layer in layers for state in keras.tree.flatten(layer.states) if state is not None]
