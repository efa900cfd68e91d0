"""The state of callbacks that run on the caller's objects and on their copies on workers, on its way between them.

With one worker, hooks on the master and on the worker take turns: never both at the same time. So what a hook left is
sent before a hook elsewhere runs, and all hooks see one state, as in `fit`. It is the attributes of the callbacks, and
variables of enclosing functions and modules that hooks change. Objects are changed in place where they can be, so that
others who refer to them see the change.
"""

from __future__ import annotations

import functools
import types
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np

from elasticcb.callbacks.attribute_use import GIVEN, Slot, Variable, use_of
from elasticcb.callbacks.placement import overridden_hooks
from elasticcb.errors import ElasticCBError
from elasticcb.serialization import carry
from elasticcb.serialization.references import references

_LARGE_BYTES = 1 << 20  # of arrays that no hook changes, and that are not sent again
_WHAT = "The state of callbacks"


@dataclass(frozen=True)
class Names:
    """What is sent of one callback.

    Attributes:
        only: attributes to send; None: all of them.
        fixed: attributes that no hook changes.
        variables: names of variables, with the method that refers to each.
    """

    only: frozenset[str] | None = None
    fixed: frozenset[str] = frozenset()
    variables: tuple[tuple[str, str], ...] = ()


@dataclass
class Sent:
    """A message: for each callback, its names, attributes and variables, and the attributes that can't be sent."""

    names: list[Names]
    attributes: list[dict[str, Any]]
    variables: list[list[Any]]
    left: list[dict[str, str]] = field(default_factory=list)  # with their types
    values: dict[int, Any] = field(default_factory=dict)  # of variables that have changed


class SharedVariables:
    """Variables of a program besides the weights, which losses, layers, data and callbacks may share.

    Args:
        variables: by number, the same in each process.
    """

    def __init__(self, variables: Mapping[int, Any]) -> None:
        self._variables = dict(variables)
        self._known = {number: _read(variable) for number, variable in self._variables.items()}

    def __len__(self) -> int:
        return len(self._variables)

    def changed(self) -> dict[int, Any]:
        """The values of those that differ from what they were at first."""
        now = {number: _read(variable) for number, variable in self._variables.items()}
        return {number: value for number, value in now.items() if not _is_same(value, self._known[number])}

    def follow(self, values: Mapping[int, Any]) -> None:
        """These values do not count as changed here."""
        self._known.update({number: value for number, value in values.items() if number in self._variables})

    def names_of(self, numbers: Iterable[int]) -> list[str]:
        return [str(getattr(self._variables[n], "path", "") or self._variables[n].name) for n in numbers]

    def adopt(self, values: Mapping[int, Any]) -> None:
        """Sets variables to values of another process."""
        for number, value in values.items():
            if number in self._variables:
                self._variables[number].assign(value)


def _read(variable: Any) -> Any:
    return np.array(variable.numpy())


def _is_same(one: Any, other: Any) -> bool:
    if one.shape != other.shape:
        return False
    return one.tobytes() == other.tobytes() if one.dtype != object else bool((one == other).all())


class SharedState:
    """The state of `callbacks` in this process.

    Args:
        callbacks: the same ones in each process, in order.
        model: what they refer to as the model; it does not travel.
        variables: sent with it.
        names: what is sent of each; None: what the other side sent first.
    """

    def __init__(
        self,
        callbacks: Sequence[Any],
        model: Any,
        variables: SharedVariables,
        names: Sequence[Names] | None = None,
    ) -> None:
        self._callbacks, self._model, self._variables = list(callbacks), model, variables
        self._names = None if names is None else list(names)

    def dump(self) -> tuple[bytes, list[dict[str, str]]]:
        """The state, and for each callback the attributes that can't be sent, with their types."""
        names = self._names or [Names()] * len(self._callbacks)
        sent = Sent(names, [], [])
        for callback, each in zip(self._callbacks, names, strict=True):
            attributes = {name: value for name, value in vars(callback).items() if _travels(name, value, each)}
            sent.attributes.append(attributes)
            sent.variables.append([_value(callback, *variable) for variable in each.variables])
        sent.left = [{} for _ in sent.attributes]
        sent.values = self._variables.changed()
        try:
            return carry.dumps(sent, _WHAT, references(self._model)), sent.left
        except ElasticCBError:
            for attributes, left in zip(sent.attributes, sent.left, strict=True):
                for name in [name for name, value in attributes.items() if not self._can_be_sent(value)]:
                    left[name] = type(attributes.pop(name)).__name__
            return carry.dumps(sent, _WHAT, references(self._model)), sent.left

    def _can_be_sent(self, value: Any) -> bool:
        try:
            carry.dumps(value, _WHAT, references(self._model))
        except ElasticCBError:
            return False
        return True

    def read(self, data: bytes) -> Sent:
        """The message that another process dumped."""
        sent: Sent = carry.loads(data, references(self._model))
        if self._names is None:
            self._names = sent.names
        return sent

    def adopt(self, sent: Sent) -> None:
        """Sets the callbacks and variables here to the state."""
        self._variables.adopt(sent.values)
        adopt = _Adoption()
        for callback, names, attributes, values, left in zip(
            self._callbacks, sent.names, sent.attributes, sent.variables, sent.left, strict=True
        ):
            own = vars(callback)
            for name in [name for name, value in own.items() if _travels(name, value, names)]:
                if name not in attributes and name not in left:
                    del own[name]
            for name, value in attributes.items():
                own[name] = adopt(own.get(name), value)
            for (method, name), value in zip(names.variables, values, strict=True):
                _set_value(callback, method, name, adopt)(value)


def names_of(callback: Any, only: Collection[Slot] | None = None) -> Names:
    """What must be sent of a callback; `only` these attributes and variables, or all that its hooks change."""
    use = use_of(callback, overridden_hooks(callback))
    changed = use.changes if only is None else set(only)
    variables = tuple((use.homes[slot], slot.name) for slot in changed if isinstance(slot, Variable))
    if only is not None:
        return Names(frozenset(slot for slot in only if isinstance(slot, str)), variables=variables)
    fixed = frozenset(vars(callback)) - {slot for slot in changed if isinstance(slot, str)}
    return Names(None, fixed if use.is_whole else frozenset(), variables)


def _travels(name: str, value: Any, names: Names) -> bool:
    if name in GIVEN or (names.only is not None and name not in names.only):
        return False
    if isinstance(value, types.FunctionType):  # a hook, or what it calls: it is where it is needed
        return False
    return not (name in names.fixed and _is_large(value))


def _is_large(value: Any) -> bool:
    parts = value if isinstance(value, (tuple, list)) else (value,)
    return sum(int(getattr(part, "nbytes", 0)) for part in parts) >= _LARGE_BYTES


# ------------------------------------------------------------ variables


def _function(callback: Any, method: str) -> types.FunctionType:
    found = getattr(callback, method)
    function: types.FunctionType = getattr(found, "__func__", found)
    return function


def _value(callback: Any, method: str, name: str) -> Any:
    function = _function(callback, method)
    if name in function.__code__.co_freevars:
        return _cell(function, name).cell_contents
    return function.__globals__[name]


def _set_value(callback: Any, method: str, name: str, adopt: _Adoption) -> Any:
    function = _function(callback, method)

    def to_cell(value: Any) -> None:
        cell = _cell(function, name)
        cell.cell_contents = adopt(cell.cell_contents, value)

    def to_module(value: Any) -> None:
        function.__globals__[name] = adopt(function.__globals__.get(name), value)

    return to_cell if name in function.__code__.co_freevars else to_module


def _cell(function: types.FunctionType, name: str) -> Any:
    return (function.__closure__ or ())[function.__code__.co_freevars.index(name)]


# ------------------------------------------------------------ in place


class _Adoption:
    """Turns values that arrived into values to keep: the ones that are here, changed, where they are of one kind."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[Any, Any]] = {}  # by what arrived: that, and what is kept for it
        self._used: set[int] = set()  # values here, each kept for one that arrived

    def __call__(self, mine: Any, theirs: Any) -> Any:
        if id(theirs) in self._kept:
            return self._kept[id(theirs)][1]
        change = _change_of(mine, theirs)
        if change is None or id(mine) in self._used or mine is theirs:
            kept = theirs
        else:
            kept = mine
            self._used.add(id(mine))
        self._kept[id(theirs)] = theirs, kept
        if kept is not theirs:
            assert change is not None
            change(self, mine, theirs)
        return kept


def _change_list(adopt: _Adoption, mine: list[Any], theirs: list[Any]) -> None:
    before = [*mine, *[None] * (len(theirs) - len(mine))]
    mine[:] = [adopt(old, new) for old, new in zip(before, theirs, strict=False)]


def _change_dict(adopt: _Adoption, mine: dict[Any, Any], theirs: dict[Any, Any]) -> None:
    before = dict(mine)
    mine.clear()
    mine.update({key: adopt(before.get(key), value) for key, value in theirs.items()})


def _change_set(adopt: _Adoption, mine: Any, theirs: Any) -> None:
    mine.clear()
    mine.update(theirs)


def _change_deque(adopt: _Adoption, mine: deque[Any], theirs: deque[Any]) -> None:
    items = [adopt(old, new) for old, new in zip([*mine, *[None] * len(theirs)], theirs, strict=False)]
    mine.clear()
    mine.extend(items)


def _change_variable(adopt: _Adoption, mine: Any, theirs: Any) -> None:
    mine.assign(theirs.numpy() if hasattr(theirs, "numpy") else theirs)


def _change_variables(adopt: _Adoption, mine: Any, theirs: Any) -> None:
    for own, other in zip(mine.variables, theirs.variables, strict=True):
        own.assign(np.asarray(keras.ops.convert_to_numpy(other)))


def _change_object(adopt: _Adoption, mine: Any, theirs: Any) -> None:
    _change_dict(adopt, vars(mine), vars(theirs))


_CHANGES: tuple[tuple[type, Any], ...] = (
    (list, _change_list),
    (dict, _change_dict),
    (set, _change_set),
    (deque, _change_deque),
)


def _change_of(mine: Any, theirs: Any) -> Any:
    """How `mine` is changed to equal `theirs`; None if `theirs` is kept instead."""
    if type(mine) is not type(theirs):
        return None
    for kind, change in _CHANGES:
        if isinstance(mine, kind):
            return change if not hasattr(mine, "__dict__") else None
    if isinstance(mine, keras.Variable) or (hasattr(mine, "assign") and hasattr(mine, "shape")):
        return _change_variable if tuple(mine.shape) == tuple(theirs.shape) else None
    if isinstance(mine, (keras.Operation, keras.metrics.Metric, keras.optimizers.Optimizer)):
        alike = len(mine.variables) == len(theirs.variables) and all(
            tuple(own.shape) == tuple(other.shape) for own, other in zip(mine.variables, theirs.variables, strict=True)
        )
        return _change_variables if alike else None
    fixed = (type, types.ModuleType, types.FunctionType, types.MethodType, functools.partial, np.ndarray)
    return _change_object if isinstance(getattr(mine, "__dict__", None), dict) and not isinstance(mine, fixed) else None
