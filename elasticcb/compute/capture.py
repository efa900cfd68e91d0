"""Captures the gradients that a model's `train_step` passes to its optimizers, instead of applying them."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import keras

from elasticcb.errors import ModelFileError
from elasticcb.keras_private import product_of, updates_of, value_of
from elasticcb.optimizers.step_logs import flat_logs
from elasticcb.optimizers.traits import MultiOptimizer, model_optimizers, unwrapped
from elasticcb.optimizers.variables import chosen_optimizer
from elasticcb.sharding.partition import VariableSpec


class Update(NamedTuple):
    """The gradient of one variable, as computed by the model: of the scaled loss, if the optimizer scales it."""

    optimizer: int  # index in `model_optimizers(model)`
    gradient: Any  # in the framework's form


class ReadWatch(Protocol):
    """Watches a step from the first time that it passes gradients to an optimizer.

    Servers apply gradients after the step, so later reads in the step see values from before the update.
    """

    def refused(self) -> contextlib.AbstractContextManager[None]:
        """Inside the context, it is an error if a step reads such a variable: `ModelFileError`."""

    def given(self, variables: Sequence[Any], optimizer: str) -> None:
        """The optimizer called `optimizer` was given gradients of these variables."""


class OptimizerCapture(ABC):
    """Makes all optimizers of a model store the gradients that they are given.

    Args:
        variables: indices in `model.weights` of variables whose gradients are stored; the optimizers apply the others
            as usual. None: all are stored.
        refuses: whether to refuse steps that can't be done by gradients on servers. Otherwise they may do everything
            that Keras allows.

    Attributes:
        optimizers: optimizers of the model, indexed by `Update.optimizer`.
        given: variables that the last step gave to optimizers, as `StepVariables.given`.
    """

    def __init__(
        self,
        model: keras.Model,
        late_reads: ReadWatch,
        variables: Collection[int] | None = None,
        refuses: bool = True,
    ) -> None:
        self._model, self._late_reads = model, late_reads
        self._variables, self._refuses = variables, refuses
        self.optimizers = model_optimizers(model)
        self.given: dict[int, int] = {}
        self._given: list[tuple[int, Any, Any, Any]] = []  # (optimizer, gradient, variable, place)
        if variables is None or variables:
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
            if self._variables is not None:
                pairs = self._apply_others(optimizer, pairs)
            self._given += [(index, gradient, variable, place) for gradient, variable in pairs]
            if self._refuses:
                self._late_reads.given(
                    [variable for gradient, variable in pairs if gradient is not None], optimizer.name
                )

        # Keras's own `apply_gradients` calls it. Bypasses Keras's __setattr__, which tracks values.
        object.__setattr__(optimizer, "apply", apply)

    def _apply_others(self, optimizer: Any, pairs: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
        """Applies the gradients that are not stored; returns the others, for the plain loss."""
        keys = {key_of(self._model.weights[index]) for index in self._variables or ()}
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

    def train_step(self, batch: Any) -> tuple[dict[str, Any], dict[int, Update]]:
        """The logs of the model's `train_step`, and its gradients, by index in `model.weights`.

        Raises:
            ModelFileError: there are none, or servers can't apply them as `train_step` intends.
        """
        self._given.clear()
        with self._late_reads.refused():
            logs = self._model.train_step(batch)
            updates = self._take()  # report its errors first
        return flat_logs(logs), updates

    def _take(self) -> dict[int, Update]:
        given, self._given = self._given, []
        # Only now, because layers may have been built in the step.
        indices = {key_of(variable): index for index, variable in enumerate(self._model.weights)}
        updates: dict[int, Update] = {}
        self.given = {}
        for optimizer, gradient, variable, place in given:
            index = indices.get(key_of(variable))
            if index is not None:
                self.given.setdefault(index, optimizer)
            if gradient is None:
                continue
            if not self._refuses and self._variables is None:
                if index is not None:
                    updates.setdefault(index, Update(optimizer, gradient))
                continue
            self._check_place(optimizer, place)
            if index is None:
                raise ModelFileError(
                    f"The optimizer {self.named(optimizer)} was given a gradient of {path_of(variable)!r}, which is "
                    "not a weight of the model, so no server holds it. Make it a keras.Variable that is an attribute "
                    "of the model or of one of its layers."
                )
            if index in updates:
                raise self._second_update(updates[index].optimizer, optimizer, variable)
            updates[index] = Update(optimizer, gradient)
        if not updates and self._refuses:
            raise ModelFileError(
                "The model's train_step gave the optimizer no gradients. Either no layer is trainable, or the loss "
                "does not depend on the weights, or the optimizer is not an attribute of the model: it must be "
                "`model.optimizer`, or an attribute of the model or of one of its layers."
            )
        return updates

    def _second_update(self, first: int, second: int, variable: Any) -> ModelFileError:
        which = f"to the optimizer {self.named(first)} twice"
        if first != second:
            which = f"to two optimizers, {self.named(first)} and {self.named(second)}"
        return ModelFileError(
            f"The model's train_step gives gradients of {path_of(variable)!r} {which}. A step runs on weights that "
            "were pulled before it, and servers apply its gradients after it, so a variable can be updated only once "
            "per step. Add up the gradients and apply them once; or do one update per batch (if a critic must be "
            "updated more often than a generator, train it on every batch, and multiply the generator's gradients by "
            "zero in the others)."
        )

    def named(self, index: int) -> str:
        return f"{self.optimizers[index].name!r}"


@contextlib.contextmanager
def unchanged(variables: Sequence[keras.Variable]) -> Iterator[None]:
    """Restores the variables' values at the end."""
    before = [(variable, variable.numpy()) for variable in variables]
    try:
        yield
    finally:
        for variable, value in before:
            variable.assign(value)


def check_updated(updates: Iterable[int], specs: Sequence[VariableSpec]) -> None:
    """Raises `ModelFileError` when a step updates other variables than when the model was built."""
    unexpected = [specs[index].path for index in updates if not specs[index].trainable]
    if unexpected:
        raise ModelFileError(
            f"The model's train_step gives an optimizer gradients of {', '.join(map(repr, unexpected))} now, which it "
            "did not when the job started. Which variables a step updates must be the same for every batch."
        )


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


def path_of(variable: Any) -> str:
    """The name of either in messages."""
    return str(getattr(variable, "path", None) or variable.name)
