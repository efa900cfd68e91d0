"""Steps that run once on the first batch, to build what Keras builds lazily; for frameworks with mutable variables."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras

from elasticcb.keras_private import compute_loss, compute_output_spec, layers_of, takes_training
from elasticcb.optimizers.step_logs import is_overridden
from elasticcb.optimizers.variables import StepVariables


def make_variables(model: keras.Model, batch: Any) -> None:
    """Builds lazily created variables without running a step. Errors are ignored: they recur when it runs."""
    if not all(layer.built for layer in layers_of(model)):
        with contextlib.suppress(Exception):
            compute_output_spec(model, keras.utils.unpack_x_y_sample_weight(batch)[0])


def prime_training(
    model: keras.Model,
    batch: Any,
    run_unchanged: Callable[[keras.Model, Callable[[Any], Any], Any], None],
    step_variables: Callable[[keras.Model, Any], StepVariables],
) -> StepVariables | None:
    """Builds everything needed for training; returns the result of `Backend.build`."""
    if is_overridden(model, "train_step"):
        return step_variables(model, batch)
    run_unchanged(model, functools.partial(_forward, model), batch)
    return None


def _forward(model: keras.Model, data: Any) -> None:
    """Does everything that the stock `train_step` does to the model, without changing weights."""
    x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
    predicted = model(x, training=True) if takes_training(model) else model(x)
    compute_loss(model, x, y, predicted, weight)
    model.compute_metrics(x, y, predicted, sample_weight=weight)


@contextlib.contextmanager
def unchanged(variables: Sequence[keras.Variable]) -> Iterator[None]:
    """Restores the variables' values at the end."""
    before = [(variable, variable.numpy()) for variable in variables]
    try:
        yield
    finally:
        for variable, value in before:
            variable.assign(value)


def kept(model: keras.Model) -> contextlib.AbstractContextManager[None]:
    """Undoes lasting changes of a step in the context: those by layers in `call`, and the seeds that they use."""
    return unchanged([*model.non_trainable_variables, *_rnn_states(model)])


def _rnn_states(model: keras.Model) -> list[keras.Variable]:
    layers = [layer for layer in layers_of(model) if isinstance(layer, keras.layers.RNN) and layer.stateful]
    return [state for layer in layers for state in keras.tree.flatten(layer.states) if state is not None]
