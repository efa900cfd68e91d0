"""Which variable of a Keras optimizer belongs to which variable of the model.

Keras keeps an optimizer's variables in one list. A server cuts those of one variable like that variable, and
whoever stores or sends a state names them by it; this module finds them out for any class, Keras's or a user's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import keras

from elasticcb.errors import ModelFileError
from elasticcb.optimizers.traits import MultiOptimizer, reduces_rows, unwrapped


class Leaf(NamedTuple):
    """An optimizer that updates variables itself, rather than by others that it holds."""

    name: str  # "0", or "0.1" for the second one inside a MultiOptimizer
    optimizer: keras.optimizers.Optimizer
    variables: dict[int, Any]  # that it updates, by index in the model

    @property
    def prefix(self) -> str:
        """What stands before the names of its shared variables; nothing for the model's only optimizer."""
        return "" if self.name == "0" else f"{self.name}/"

    @property
    def class_name(self) -> str:
        """With the prefix."""
        return self.prefix + type(self.optimizer).__name__


def leaves(optimizer: keras.optimizers.Optimizer, place: int, variables: Mapping[int, Any]) -> list[Leaf]:
    """What an optimizer is made of: itself, or those inside a MultiOptimizer that have something to update.

    Args:
        place: index among the model's optimizers.
        variables: of the model that it updates, or what has their paths, shapes and dtypes; by index.
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


def chosen_optimizer(optimizer: Any, variable: Any) -> keras.optimizers.Optimizer:
    """Which of the optimizers inside a MultiOptimizer updates `variable`."""
    if optimizer.built:  # a function that chooses may make a new one at each call
        return optimizer.optimizers[optimizer._var_to_optimizer_idx[optimizer._var_key(variable)]]
    chosen = optimizer._optimizer_map(variable)
    if not isinstance(chosen, keras.optimizers.Optimizer):
        raise ModelFileError(
            f"The MultiOptimizer {optimizer.name} gives {chosen!r} for the variable {variable.path!r}; expected a "
            "keras.optimizers.Optimizer."
        )
    return chosen


class Slot(NamedTuple):
    """A variable of the optimizer that belongs to one variable of the model."""

    variable: int  # index in the model
    name: str  # unique among those of that variable: "momentums"
    value: keras.Variable


@dataclass
class OptimizerVariables:
    """All variables of a built optimizer.

    Attributes:
        slots: rows of the one are rows of the other: of the shape of their variable or, where an optimizer reduces
            over rows, with as many rows.
        extras: of another shape (Adafactor's row and column averages).
        shared: those of no variable: iterations, learning rate, Nadam's product.
    """

    slots: list[Slot] = field(default_factory=list)
    extras: list[Slot] = field(default_factory=list)
    shared: dict[str, keras.Variable] = field(default_factory=dict)


# Attributes of Keras's base class that list variables one after another, not one per variable of the model.
_WHOLE_LISTS = {"_variables", "_trainable_variables"}


def optimizer_variables(
    optimizer: keras.optimizers.Optimizer, variables: Mapping[int, keras.Variable]
) -> OptimizerVariables:
    """The variables of a built optimizer, by what they belong to.

    A variable belongs to the model's i-th one when it is the i-th of a list or dict that is an attribute and has as
    many as the optimizer was built on, as Keras's classes have them, or when its name begins with the path, as
    `add_variable_from_reference` names it.

    Args:
        optimizer: no wrapper around others.
        variables: of the model, by index; what is known of others is left out.
    """
    indices = {optimizer._var_key(variable): index for index, variable in variables.items()}
    built_on = [indices.get(optimizer._var_key(variable)) for variable in optimizer._trainable_variables]
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
    """Whether a variable can get another number of rows, as that of an embedding layer; its slots are made for the
    number that it had then."""
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
