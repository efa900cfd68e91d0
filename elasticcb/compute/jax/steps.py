"""The steps of a model in Keras's stateless form: their inputs and outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import keras

from elasticcb.compute.jax.capture import StatelessCapture
from elasticcb.settings import Mode

Groups = tuple[Sequence[keras.Variable], ...]


class StatelessStep(NamedTuple):
    """A step of some mode.

    Attributes:
        run: a function of its variables' values, by group, and a batch; returns the step's results.
    """

    run: Callable[[Any, Any], Any]
    variables: Callable[[], Groups]

    def trace(self, data: Any) -> Any:
        """The shapes of its results for a batch."""
        with keras.StatelessScope():  # variables created in the step get their values after it, not traced ones
            return jax.eval_shape(self.run, values(*self.variables()), data)


def test_step(model: keras.Model) -> StatelessStep:
    return StatelessStep(
        lambda state, data: model.test_step(state, data)[0],
        lambda: (model.trainable_variables, model.non_trainable_variables, model.metrics_variables),
    )


def predict_step(model: keras.Model) -> StatelessStep:
    return StatelessStep(
        lambda state, data: model.predict_step(state, data)[0],
        lambda: (model.trainable_variables, model.non_trainable_variables),
    )


def train_step(model: keras.Model, capture: StatelessCapture) -> StatelessStep:
    """Returns logs and the gradients that `capture` stores."""

    def run(state: Any, data: Any) -> Any:
        capture.begin()
        logs, _ = model.train_step(state, data)
        return logs, capture.gradients()

    def variables() -> Groups:
        optimizer = capture.optimizer.variables
        return model.trainable_variables, model.non_trainable_variables, optimizer, model.metrics_variables

    return StatelessStep(run, variables)


def step_of(model: keras.Model, mode: Mode, capture: StatelessCapture | None) -> StatelessStep:
    if mode is Mode.TRAINING and capture is not None:
        return train_step(model, capture)
    return test_step(model) if mode is Mode.EVALUATION else predict_step(model)


def values(*groups: Sequence[keras.Variable]) -> tuple[list[Any], ...]:
    """The values of variables, by group."""
    return tuple([variable.value for variable in group] for group in groups)
