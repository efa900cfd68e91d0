"""Where an object is in a program, for messages: `model.layers[2].client`. References to a placed model and its parts,
which functions, arguments and results have instead of carrying them.
"""

from __future__ import annotations

import contextlib
import types
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import keras
import numpy as np

from elasticcb.keras_private import layers_of
from elasticcb.optimizers.traits import model_optimizers


def references(model: keras.Model | None) -> list[Any]:
    """The model, its optimizers, layers and weights, in the same order in every process."""
    if model is None:
        return []
    return [model, *model_optimizers(model), *layers_of(model)[1:], *model.weights]


_MOST = 200_000  # objects that are looked at
_CONTAINERS: tuple[Any, ...] = (list, tuple, set, frozenset, deque)


def path_of(roots: Mapping[str, Any], target: Any) -> tuple[str, str]:
    """The shortest path from one of the named roots to `target`, and the module whose global the path goes through
    last; "" if it goes through none. Without a path, the names of the roots."""
    pending = deque((value, name, "") for name, value in roots.items())
    seen: dict[int, Any] = {}
    while pending and len(seen) < _MOST:
        item, path, module = pending.popleft()
        if item is target:
            return path, module
        if id(item) in seen:
            continue
        seen[id(item)] = item
        for value, step, of_module in _parts(item):
            pending.append((value, of_module or f"{path}{step}", of_module.rpartition(".")[0] or module))
    return ", ".join(roots), ""


def objects_in(roots: Any) -> Iterator[Any]:
    """The objects that others lead to, except through layers, variables and optimizers of Keras."""
    pending: list[Any] = [roots]
    seen: dict[int, Any] = {}
    while pending and len(seen) < _MOST // 10:
        item = pending.pop()
        if id(item) not in seen:
            seen[id(item)] = item
            yield item
            if not isinstance(item, (keras.layers.Layer, keras.Variable, keras.optimizers.Optimizer)):
                pending += [value for value, _, _ in _parts(item)]


def _parts(item: Any) -> Iterator[tuple[Any, str, str]]:
    """Objects inside of another, with the step that leads to each; or, for globals of a module, the whole path."""
    with contextlib.suppress(Exception):  # of a user's property
        yield from _parts_of_any(item)


def _parts_of_any(item: Any) -> Iterator[tuple[Any, str, str]]:
    kind = type(item)
    if issubclass(kind, (str, bytes, int, float, types.NoneType, types.ModuleType)):
        return
    if isinstance(item, keras.Model):
        for index, layer in enumerate(item.layers):
            yield layer, f".layers[{index}]", ""
    # Methods of the user's own containers may read files.
    container = next((each for each in _CONTAINERS if issubclass(kind, each)), None)
    if issubclass(kind, dict):
        yield from ((value, f"[{key!r}]", "") for key, value in dict.items(item))
    elif container is not None:
        yield from ((value, f"[{index}]", "") for index, value in enumerate(container.__iter__(item)))
    elif kind is np.ndarray and item.dtype == object:
        yield from ((value, f"[{index}]", "") for index, value in enumerate(item.flat))
    elif kind is types.FunctionType:
        yield from _parts_of_function(item)
        return
    attributes = dict(getattr(item, "__dict__", {}))
    attributes |= attributes.get("_modules", {}) if isinstance(attributes.get("_modules"), dict) else {}
    if not issubclass(kind, type):
        attributes |= {name: getattr(item, name) for name in slots_of(kind) if hasattr(item, name)}
    for private in (False, True):
        for name, value in attributes.items():
            if name.startswith("_") is private:
                yield value, f".{name}", ""
    if not issubclass(kind, type) and not kind.__module__.startswith(("keras", "tensorflow", "builtins")):
        yield kind, f".<class {kind.__name__}>", ""


def slots_of(kind: type) -> Iterator[str]:
    """Attributes outside of `__dict__`: `__slots__`, and those of partials, methods and properties."""
    for each in kind.__mro__:
        yield from (name for name, value in vars(each).items() if isinstance(value, types.MemberDescriptorType))


def _parts_of_function(function: types.FunctionType) -> Iterator[tuple[Any, str, str]]:
    names = function.__code__.co_freevars
    for name, cell in zip(names, function.__closure__ or (), strict=True):
        try:
            yield cell.cell_contents, f".{name}", ""
        except ValueError:
            continue  # not set yet
    yield from ((value, "", "") for value in function.__defaults__ or ())
    pending = [function.__code__]
    while pending:
        code = pending.pop()
        pending += [each for each in code.co_consts if isinstance(each, types.CodeType)]
        for name in code.co_names:
            if name in function.__globals__:
                module = function.__globals__.get("__name__") or "__main__"
                yield function.__globals__[name], "", f"{module}.{name}"
