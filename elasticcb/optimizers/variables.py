"""Maps variables of a Keras optimizer to variables of the model.

Keras keeps an optimizer's variables in one list. A server splits those of a variable like that variable, and stored
states name them by it; this module finds the mapping for any class, Keras's or a user's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import keras

from elasticcb.errors import ModelFileError
from elasticcb.keras_private import inner_optimizer_of, key_in, trained_by
from elasticcb.optimizers.state import Optimizers
from elasticcb.optimizers.traits import (
    MultiOptimizer,
    learning_rate_variable,
    period_of,
    reduces_rows,
    unwrapped,
)
from elasticcb.sharding.partition import VariableSpec


class Leaf(NamedTuple):
    """An optimizer that updates variables itself, not through inner optimizers."""

    name: str  # "0", or "0.1" for the second one inside a MultiOptimizer
    optimizer: keras.optimizers.Optimizer
    variables: dict[int, Any]  # variables that it updates, by index in the model

    @property
    def prefix(self) -> str:
        """The prefix of its shared variables; empty for the model's only optimizer."""
        return "" if self.name == "0" else f"{self.name}/"

    @property
    def class_name(self) -> str:
        """With the prefix."""
        return self.prefix + type(self.optimizer).__name__


def leaves(optimizer: keras.optimizers.Optimizer, place: int, variables: Mapping[int, Any]) -> list[Leaf]:
    """The parts of an optimizer: itself, or the optimizers in a MultiOptimizer that update something.

    Args:
        place: index among the model's optimizers.
        variables: variables of the model that it updates, or objects with their paths, shapes and dtypes; by index.
    """
    optimizer = unwrapped(optimizer)
    if not isinstance(optimizer, MultiOptimizer):
        return [Leaf(str(place), optimizer, dict(variables))]
    inner = list(optimizer.optimizers)
    groups: list[dict[int, Any]] = [{} for _ in inner]
    for index, variable in variables.items():
        chosen = chosen_optimizer(optimizer, variable)
        if not any(chosen is other for other in inner):
            inner.append(chosen)
            groups.append({})
        groups[next(i for i, other in enumerate(inner) if other is chosen)][index] = variable
    return [Leaf(f"{place}.{i}", *pair) for i, pair in enumerate(zip(inner, groups, strict=True)) if pair[1]]


class _Outline(NamedTuple):
    """Metadata of a variable, which a MultiOptimizer accepts as one."""

    path: str
    name: str
    shape: tuple[int, ...]
    dtype: str
    trainable: bool = True


def leaves_of(
    optimizers: Sequence[keras.optimizers.Optimizer],
    specs: Sequence[VariableSpec],
    variables: Sequence[keras.Variable] | None = None,
) -> list[Leaf]:
    """The parts of all optimizers of a model that train something; those of the first one in any case.

    Args:
        variables: the model's; None: the optimizers are not built, and descriptions of variables suffice.
    """
    found: list[Leaf] = []
    for place, optimizer in enumerate(optimizers):
        outlines = {
            index: _Outline(spec.path, spec.path.rpartition("/")[2], spec.shape, spec.dtype)
            if variables is None
            else variables[index]
            for index, spec in enumerate(specs)
            if spec.trainable and spec.optimizer == place
        }
        if outlines or not place:
            found += leaves(optimizer, place, outlines)
    return found


def described(
    optimizers: Sequence[keras.optimizers.Optimizer],
    specs: Sequence[VariableSpec],
    variables: Sequence[keras.Variable] | None = None,
) -> Optimizers:
    """What servers know of a model's optimizers; arguments as of `leaves_of`."""
    if not optimizers:
        return Optimizers()
    found = leaves_of(optimizers, specs, variables)
    periods = {leaf.prefix + "iterations": period_of(leaf.optimizer) for leaf in found}
    rate = learning_rate_variable(optimizers[0])
    return Optimizers(
        tuple(leaf.class_name for leaf in found),
        {name: period for name, period in periods.items() if period > 1},
        None if rate is None else float(rate),
    )


def chosen_optimizer(optimizer: Any, variable: Any) -> keras.optimizers.Optimizer:
    """Which of the optimizers inside a MultiOptimizer updates `variable`."""
    chosen = inner_optimizer_of(optimizer, variable)
    if not isinstance(chosen, keras.optimizers.Optimizer):
        raise ModelFileError(
            f"The MultiOptimizer {optimizer.name} returned {chosen!r} for the variable {variable.path!r}; expected a "
            "keras.optimizers.Optimizer."
        )
    return chosen


class StepVariables(NamedTuple):
    """What a training step gives to optimizers: by index in `model.weights`, the index in `model_optimizers(model)`.

    Keras builds an optimizer on all variables that it is given, also on those without a gradient.
    """

    updated: dict[int, int]
    given: dict[int, int]


class Slot(NamedTuple):
    """A variable of the optimizer that belongs to a variable of the model."""

    variable: int  # index in the model
    name: str  # unique among those of that variable: "momentums"
    value: keras.Variable


@dataclass
class OptimizerVariables:
    """All variables of a built optimizer.

    Attributes:
        slots: variables with the rows of their variable: of the same shape, or, if the optimizer reduces rows, with the
            same number of rows.
        extras: variables of other shapes (Adafactor's row and column averages).
        shared: variables that belong to no variable: iterations, learning rate, Nadam's product.
    """

    slots: list[Slot] = field(default_factory=list)
    extras: list[Slot] = field(default_factory=list)
    shared: dict[str, keras.Variable] = field(default_factory=dict)


# Attributes of Keras's base class that list variables one after another, not one per variable of the model.
_WHOLE_LISTS = {"_variables", "_trainable_variables"}


def optimizer_variables(
    optimizer: keras.optimizers.Optimizer, variables: Mapping[int, keras.Variable]
) -> OptimizerVariables:
    """The variables of a built optimizer, by the model's variable that they belong to.

    A variable belongs to the model's i-th variable if it is the i-th item of a list or dict attribute with as many
    items as the optimizer was built on, as in Keras's classes; or if its name starts with that variable's path, as
    `add_variable_from_reference` names it.

    Args:
        optimizer: not a wrapper around others.
        variables: variables of the model, by index; others are ignored.
    """
    indices = {key_in(optimizer, variable): index for index, variable in variables.items()}
    built_on = [indices.get(key_in(optimizer, variable)) for variable in trained_by(optimizer)]
    listed = dict(_listed(optimizer, built_on))
    named = dict(_named(optimizer))
    paths = {variable.path.replace("/", "_") + "_": index for index, variable in variables.items()}
    found = OptimizerVariables()
    taken: set[tuple[int, str]] = set()
    for value in optimizer.variables:
        if id(value) in listed:
            index, name = listed[id(value)]
        elif id(value) in named:
            index, name = None, ""
        else:
            index, name = _by_path(value, paths)
            if index is None:
                named[id(value)] = f"shared{sum(key.startswith('shared') for key in found.shared)}"
        if id(value) in named:
            found.shared[named[id(value)]] = value
        elif index is not None:
            while (index, name) in taken:
                name += "#"
            taken.add((index, name))
            variable = variables[index]
            has_rows = _has_rows_of(value, variable, any_width=reduces_rows(optimizer))
            (found.slots if has_rows else found.extras).append(Slot(index, name, value))
    return found


def _has_rows_of(value: keras.Variable, variable: keras.Variable, any_width: bool) -> bool:
    """Whether rows of `value` are rows of `variable`."""
    own, its = tuple(value.shape), tuple(variable.shape)
    if own == its:
        return True
    same_width = own[1:] == its[1:] or any_width
    return bool(own and its) and same_width and (own[0] == its[0] or has_free_rows(variable))


def has_free_rows(variable: Any) -> bool:
    """Whether a variable's number of rows can change, as for an embedding layer; its slots keep their original
    number."""
    shape = getattr(getattr(variable, "_value", None), "shape", ())
    return tuple(shape)[:1] == (None,) or getattr(variable, "free_rows", False)


def _listed(optimizer: Any, built_on: list[int | None]) -> Iterator[tuple[int, tuple[int | None, str]]]:
    """By identity, the variables in lists and dicts that are as long as `built_on`."""
    own = {id(value) for value in optimizer.variables}
    for attribute, values in vars(optimizer).items():
        if isinstance(values, Mapping):
            values = list(values.values())
        if attribute in _WHOLE_LISTS or not isinstance(values, (list, tuple)) or len(values) != len(built_on):
            continue
        if all(value is None or id(value) in own for value in values):
            for index, value in zip(built_on, values, strict=True):
                if value is not None:
                    yield id(value), (index, attribute.strip("_"))


def _named(optimizer: Any) -> Iterator[tuple[int, str]]:
    """By identity, the names of variables that are attributes themselves."""
    for attribute, value in vars(optimizer).items():
        if isinstance(value, keras.Variable):
            yield id(value), attribute.strip("_")


def _by_path(value: keras.Variable, paths: Mapping[str, int]) -> tuple[int | None, str]:
    matching = [path for path in paths if value.name.startswith(path)]
    if not matching:
        return None, ""
    longest = max(matching, key=len)
    return paths[longest], value.name[len(longest) :]
