"""The steps of a model in Keras's stateless form: inputs, outputs, and the gradients that they pass to optimizers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax
import keras

from elasticcb.compute.capture import count_step
from elasticcb.errors import ModelFileError
from elasticcb.keras_private import layers_of
from elasticcb.optimizers.step_logs import is_overridden
from elasticcb.optimizers.traits import model_optimizers
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


class StatelessCapture:
    """Makes the optimizer of a model store gradients that its `stateless_apply` is given.

    Args:
        tables: indices in `model.weights` of variables whose gradients are stored, embedding tables; the optimizer
            applies the others as usual. None: gradients of all variables are stored, and nothing is applied.
    """

    def __init__(self, model: keras.Model, tables: Collection[int] | None = None) -> None:
        self._model = model
        self.optimizer = one_optimizer(model)
        indices = {id(variable): index for index, variable in enumerate(model.weights)}
        self._indices = [indices[id(variable)] for variable in model.trainable_variables]
        self._kept = set(self._indices) if tables is None else set(tables)
        self._applies = tables is not None
        self._given: dict[int, Any] | None = None
        if self._kept:
            # Bypasses Keras's __setattr__, which tracks values.
            object.__setattr__(self.optimizer, "stateless_apply", self._stateless_apply)

    def begin(self) -> None:
        """A step is traced from now on."""
        self._given = None

    def gradients(self) -> dict[int, Any]:
        """The step's gradients, by index in `model.weights`. Raises `ModelFileError` when there are none."""
        if not self._kept:
            return {}
        if self._given is None:
            raise ModelFileError(
                "The model's train_step gave the optimizer no gradients. On JAX, pass them to "
                "`self.optimizer.stateless_apply(optimizer_variables, gradients, trainable_variables)`."
            )
        given, self._given = self._given, None
        return given

    def release(self) -> None:
        """Restores the optimizer's own method."""
        vars(self.optimizer).pop("stateless_apply", None)

    def _stateless_apply(
        self, optimizer_variables: Sequence[Any], grads: Sequence[Any], trainable_variables: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        name = self.optimizer.name
        if self._given is not None and self._applies:
            raise ModelFileError(
                f"The model's train_step gives the optimizer {name!r} gradients twice. Servers hold rows of the "
                "model's embedding tables and apply their gradients after the step, so they can be updated only once "
                "per step. Add up the gradients and apply them once, or use keras.layers.Embedding."
            )
        if len(grads) != len(self._indices):
            raise ModelFileError(
                f"The optimizer {name!r} got {len(grads)} gradients for the {len(self._indices)} trainable variables "
                "of the model; there must be one for each, in their order."
            )
        self._given = {
            index: gradient
            for index, gradient in zip(self._indices, grads, strict=True)
            if index in self._kept and gradient is not None
        }
        if not self._applies:
            return list(trainable_variables), list(optimizer_variables)
        others = [place for place, index in enumerate(self._indices) if index not in self._kept]
        if not others:
            with keras.StatelessScope(list(zip(self.optimizer.variables, optimizer_variables, strict=True))) as scope:
                count_step(self.optimizer)
                after = [scope.get_current_value(variable) for variable in self.optimizer.variables]
            return list(trainable_variables), after
        return self._apply(others, optimizer_variables, grads, trainable_variables)

    def _apply(
        self, places: Sequence[int], state: Sequence[Any], grads: Sequence[Any], values: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        """Like Keras's own, for the trainable variables at these positions."""
        optimizer, variables = self.optimizer, self._model.trainable_variables
        mapping = [(variables[place], values[place]) for place in places]
        with keras.StatelessScope([*mapping, *zip(optimizer.variables, state, strict=True)]) as scope:
            optimizer.apply([grads[place] for place in places], [variables[place] for place in places])
            after = list(values)
            for place in places:
                after[place] = scope.get_current_value(variables[place])
            return after, [scope.get_current_value(variable) for variable in optimizer.variables]


def one_optimizer(model: keras.Model) -> keras.optimizers.Optimizer:
    """The model's optimizer. Raises `ModelFileError` when it has several."""
    if not is_overridden(model, "train_step"):
        return model.optimizer
    inner = [layer for layer in layers_of(model)[1:] if isinstance(layer, keras.Model)]
    parts = [getattr(layer, "optimizer", None) for layer in inner]  # None: it was never compiled
    found = [each for each in model_optimizers(model) if all(each is not part for part in parts)]
    if len(found) != 1:
        names = ", ".join(repr(optimizer.name) for optimizer in found) or "none"
        raise ModelFileError(
            f"The model has {len(found)} optimizers ({names}). On JAX a step gets the state of one, that of "
            "`compile(optimizer=...)`: use one (keras.optimizers.MultiOptimizer has several inside), or "
            "KERAS_BACKEND=tensorflow."
        )
    return found[0]
