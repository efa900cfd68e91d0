"""The state of callbacks: their attributes, as far as they can be written as JSON."""

from __future__ import annotations

import functools
import importlib
import json
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from pathlib import Path, PurePath
from typing import Any

import keras
import numpy as np

from elasticcb.callbacks.attribute_use import GIVEN
from elasticcb.errors import WireError
from elasticcb.rpc.tensors import Array, dtype_of

# Set by the caller of the hooks, or by `keep_files`.
_UNSET = object()
_GIVEN = GIVEN | {"append", "append_header"}
_MOST_TEXT = 1 << 20  # characters; the state of a callback that has more is saved with the arrays
_TAG = "elasticcb"  # the only key of a dict that represents a value JSON lacks: [kind, content]
_MOST_LEVELS = 50  # of nested containers


def plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """The plain values except arrays, as JSON values."""
    return _written(Writer(), "", values)[0]


def keep_files(callbacks: Sequence[Any]) -> None:
    """Call before `on_train_begin`: a `CSVLogger`, which starts a new file there, must append to its existing file."""
    for callback in callbacks:
        if isinstance(callback, keras.callbacks.CSVLogger):
            callback.append = True


class CallbackStates:
    """Saves the state of callbacks of a process, and restores it in another process.

    Create it before `on_train_begin`, and call `begin` afterwards. Attributes that have not changed since the callback
    was constructed are not saved: another process constructs them in the same way, and they may contain secrets. The
    same is true of functions that a callback holds after `on_train_begin`.

    A function that is assigned later is saved by name: `EarlyStopping` derives a function and a number together, and
    would derive the number a second time if the function were missing. If such a function can't be imported by name,
    nothing of its callback is saved.
    """

    def __init__(self, callbacks: Sequence[Any], say: Callable[[str], None]) -> None:
        self._callbacks, self._say = list(callbacks), say
        self._made_with = [_written(Writer(each), "", vars(each))[0] for each in self._callbacks]
        self._given: list[dict[str, Any]] = [{} for _ in self._callbacks]
        self._told: set[int] = set()

    def begin(self) -> None:
        """Call after `on_train_begin`."""
        for place, callback in enumerate(self._callbacks):
            self._given[place] = {name: value for name, value in vars(callback).items() if _is_function(value)}
            now, _ = _written(Writer(callback), "", vars(callback))
            made_with = self._made_with[place]
            # An attribute that has changed once is always saved, even if it returns to its initial value.
            self._made_with[place] = {
                name: value for name, value in now.items() if made_with.get(name, _UNSET) == value
            }

    def save(self, arrays: dict[str, Array]) -> list[Any]:
        """For each callback, its class and attributes as JSON values; None for callbacks that can't be saved.

        Args:
            arrays: receives the arrays, by names that replace them; also large states, as text.
        """
        saved: list[Any] = []
        for place, callback in enumerate(self._callbacks):
            state: Any = self._state_of(place, callback, arrays)
            text = json.dumps(state).encode()
            if len(text) > _MOST_TEXT:
                arrays[str(place)] = np.frombuffer(text, np.uint8)
                state = str(place)
            saved.append([type(callback).__name__, state])
        return saved

    def _state_of(self, place: int, callback: Any, arrays: dict[str, Array]) -> dict[str, Any] | None:
        given = self._given[place]
        values = {
            name: value
            for name, value in vars(callback).items()
            if name not in _GIVEN and (value is None or given.get(name) is not value)
        }
        taken: dict[str, Array] = {}
        state, left = _written(Writer(callback, taken), str(place), values)
        made_with = self._made_with[place]
        state = {name: value for name, value in state.items() if made_with.get(name, _UNSET) != value}
        nameless = [name for name in left if _is_function(values[name])]
        if nameless:
            if place not in self._told:
                self._told.add(place)
                self._say(
                    f"The state of {type(callback).__name__} can't be saved: after training started, its attribute "
                    f"{nameless[0]} was set to a function that can't be imported by name "
                    f"({_shown(values[nameless[0]])}). If the job is resumed, this callback starts with its initial "
                    "state. Use a top-level function of a module or a method of the callback instead."
                )
            return None
        arrays.update(taken)
        return state

    def restore(self, saved: Sequence[Any], arrays: Mapping[str, Array]) -> None:
        """Restores the result of `save`, each state to the next callback of its class; attributes with missing arrays
        are not changed."""
        left = list(saved)
        for callback in self._callbacks:
            found = next((entry for entry in left if entry[0] == type(callback).__name__), None)
            if found is None:
                continue
            left.remove(found)
            state = found[1] or {}
            if isinstance(state, str):
                state = json.loads(arrays[state].tobytes()) if state in arrays else {}
            try:
                values = _values(callback, state, arrays)
            except NameNotFound as error:
                self._say(
                    f"The state of {type(callback).__name__} can't be restored: {error}. It starts with its initial "
                    "state."
                )
                continue
            for name, value in values.items():
                setattr(callback, name, value)


def _written(writer: Writer, path: str, values: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The values that can be written, and the names of the others."""
    written, left = {}, []
    for name, value in values.items():
        try:
            written[name] = writer.write(f"{path}/{name}", value)
        except NotPlain:
            left.append(name)
    return written, left


def _values(callback: Any, state: Mapping[str, Any], arrays: Mapping[str, Array]) -> dict[str, Any]:
    values = {}
    for name, written in state.items():
        try:
            values[name] = read(written, arrays, callback)
        except MissingArray:
            continue
    return values


def _is_function(value: Any) -> bool:
    if isinstance(value, functools.partial):
        return _is_function(value.func)
    return isinstance(value, types.FunctionType)


def _shown(function: Any) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return str(function.__qualname__)


class NotPlain(Exception):
    """A value that can't be represented in JSON."""


class NameNotFound(Exception):
    """A function or class that existed when a value was written can't be imported."""


class MissingArray(Exception):
    """An array is missing."""


class Writer:
    """Converts the values of one object to JSON values: numbers, text, containers, arrays, importable objects by name.

    Nothing is pickled: reading can't run code, except by importing a name.

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
    "Counter": lambda pairs: Counter(dict(pairs)),
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
