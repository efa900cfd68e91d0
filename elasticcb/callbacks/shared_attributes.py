"""Attributes and globals of a program that hooks on the master set, and that steps, losses or data on workers read.

They are numbers, strings, small arrays and containers of these: `model.beta`, `optimizer.momentum`, `dataset.scale`, a
global of the script. A step that is compiled has them as they were at its first batch, here as in `fit`.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Hashable, Iterator, Mapping
from typing import Any, NamedTuple, cast

import keras
import numpy as np

from elasticcb.keras_private import KerasSaveable, KerasVariable
from elasticcb.serialization import own_modules

_Key = tuple[int, str]  # number of the object, and name
_PLAIN = (bool, int, float, complex, str, bytes, type(None), np.generic)
_LARGE_BYTES = 1 << 20
_LARGE_LENGTH = 1000  # of a container
_OF_KERAS = frozenset({"built", "compiled", "stop_training", "training"})  # set by what runs in this process
_OTHERS = (keras.callbacks.Callback, keras.metrics.Metric, KerasVariable)  # which travel by themselves


def holders(objects: Mapping[int, Any]) -> dict[int, Any]:
    """Those of a program's objects that may have such attributes, in the process of its user."""
    return {number: each for number, each in objects.items() if _is_holder(each)}


def _is_holder(thing: Any) -> bool:
    if isinstance(thing, types.FunctionType):
        return not own_modules.is_installed(thing.__code__.co_filename)
    kind = thing if isinstance(thing, type) else type(thing)
    if issubclass(kind, _OTHERS) and not isinstance(thing, type):
        return False
    is_of_keras = issubclass(kind, KerasSaveable) and kind is not thing
    return hasattr(thing, "__dict__") and (is_of_keras or own_modules.is_of_user(kind.__module__))


class Change(NamedTuple):
    """A value that has changed."""

    first: Any
    now: Any


class Attribute(NamedTuple):
    """An attribute, a global or a variable of an enclosing function, and its value."""

    holder: Any
    name: str
    value: Any

    def __str__(self) -> str:
        if isinstance(self.holder, types.FunctionType):
            return self.name
        kind = self.holder if isinstance(self.holder, type) else type(self.holder)
        return f"{kind.__name__}.{self.name}"


class SharedAttributes:
    """Attributes of objects that several processes have.

    Args:
        objects: by number, the same in each process.
    """

    def __init__(self, objects: Mapping[int, Any]) -> None:
        self._objects = objects
        self._first = self._read()
        self._ever: set[_Key] = set()  # those that have changed, and may be back at the first value

    def _read(self) -> dict[_Key, Any]:
        return {
            (number, name): _plain(value)
            for number, thing in self._objects.items()
            for name, value in _attributes(thing)
            if _is_plain(value)
        }

    def changed(self) -> dict[_Key, Change]:
        """Those that have ever differed from what they were at first."""
        values = self._read()
        self._ever |= {key for key, value in values.items() if not is_same_value(value, self._first.get(key))}
        return {key: Change(self._first.get(key), values[key]) for key in self._ever if key in values}

    def of_optimizers(self) -> list[Attribute]:
        """Those of `changed` that are of optimizers."""
        found = [Attribute(self._objects[key[0]], key[1], change.now) for key, change in self.changed().items()]
        return [each for each in found if isinstance(each.holder, keras.optimizers.Optimizer)]


class FollowedAttributes:
    """The same where they are read.

    Args:
        objects: by number.
    """

    def __init__(self, objects: Mapping[int, Any]) -> None:
        self._objects = objects
        self._adopted: dict[_Key, Any] = {}

    def adopt(self, changes: Mapping[_Key, Change]) -> tuple[list[Attribute], list[Attribute]]:
        """Sets them; returns those that were set, and those that this process has also changed, which are left as they
        are."""
        found: list[Attribute] = []
        conflicts: list[Attribute] = []
        for key, (first, value) in changes.items():
            number, name = key
            thing = self._objects[number]
            here = _plain(_get(thing, name))
            if is_same_value(here, value):
                continue
            is_ours = not is_same_value(here, self._adopted.get(key, first))
            (conflicts if is_ours else found).append(Attribute(thing, name, value))
            if not is_ours:
                self._adopted[key] = value
                _set(thing, name, value)
        return found, conflicts


def is_same_value(one: Any, other: Any) -> bool:
    """Whether two plain values are the same, with their types; NaN is the same as NaN."""
    if one is other or type(one) is not type(other):
        return one is other
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if isinstance(one, dict):
        return list(one) == list(other) and all(is_same_value(each, other[key]) for key, each in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(is_same_value, one, other))
    return bool(one == other or (one != one and other != other))


def _attributes(thing: Any) -> Iterator[tuple[str, Any]]:
    """Names and values of what it may share."""
    if isinstance(thing, types.FunctionType):
        names = own_modules.names_in(thing.__code__)
        yield from ((name, thing.__globals__[name]) for name in names if name in thing.__globals__)
        for name, cell in _cells(thing).items():
            with contextlib.suppress(ValueError):  # it is empty
                yield name, cell.cell_contents
    else:
        yield from ((name, value) for name, value in list(vars(thing).items()) if _is_own(thing, name))
        if isinstance(thing, keras.layers.Layer):
            yield "trainable", thing.trainable


def _is_own(thing: Any, name: str) -> bool:
    if isinstance(thing, type):
        return not name.startswith("__")
    if not isinstance(thing, KerasSaveable):
        return True
    return name not in _OF_KERAS and (not name.startswith("_") or name in _named_by_user(cast(Hashable, type(thing))))


@functools.lru_cache(maxsize=1000)
def _named_by_user(kind: Any) -> frozenset[str]:
    """What the methods of the user's classes name."""
    methods = [
        method
        for each in kind.__mro__
        if own_modules.is_of_user(each.__module__)
        for method in vars(each).values()
        if isinstance(method, types.FunctionType)
    ]
    return frozenset().union(*(own_modules.names_in(method.__code__) for method in methods))


def _cells(function: types.FunctionType) -> dict[str, types.CellType]:
    return dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))


def _get(thing: Any, name: str) -> Any:
    if not isinstance(thing, types.FunctionType):
        return getattr(thing, name, None)
    return _cells(thing)[name].cell_contents if name in _cells(thing) else thing.__globals__.get(name)


def _set(thing: Any, name: str, value: Any) -> None:
    if not isinstance(thing, types.FunctionType):
        setattr(thing, name, value)
    elif name in _cells(thing):
        _cells(thing)[name].cell_contents = value
    else:
        thing.__globals__[name] = value


def _is_plain(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return value.dtype != object and value.nbytes <= _LARGE_BYTES
    if isinstance(value, (list, tuple, dict)):
        parts = [*value, *(value.values() if isinstance(value, dict) else ())]
        return len(value) <= _LARGE_LENGTH and all(map(_is_plain, parts))
    return isinstance(value, _PLAIN)


def _plain(value: Any) -> Any:
    """A copy without what Keras tracks."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, tuple) and type(value) is not tuple:
        return value
    if isinstance(value, (list, tuple)):
        return (list if isinstance(value, list) else tuple)(map(_plain, value))
    return value.copy() if isinstance(value, np.ndarray) else value
