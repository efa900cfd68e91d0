"""Steps that run once, on the first batch, for what Keras builds in them; of frameworks that change variables."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import keras

from elasticcb.compute.capture import unchanged
from elasticcb.optimizers.step_logs import is_overridden
from elasticcb.optimizers.traits import model_optimizers


def prime_training(
    model: keras.Model,
    batch: Any,
    local: bool,
    run_unchanged: Callable[[keras.Model, Callable[[Any], Any], Any], None],
    updated_variables: Callable[[keras.Model, Any, bool], dict[int, int]],
) -> dict[int, int] | None:
    """Builds what training and evaluation need; gives what `Backend.build` does.

    Args:
        run_unchanged: runs a step of a model on a batch, within `kept`.
        updated_variables: by index in `model.weights`, the optimizer to which `train_step` gives the gradient; whether
            steps are refused that servers can't do by gradients.
    """
    own_step = is_overridden(model, "train_step")
    if not own_step:
        # Does all that the stock train_step does to the model, and changes no weights.
        run_unchanged(model, functools.partial(keras.Model.test_step, model), batch)
    updated = updated_variables(model, batch, not local) if own_step or len(model_optimizers(model)) > 1 else None
    if own_step or is_overridden(model, "test_step"):
        # Evaluation rounds need its metrics. A model that can't do it may train: `fit` asks for it as late as that.
        with contextlib.suppress(Exception):
            run_unchanged(model, model.test_step, batch)
    return updated


def kept(model: keras.Model) -> contextlib.AbstractContextManager[None]:
    """A step of it in the context changes nothing that lasts: what layers change in `call`, and the seeds they draw
    from."""
    return unchanged([*model.non_trainable_variables, *_rnn_states(model)])


def _rnn_states(model: keras.Model) -> list[keras.Variable]:
    layers = [layer for layer in model._flatten_layers() if isinstance(layer, keras.layers.RNN) and layer.stateful]
    return [state for layer in layers for state in keras.tree.flatten(layer.states) if state is not None]
