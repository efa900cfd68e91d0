"""Converts values to and from JSON: numbers, text, containers, arrays, and importable objects by name.

Nothing is pickled: reading can't run code, except by importing a name.
"""

from __future__ import annotations

import functools
import importlib
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path, PurePath
from typing import Any

import numpy as np

from elasticcb.errors import WireError
from elasticcb.rpc.tensors import Array, dtype_of

_TAG = "elasticcb"  # the only key of a dict that represents a value JSON lacks: [kind, content]
_MOST_LEVELS = 50  # of nested containers


class NotPlain(Exception):
    """A value that can't be represented in JSON."""


class NameNotFound(Exception):
    """A function or class that existed when a value was written can't be imported."""


class MissingArray(Exception):
    """An array is missing."""


class Writer:
    """Converts the values of one object to JSON values.

    Args:
        owner: the object; its bound methods may be among the values.
        arrays: receives the arrays, by the names that replace them; None: arrays are not allowed.
    """

    def __init__(self, owner: Any = None, arrays: dict[str, Array] | None = None) -> None:
        self._owner, self._arrays = owner, arrays

    def write(self, path: str, value: Any) -> Any:
        """`value` as a JSON value; `path` names it among the arrays.

        Raises `NotPlain`; in that case no array is stored.
        """
        taken: dict[str, Array] = {}
        written = self._write(path, value, taken, 0)
        if self._arrays is not None:
            self._arrays.update(taken)
        return written

    def _write(self, path: str, value: Any, taken: dict[str, Array], level: int) -> Any:
        if level > _MOST_LEVELS:  # possibly a list that contains itself
            raise NotPlain

        def items(values: Any) -> list[Any]:
            return [self._write(f"{path}/{i}", item, taken, level + 1) for i, item in enumerate(values)]

        if isinstance(value, np.generic):
            value = value.item()
        kind = type(value)
        if isinstance(value, Enum):
            return {_TAG: ["name", list(_name_of(value))]}
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        if kind is list:
            return items(value)
        if kind is dict and _TAG not in value and all(type(key) is str for key in value):
            return {key: self._write(f"{path}/{key}", item, taken, level + 1) for key, item in value.items()}
        if isinstance(value, np.ndarray):
            if self._arrays is None or not _holds_numbers(value):
                raise NotPlain
            taken[path] = value
            return {_TAG: ["array", path]}
        if kind is deque:
            return {_TAG: ["deque", [items(value), value.maxlen]]}
        if kind is defaultdict:
            return {_TAG: ["defaultdict", items([value.default_factory, *map(list, value.items())])]}
        for name, (container, contents) in _CONTAINERS.items():
            if kind is container:
                return {_TAG: [name, items(contents(value))]}
        if isinstance(value, PurePath):
            return {_TAG: ["path", str(value)]}
        if kind is functools.partial:
            return {_TAG: ["partial", items([value.func, list(value.args), dict(value.keywords)])]}
        if isinstance(value, types.MethodType) and value.__self__ is self._owner:
            return {_TAG: ["method", value.__name__]}
        return {_TAG: ["name", list(_name_of(value))]}


def read(value: Any, arrays: Mapping[str, Array], owner: Any = None) -> Any:
    """The inverse of `Writer.write`.

    Raises:
        MissingArray: an array is not in `arrays`.
        NameNotFound: a function, a class or a method no longer exists.
    """
    if isinstance(value, list):
        return [read(item, arrays, owner) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() != {_TAG}:
        return {key: read(item, arrays, owner) for key, item in value.items()}
    kind, written = value[_TAG]
    if kind == "array":
        if written not in arrays:
            raise MissingArray
        return arrays[written]
    try:
        if kind == "name":
            return _imported(*written)
        if kind == "method":
            return getattr(owner, written)
    except (ImportError, AttributeError) as error:
        raise NameNotFound(str(error)) from error
    return _MAKERS[kind](read(written, arrays, owner))


def _pairs(value: Mapping[Any, Any]) -> list[list[Any]]:
    return [[key, item] for key, item in value.items()]


def _with_pairs(container: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda pairs: container(dict(pairs))


_CONTAINERS: dict[str, tuple[type, Callable[[Any], Any]]] = {
    "tuple": (tuple, list),
    "set": (set, list),
    "frozenset": (frozenset, list),
    "dict": (dict, _pairs),
    "OrderedDict": (OrderedDict, _pairs),
    "Counter": (Counter, _pairs),
}
_MAKERS: dict[str, Callable[[Any], Any]] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "dict": dict,
    "OrderedDict": OrderedDict,
    "Counter": _with_pairs(Counter),
    "deque": lambda written: deque(*written),
    "defaultdict": lambda written: defaultdict(written[0], written[1:]),
    "path": Path,
    "partial": lambda written: functools.partial(written[0], *written[1], **written[2]),
}


def _name_of(value: Any) -> tuple[str, str]:
    """Module and name by which `value` can be imported; raises `NotPlain` if they give another object."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if isinstance(value, Enum):
        name = f"{type(value).__qualname__}.{value.name}"
    if not isinstance(module, str) or not isinstance(name, str):
        raise NotPlain
    try:
        found = _imported(module, name)
    except (ImportError, AttributeError):
        found = None
    if found is not value:
        raise NotPlain
    return module, name


def _imported(module: str, name: str) -> Any:
    return functools.reduce(getattr, name.split("."), importlib.import_module(module))


def _holds_numbers(array: Array) -> bool:
    try:
        return dtype_of(array.dtype.name).kind != "c"
    except WireError:
        return False
