"""What a callback remembers, as far as it is plain: numbers, texts, arrays, and lists and dicts of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from elasticcb.errors import WireError
from elasticcb.tensors import Array, dtype_of

# Given by whoever calls the hooks, or by `keep_files`.
_GIVEN = frozenset({"params", "model", "_model", "validation_data", "append", "append_header"})
_ARRAY = "elasticcb.array"  # the one key of a dict that stands for an array, with its name


def plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Those of `values` that are plain, and no arrays, as JSON values."""
    return _saved("", values, None)


def saved_states(callbacks: Sequence[Any], arrays: dict[str, Array] | None = None) -> list[Any]:
    """Of each callback its class and its attributes that are plain, as JSON values; others are left out.

    Args:
        arrays: takes up the arrays, by names that stand in their places; None: they are left out.
    """
    states: list[Any] = []
    for place, callback in enumerate(callbacks):
        values = {name: value for name, value in vars(callback).items() if name not in _GIVEN}
        states.append([type(callback).__name__, _saved(str(place), values, arrays)])
    return states


def keep_files(callbacks: Sequence[Any]) -> None:
    """Before `on_train_begin`: a `CSVLogger`, which begins a file there, is to go on with the one that it has."""
    for callback in callbacks:
        if isinstance(callback, keras.callbacks.CSVLogger):
            callback.append = True


def restore_states(callbacks: Sequence[Any], saved: Sequence[Any], arrays: Mapping[str, Array]) -> None:
    """Sets what `saved_states` gave, each state to the next callback of its class; attributes with arrays that are
    missing stay as they are."""
    left = list(saved)
    for callback in callbacks:
        found = next((entry for entry in left if entry[0] == type(callback).__name__), None)
        if found is None:
            continue
        left.remove(found)
        for name, value in found[1].items():
            try:
                setattr(callback, name, _restored(value, arrays))
            except KeyError:
                continue


def _restored(value: Any, arrays: Mapping[str, Array]) -> Any:
    if isinstance(value, list):
        return [_restored(item, arrays) for item in value]
    if isinstance(value, dict):
        if value.keys() == {_ARRAY}:
            return arrays[value[_ARRAY]]
        return {key: _restored(item, arrays) for key, item in value.items()}
    return value


def _saved(path: str, values: Mapping[str, Any], arrays: dict[str, Array] | None) -> dict[str, Any]:
    """Those of `values` that are plain."""
    found = {}
    for name, value in values.items():
        own: dict[str, Array] | None = None if arrays is None else {}
        known, saved = _plain(f"{path}/{name}", value, own)
        if known:
            found[name] = saved
            if arrays is not None and own is not None:
                arrays.update(own)
    return found


def _plain(path: str, value: Any, arrays: dict[str, Array] | None) -> tuple[bool, Any]:
    """Whether a value is plain, and what it is in JSON; the arrays in it are added to `arrays`."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, (bool, int, float, str)):
        return True, value
    if isinstance(value, np.ndarray):
        if arrays is None or not _can_be_kept(value):
            return False, None
        arrays[path] = value
        return True, {_ARRAY: path}
    if isinstance(value, list):
        items = [_plain(f"{path}/{i}", item, arrays) for i, item in enumerate(value)]
        return all(known for known, _ in items), [item for _, item in items]
    if isinstance(value, Mapping) and type(value) is dict and all(isinstance(key, str) for key in value):
        pairs = {key: _plain(f"{path}/{key}", item, arrays) for key, item in value.items()}
        return all(known for known, _ in pairs.values()), {key: item for key, (_, item) in pairs.items()}
    return False, None


def _can_be_kept(array: Array) -> bool:
    """Whether it holds numbers, as weights do."""
    try:
        return dtype_of(array.dtype.name).kind != "c"
    except WireError:
        return False
