"""Captures the gradients of some variables that a model's `train_step` passes to its optimizers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import Any

import keras

from elasticcb.errors import ModelFileError
from elasticcb.keras_private import product_of, updates_of, value_of
from elasticcb.optimizers.step_logs import flat_logs
from elasticcb.optimizers.traits import MultiOptimizer, model_optimizers, unwrapped
from elasticcb.optimizers.variables import StepVariables, chosen_optimizer


class OptimizerCapture(ABC):
    """Makes the optimizers of a model store gradients of some variables instead of applying them.

    Args:
        tables: indices in `model.weights` of these variables, embedding tables; the optimizers apply the others as
            usual. None: gradients of all variables are stored, and nothing is applied.

    Attributes:
        optimizers: optimizers of the model, as indexed by `StepVariables`.
        variables: what the last step gave to optimizers.
    """

    def __init__(self, model: keras.Model, tables: Collection[int] | None = None) -> None:
        self._model, self._tables = model, tables
        self.optimizers = model_optimizers(model)
        self.variables = StepVariables({}, {})
        self._given: list[tuple[int, Any, Any, Any]] = []  # (optimizer, gradient, variable, place)
        if tables is None or tables:
            for index in range(len(self.optimizers)):
                self._replace_apply(index)

    @abstractmethod
    def _plain(self, optimizer: keras.optimizers.Optimizer, gradient: Any) -> Any:
        """Converts a gradient of the loss scaled by `optimizer` to one of the plain loss."""

    def _applied(self, optimizer: keras.optimizers.Optimizer, gradient: Any, variable: Any) -> Any:
        """Converts a gradient that `optimizer` applies here to the form in which it is applied."""
        return gradient

    def _place(self) -> Any:
        """The place where gradients are currently given, for `_check_place`."""
        return None

    def _check_place(self, optimizer: int, place: Any) -> None:  # noqa: B027 most frameworks need no check
        """Raises `ModelFileError` when gradients given there can't be captured."""

    def _replace_apply(self, index: int) -> None:
        optimizer = self.optimizers[index]

        def apply(grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
            if trainable_variables is None:
                trainable_variables = getattr(optimizer, "_trainable_variables", None) or self._model.trainable_weights
            if len(grads) != len(trainable_variables):
                raise ModelFileError(
                    f"The optimizer {optimizer.name!r} got {len(grads)} gradients for {len(trainable_variables)} "
                    "variables; there must be one for each, or None."
                )
            place = self._place()
            pairs = list(zip(grads, trainable_variables, strict=True))
            if self._tables is not None:
                pairs = self._apply_others(optimizer, self._tables, pairs)
            self._given += [(index, gradient, variable, place) for gradient, variable in pairs]

        # Keras's own `apply_gradients` calls it. Bypasses Keras's __setattr__, which tracks values.
        object.__setattr__(optimizer, "apply", apply)

    def _apply_others(
        self, optimizer: Any, tables: Collection[int], pairs: list[tuple[Any, Any]]
    ) -> list[tuple[Any, Any]]:
        """Applies the gradients that are not stored; returns the others, for the plain loss."""
        keys = {key_of(self._model.weights[index]) for index in tables}
        kept = [
            (self._plain(optimizer, gradient), variable)
            for gradient, variable in pairs
            if key_of(variable) in keys and gradient is not None
        ]
        others = [(gradient, variable) for gradient, variable in pairs if key_of(variable) not in keys]
        for each, own in _by_optimizer(optimizer, others):
            if own:
                given = [(self._applied(each, gradient, variable), variable) for gradient, variable in own]
                type(each).apply(each, *zip(*given, strict=True))
            else:
                count_step(each)
        if isinstance(optimizer, MultiOptimizer):  # it counts by itself
            updates_of(optimizer).assign_add(1)
        return kept

    def release(self) -> None:
        """Restores the optimizers' own `apply`."""
        for optimizer in self.optimizers:
            vars(optimizer).pop("apply", None)

    def train_step(self, batch: Any) -> tuple[dict[str, Any], dict[int, Any]]:
        """The logs of the model's `train_step`, and the stored gradients, by index in `model.weights`.

        Raises:
            ModelFileError: a table's gradient can't be captured, or is given twice.
        """
        self._given.clear()
        logs = self._model.train_step(batch)
        return flat_logs(logs), self._take()

    def _take(self) -> dict[int, Any]:
        given, self._given = self._given, []
        # Only now, because layers may have been built in the step.
        indices = {key_of(variable): index for index, variable in enumerate(self._model.weights)}
        found: dict[int, Any] = {}
        self.variables = StepVariables({}, {})
        for optimizer, gradient, variable, place in given:
            index = indices.get(key_of(variable))
            if index is None:
                continue
            self.variables.given.setdefault(index, optimizer)
            if gradient is None:
                continue
            if self._tables is not None:
                self._check_place(optimizer, place)
                if index in found:
                    raise self._second_update(self.variables.updated[index], optimizer, variable)
            found.setdefault(index, gradient)
            self.variables.updated.setdefault(index, optimizer)
        return found

    def _second_update(self, first: int, second: int, variable: keras.Variable) -> ModelFileError:
        which = f"to the optimizer {self.named(first)} twice"
        if first != second:
            which = f"to two optimizers, {self.named(first)} and {self.named(second)}"
        return ModelFileError(
            f"The model's train_step gives gradients of {variable.path!r} {which}. Servers hold the rows of this "
            "embedding table and apply their gradients after the step, so they can be updated only once per step. Add "
            "up the gradients and apply them once, or use keras.layers.Embedding."
        )

    def named(self, index: int) -> str:
        return f"{self.optimizers[index].name!r}"


def _by_optimizer(optimizer: Any, pairs: list[tuple[Any, Any]]) -> list[tuple[Any, list[tuple[Any, Any]]]]:
    """Gradients by the optimizer that applies them: for a MultiOptimizer, which itself takes all or none, those
    inside."""
    if not isinstance(optimizer, MultiOptimizer):
        return [(optimizer, pairs)]
    inner = [each for each in optimizer.optimizers if each.built]
    return [(each, [pair for pair in pairs if chosen_optimizer(optimizer, pair[1]) is each]) for each in inner]


def count_step(optimizer: Any) -> None:
    """Changes the state that belongs to no variable like a step of the optimizer; for one that updates nothing here."""
    optimizer = unwrapped(optimizer)
    for each in optimizer.optimizers if isinstance(optimizer, MultiOptimizer) else ():
        if each.built:
            count_step(each)
    if isinstance(optimizer, keras.optimizers.Nadam):
        product = product_of(optimizer)
        step = keras.ops.cast(updates_of(optimizer) + 1, product.dtype)
        product.assign(product * optimizer.beta_1 * (1.0 - 0.5 * keras.ops.power(0.96, step)))
    updates_of(optimizer).assign_add(1)


def key_of(variable: Any) -> int:
    """A key shared by a Keras variable and its framework variable, which a GradientTape lists."""
    return id(value_of(variable) if isinstance(variable, keras.Variable) else variable)
