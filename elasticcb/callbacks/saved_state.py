"""What a callback remembers, as far as it is plain: numbers, texts, and lists and dicts of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

# Given by whoever calls the hooks, or by `keep_files`.
_GIVEN = frozenset({"params", "model", "_model", "validation_data", "append", "append_header"})


def saved_state(callback: Any) -> dict[str, Any]:
    """The attributes of `callback` that are plain, as JSON values; others are left out."""
    return plain({name: value for name, value in vars(callback).items() if name not in _GIVEN})


def plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Those of `values` that are plain."""
    found = {name: _plain(value) for name, value in values.items()}
    return {name: value for name, (known, value) in found.items() if known}


def saved_states(callbacks: Sequence[Any]) -> list[Any]:
    """Of each callback its class and `saved_state`."""
    return [[type(callback).__name__, saved_state(callback)] for callback in callbacks]


def keep_files(callbacks: Sequence[Any]) -> None:
    """Before `on_train_begin`: a `CSVLogger`, which begins a file there, is to go on with the one that it has."""
    for callback in callbacks:
        if isinstance(callback, keras.callbacks.CSVLogger):
            callback.append = True


def restore_states(callbacks: Sequence[Any], saved: Sequence[Any]) -> None:
    """Sets what `saved_states` gave; callbacks of other classes than then stay as they are."""
    for callback, (kind, state) in zip(callbacks, saved, strict=False):
        if type(callback).__name__ == kind:
            for name, value in state.items():
                setattr(callback, name, value)


def _plain(value: Any) -> tuple[bool, Any]:
    """Whether a value is plain, and what it is in JSON."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, (bool, int, float, str)):
        return True, value
    if isinstance(value, list):
        items = [_plain(item) for item in value]
        return all(known for known, _ in items), [item for _, item in items]
    if isinstance(value, Mapping) and type(value) is dict and all(isinstance(key, str) for key in value):
        pairs = {key: _plain(item) for key, item in value.items()}
        return all(known for known, _ in pairs.values()), {key: item for key, (_, item) in pairs.items()}
    return False, None
