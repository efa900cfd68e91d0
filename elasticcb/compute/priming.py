"""Steps that run once on the first batch, to build what Keras builds lazily; for frameworks with mutable variables."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import keras

from elasticcb.keras_private import compute_loss, compute_output_spec, layers_of, takes_training
from elasticcb.serialization.torch_buffers import buffers_of


def make_variables(model: keras.Model, batch: Any) -> None:
    """Builds lazily created variables without running a step. Errors are ignored: they recur when it runs."""
    if not all(layer.built for layer in layers_of(model)):
        with contextlib.suppress(Exception):
            compute_output_spec(model, keras.utils.unpack_x_y_sample_weight(batch)[0])


def forward(model: keras.Model, data: Any) -> None:
    """Does everything that the stock `train_step` does to the model, without changing weights."""
    x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
    predicted = model(x, training=True) if takes_training(model) else model(x)
    compute_loss(model, x, y, predicted, weight)
    model.compute_metrics(x, y, predicted, sample_weight=weight)


@contextlib.contextmanager
def unchanged(variables: Sequence[Any]) -> Iterator[None]:
    """Restores the variables' values at the end."""
    before = [(variable, variable.numpy()) for variable in variables]
    try:
        yield
    finally:
        for variable, value in before:
            variable.assign(value)


@contextlib.contextmanager
def kept(model: keras.Model) -> Iterator[None]:
    """Undoes lasting changes of a step in the context: those by layers in `call`, and the seeds that they use. The
    states of an RNN that the step has built are zero, as `build` leaves them."""
    before = [layer for layer in _stateful(model) if layer.states is not None]
    states = [state for layer in before for state in keras.tree.flatten(layer.states)]
    with unchanged([*model.non_trainable_variables, *states, *buffers_of(layers_of(model))]):
        yield
    for layer in _stateful(model):
        if not any(layer is each for each in before):
            layer.reset_state()


def _stateful(model: keras.Model) -> list[keras.layers.RNN]:
    return [layer for layer in layers_of(model) if isinstance(layer, keras.layers.RNN) and layer.stateful]
