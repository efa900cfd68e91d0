"""What a model's `train_step` hands to its optimizers: kept, instead of applied."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import keras

from elasticcb.errors import ModelFileError
from elasticcb.optimizers.step_logs import flat_logs
from elasticcb.optimizers.traits import MultiOptimizer, model_optimizers, unwrapped
from elasticcb.optimizers.variables import chosen_optimizer
from elasticcb.sharding.partition import VariableSpec


class Update(NamedTuple):
    """The gradient of one variable, as the model computed it: of the scaled loss, if the optimizer scales it."""

    optimizer: int  # index in `model_optimizers(model)`
    gradient: Any  # as the framework has it


class ReadWatch(Protocol):
    """Watches one step from the first gradients on that it gives to an optimizer.

    Servers apply gradients after the step, so what it reads later in it are values from before the update.
    """

    def refused(self) -> contextlib.AbstractContextManager[None]:
        """A step in the context that reads such a variable is an error: `ModelFileError`."""

    def given(self, variables: Sequence[Any], optimizer: str) -> None:
        """The optimizer of that name was given gradients of these."""


class OptimizerCapture(ABC):
    """Makes every optimizer of a model keep what it is given, from now on.

    Args:
        model: whose optimizers these are.
        late_reads: of its step.
        variables: indices in `model.weights` of those whose gradients are kept, alone; the optimizers apply the others
            as ever. None: all are kept.
        refuses: steps are refused that servers can't do by gradients. Others may do what Keras does.

    Attributes:
        optimizers: of the model; `Update.optimizer` counts them.
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
        self._given: list[tuple[int, Any, Any, Any]] = []  # (optimizer, gradient, variable, place)
        if variables is None or variables:
            for index in range(len(self.optimizers)):
                self._replace_apply(index)

    @abstractmethod
    def _plain(self, optimizer: keras.optimizers.Optimizer, gradient: Any) -> Any:
        """A gradient of the loss as `optimizer` has scaled it, as that of the loss itself."""

    def _place(self) -> Any:
        """Where gradients are given now, for `_check_place`."""
        return None

    def _check_place(self, optimizer: int, place: Any) -> None:  # noqa: B027 most frameworks have no such places
        """Raises `ModelFileError` when gradients that were given there can't be taken out of the step."""

    def _replace_apply(self, index: int) -> None:
        optimizer = self.optimizers[index]

        def apply(grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
            if trainable_variables is None:
                trainable_variables = getattr(optimizer, "_trainable_variables", None) or self._model.trainable_weights
            if len(grads) != len(trainable_variables):
                raise ModelFileError(
                    f"The optimizer {optimizer.name!r} was given {len(grads)} gradients for "
                    f"{len(trainable_variables)} variables; there must be one for each, or None."
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

        # Keras's own `apply_gradients` calls it. Around Keras's __setattr__, which tracks what it is given.
        object.__setattr__(optimizer, "apply", apply)

    def _apply_others(self, optimizer: Any, pairs: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
        """Applies the gradients that are not to be kept; answers the others, of the plain loss."""
        keys = {key_of(self._model.weights[index]) for index in self._variables or ()}
        kept = [
            (self._plain(optimizer, gradient), variable)
            for gradient, variable in pairs
            if key_of(variable) in keys and gradient is not None
        ]
        others = [(gradient, variable) for gradient, variable in pairs if key_of(variable) not in keys]
        for each, own in _by_optimizer(optimizer, others):
            if own:
                type(each).apply(each, *zip(*own, strict=True))
            else:
                unwrapped(each)._iterations.assign_add(1)
        if isinstance(optimizer, MultiOptimizer):  # it counts for itself
            optimizer._iterations.assign_add(1)
        return kept

    def release(self) -> None:
        """Gives the optimizers their own `apply` back."""
        for optimizer in self.optimizers:
            vars(optimizer).pop("apply", None)

    def train_step(self, batch: Any) -> tuple[dict[str, Any], dict[int, Update]]:
        """The logs of the model's `train_step`, and the gradients that it gave, by index in `model.weights`.

        Raises:
            ModelFileError: there are none, or servers can't apply them as `train_step` wants it.
        """
        self._given.clear()
        with self._late_reads.refused():
            logs = self._model.train_step(batch)
            updates = self._take()  # what it refuses is told first
        return flat_logs(logs), updates

    def _take(self) -> dict[int, Update]:
        given, self._given = self._given, []
        # Now, since layers may have been built in the step.
        indices = {key_of(variable): index for index, variable in enumerate(self._model.weights)}
        updates: dict[int, Update] = {}
        for optimizer, gradient, variable, place in given:
            if gradient is None:
                continue
            index = indices.get(key_of(variable))
            if not self._refuses and self._variables is None:
                if index is not None:
                    updates.setdefault(index, Update(optimizer, gradient))
                continue
            self._check_place(optimizer, place)
            if index is None:
                raise ModelFileError(
                    f"The optimizer {self.named(optimizer)} was given a gradient of {path_of(variable)!r}, which is no "
                    "weight of the model, so that no server holds it. Make it a keras.Variable that is an attribute "
                    "of the model or of one of its layers."
                )
            if index in updates:
                raise self._second_update(updates[index].optimizer, optimizer, variable)
            updates[index] = Update(optimizer, gradient)
        if not updates and self._refuses:
            raise ModelFileError(
                "The model's train_step gave the optimizer no gradients. Either no layer is trainable, or the "
                "loss does not depend on the weights, or its optimizer is no attribute of the model: it must be "
                "`model.optimizer`, or an attribute of the model or of one of its layers."
            )
        return updates

    def _second_update(self, first: int, second: int, variable: Any) -> ModelFileError:
        which = f"to the optimizer {self.named(first)} twice"
        if first != second:
            which = f"to two optimizers, {self.named(first)} and {self.named(second)}"
        return ModelFileError(
            f"The model's train_step gives gradients of {path_of(variable)!r} {which}. A step runs on weights that "
            "were pulled before it, and servers apply its gradients after it, so a variable can be updated once per "
            "step. Add up the gradients and apply them once; or do one update per batch (of a critic that is to be "
            "updated more often than a generator: train it on every batch, and give the generator's gradients weight "
            "zero in the others)."
        )

    def named(self, index: int) -> str:
        return f"{self.optimizers[index].name!r}"


@contextlib.contextmanager
def unchanged(variables: Sequence[keras.Variable]) -> Iterator[None]:
    """Gives the variables their values back at the end."""
    before = [(variable, variable.numpy()) for variable in variables]
    try:
        yield
    finally:
        for variable, value in before:
            variable.assign(value)


def check_updated(updates: Iterable[int], specs: Sequence[VariableSpec]) -> None:
    """Raises `ModelFileError` when a step gives gradients of variables that it gave none of when the model was built.

    Args:
        updates: indices in `model.weights`, as `specs`.
    """
    unexpected = [specs[index].path for index in updates if not specs[index].trainable]
    if unexpected:
        raise ModelFileError(
            f"The model's train_step gives an optimizer gradients of {', '.join(map(repr, unexpected))} now, which it "
            "did not when the job started. Which variables a step updates must be the same for every batch."
        )


def _by_optimizer(optimizer: Any, pairs: list[tuple[Any, Any]]) -> list[tuple[Any, list[tuple[Any, Any]]]]:
    """Gradients by the optimizer that applies them. Those inside a MultiOptimizer, which itself takes all or none."""
    if not isinstance(optimizer, MultiOptimizer):
        return [(optimizer, pairs)]
    inner = [each for each in optimizer.optimizers if each.built]
    return [(each, [pair for pair in pairs if chosen_optimizer(optimizer, pair[1]) is each]) for each in inner]


def key_of(variable: Any) -> int:
    """The same for a Keras variable and the framework's own within it, which a GradientTape lists."""
    return id(getattr(variable, "_value", variable))


def path_of(variable: Any) -> str:
    """What messages call either of them."""
    return str(getattr(variable, "path", None) or variable.name)
