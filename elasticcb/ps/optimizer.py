"""The user's own Keras optimizer, as a parameter server runs it.

It knows which of the optimizer's variables belongs to which variable of the model, so that slots can
be gathered by rows and saved in a form that any number of servers can read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras
import numpy as np

from elasticcb.errors import ElasticCBError, ModelFileError
from elasticcb.optimizer_traits import unwrapped

MakeOptimizer = Callable[[], "keras.optimizers.Optimizer"]


class Slot(NamedTuple):
    """A variable of the optimizer that belongs to one variable of the model."""

    variable: int  # index in the model
    name: str  # unique among the slots of that variable: "momentum"
    value: keras.Variable


class ServerOptimizer:
    """A built optimizer.

    Args:
        make_optimizer: makes a fresh one at each call.
        variables: what to build it on, with the weights' values, by index in the model.

    Attributes:
        optimizer: the Keras optimizer, with global clipping and loss scaling off: the worker, who has
            all gradients, does both.
        slots: variables of the shape of the model's variable.
        extras: variables of another shape that belong to one variable of the model (Adafactor's).
        shared: all others, by name: iterations, learning rate.

    Raises `ModelFileError` when the factory or `build` fail.
    """

    def __init__(self, make_optimizer: MakeOptimizer, variables: dict[int, keras.Variable]) -> None:
        self._make = make_optimizer
        self.optimizer = _make(make_optimizer)
        self.name = type(self.optimizer).__name__
        self.slots: list[Slot] = []
        self.extras: list[Slot] = []
        indices = {id(variable): index for index, variable in variables.items()}
        with _recorded_slots(self.optimizer) as recorded:
            _build(self.optimizer, list(variables.values()))
        known = set()
        for reference, name, value in recorded:
            index = indices.get(id(reference))
            if index is not None:
                self.slots.append(Slot(index, self._unique(index, name), value))
                known.add(id(value))
        others = [value for value in self.optimizer.variables if id(value) not in known]
        self.shared = self._attribute(others, variables)

    def _unique(self, index: int, name: str) -> str:
        taken = sum(slot.variable == index and slot.name.split("#")[0] == name for slot in self.slots)
        return f"{name}#{taken}" if taken else name

    def _attribute(
        self, others: list[keras.Variable], variables: dict[int, keras.Variable]
    ) -> dict[str, keras.Variable]:
        """Finds the model variables that `others` belong to, by building on one variable at a time."""
        named = {id(self.optimizer._iterations): "iterations"}
        if isinstance(self.optimizer._learning_rate, keras.Variable):
            named[id(self.optimizer._learning_rate)] = "learning_rate"
        shared = {named[id(value)]: value for value in others if id(value) in named}
        unnamed = [value for value in others if id(value) not in named]
        if not unnamed:
            return shared
        alone = {index: self._others_of([variable]) for index, variable in variables.items()}
        common = len(self._others_of([]))
        per_variable = {index: shapes[common:] for index, shapes in alone.items()}
        if len(unnamed) == common + sum(map(len, per_variable.values())):
            # Either all of one variable after another, or kind by kind.
            by_variable = [(index, shape) for index, shapes in per_variable.items() for shape in shapes]
            longest = max(map(len, per_variable.values()), default=0)
            by_kind = [
                (index, shapes[place])
                for place in range(longest)
                for index, shapes in per_variable.items()
                if place < len(shapes)
            ]
            for start in (common, 0):
                mine = unnamed[start : start + len(by_variable)]
                for order in (by_variable, by_kind):
                    if [shape for _, shape in order] == [tuple(value.shape) for value in mine]:
                        counts: dict[int, int] = {}
                        for (index, _), value in zip(order, mine, strict=True):
                            counts[index] = counts.get(index, -1) + 1
                            self.extras.append(Slot(index, f"extra{counts[index]}", value))
                        unnamed = unnamed[:start] + unnamed[start + len(by_variable) :]
                        return shared | {f"shared{place}": value for place, value in enumerate(unnamed)}
        return shared | {f"shared{place}": value for place, value in enumerate(unnamed)}

    def _others_of(self, variables: list[keras.Variable]) -> list[tuple[int, ...]]:
        """The shapes of what a fresh optimizer on `variables` has besides slots, iterations and rate."""
        optimizer = _make(self._make)
        with _recorded_slots(optimizer) as recorded:
            try:
                _build(optimizer, variables)
            except ModelFileError:
                return []
        known = {id(value) for _, _, value in recorded}
        known |= {id(optimizer._iterations), id(optimizer._learning_rate)}
        return [tuple(value.shape) for value in optimizer.variables if id(value) not in known]

    def clone(self, index: int, variable: keras.Variable) -> ServerOptimizer:
        """A fresh one on `variable` alone, which stands for variable `index` of the model."""
        return ServerOptimizer(self._make, {index: variable})

    @property
    def has_schedule(self) -> bool:
        """Whether the learning rate is computed, by a schedule or a function, rather than held."""
        return not isinstance(self.optimizer._learning_rate, keras.Variable)

    @property
    def learning_rate(self) -> float:
        return float(np.asarray(self.optimizer.learning_rate))

    def set_learning_rate(self, learning_rate: float) -> None:
        """Raises `ElasticCBError` when the optimizer has a schedule."""
        if self.has_schedule:
            kind = type(self.optimizer._learning_rate).__name__
            raise ElasticCBError(
                f"The learning rate can't be set to {learning_rate}: the optimizer {self.name} was made "
                f"with a {kind}, which decides on it. Make the optimizer with a number instead "
                f"({self.name}(learning_rate={learning_rate:g})), or leave the learning rate alone."
            )
        self.optimizer.learning_rate = learning_rate


def _make(make_optimizer: MakeOptimizer) -> keras.optimizers.Optimizer:
    optimizer = unwrapped(make_optimizer())
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ModelFileError(
            f"The model file's optimizer gave {optimizer!r}; a keras.optimizers.Optimizer was expected."
        )
    if optimizer.built:
        raise ModelFileError(
            f"The model file's optimizer function gave an optimizer ({optimizer.name}) that is in use "
            "already; it must make a new one at each call."
        )
    optimizer.global_clipnorm = None
    optimizer.loss_scale_factor = None
    return optimizer


def _build(optimizer: keras.optimizers.Optimizer, variables: list[keras.Variable]) -> None:
    try:
        optimizer.build(variables)
    except Exception as error:
        raise ModelFileError(
            f"The optimizer {type(optimizer).__name__} can't be built on a parameter server's variables: "
            f"{type(error).__name__}: {error}"
        ) from error


@contextlib.contextmanager
def _recorded_slots(
    optimizer: keras.optimizers.Optimizer,
) -> Iterator[list[tuple[keras.Variable, str, keras.Variable]]]:
    """Records (variable, slot's name, slot) of each slot that is added while the context lasts."""
    recorded: list[tuple[keras.Variable, str, keras.Variable]] = []
    add = optimizer.add_variable_from_reference

    def recording(
        reference_variable: keras.Variable, name: str | None = None, initializer: Any = "zeros"
    ) -> keras.Variable:
        slot = add(reference_variable, name=name, initializer=initializer)
        recorded.append((reference_variable, name or "var", slot))
        return slot

    # Around Keras's own __setattr__, which tracks what it is given.
    object.__setattr__(optimizer, "add_variable_from_reference", recording)
    try:
        yield recorded
    finally:
        object.__delattr__(optimizer, "add_variable_from_reference")
