"""What callbacks remember: their attributes, as far as they can be written as JSON (serialization/plain_values.py)."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras

from elasticcb.rpc.tensors import Array
from elasticcb.serialization.plain_values import MissingArray, NameNotFound, NotPlain, Writer, read

# Given by whoever calls the hooks, or by `keep_files`.
_UNSET = object()
_GIVEN = frozenset({"params", "model", "_model", "validation_data", "append", "append_header"})


def plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Those of `values` that are plain, and no arrays, as JSON values."""
    return _written(Writer(), "", values)[0]


def keep_files(callbacks: Sequence[Any]) -> None:
    """Before `on_train_begin`: a `CSVLogger`, which begins a file there, is to go on with the one that it has."""
    for callback in callbacks:
        if isinstance(callback, keras.callbacks.CSVLogger):
            callback.append = True


class CallbackStates:
    """Saves what the callbacks of a process remember, and gives it back to those of another.

    Make it before `on_train_begin`, and call `begin` after it: what callbacks were made with and have not changed,
    another process gives them, too, and it is not saved; it may hold what nobody else should read. So it is with
    functions that they hold after `on_train_begin`.

    A function that a callback has come to hold later is saved by its name: `EarlyStopping` derives one together with a
    number, and the number without the function would be derived a second time. Where such a function can't be
    imported by a name, nothing of its callback is saved.

    Args:
        callbacks: of this process, in their order.
        say: shows a line to the user.
    """

    def __init__(self, callbacks: Sequence[Any], say: Callable[[str], None]) -> None:
        self._callbacks, self._say = list(callbacks), say
        self._made_with = [_written(Writer(each), "", vars(each))[0] for each in self._callbacks]
        self._given: list[dict[str, Any]] = [{} for _ in self._callbacks]
        self._told: set[int] = set()

    def begin(self) -> None:
        """`on_train_begin` has run."""
        for place, callback in enumerate(self._callbacks):
            self._given[place] = {name: value for name, value in vars(callback).items() if _is_function(value)}
            now, _ = _written(Writer(callback), "", vars(callback))
            made_with = self._made_with[place]
            # An attribute that has changed once is always saved, even if it returns to its first value.
            self._made_with[place] = {
                name: value for name, value in now.items() if made_with.get(name, _UNSET) == value
            }

    def save(self, arrays: dict[str, Array] | None = None) -> list[Any]:
        """Of each callback its class and its attributes, as JSON values; None for all that can't be saved.

        Args:
            arrays: takes up the arrays, by names that stand in their places; None: they are left out.
        """
        return [
            [type(callback).__name__, self._state_of(place, callback, arrays)]
            for place, callback in enumerate(self._callbacks)
        ]

    def _state_of(self, place: int, callback: Any, arrays: dict[str, Array] | None) -> dict[str, Any] | None:
        given = self._given[place]
        values = {
            name: value
            for name, value in vars(callback).items()
            if name not in _GIVEN and (value is None or given.get(name) is not value)
        }
        taken: dict[str, Array] | None = None if arrays is None else {}
        state, left = _written(Writer(callback, taken), str(place), values)
        made_with = self._made_with[place]
        state = {name: value for name, value in state.items() if made_with.get(name, _UNSET) != value}
        nameless = [name for name in left if _is_function(values[name])]
        if nameless:
            if place not in self._told:
                self._told.add(place)
                self._say(
                    f"What {type(callback).__name__} remembers can't be saved: its attribute {nameless[0]} became a "
                    f"function without a name to import it by ({_shown(values[nameless[0]])}) after training had "
                    "begun. If the job is resumed, this callback starts as at the beginning of training. Use a "
                    "function at the top level of a module, or a method of the callback, instead."
                )
            return None
        if arrays is not None and taken is not None:
            arrays.update(taken)
        return state

    def restore(self, saved: Sequence[Any], arrays: Mapping[str, Array]) -> None:
        """Sets what `save` gave, each state to the next callback of its class; attributes with arrays that are missing
        stay as they are."""
        left = list(saved)
        for callback in self._callbacks:
            found = next((entry for entry in left if entry[0] == type(callback).__name__), None)
            if found is None:
                continue
            left.remove(found)
            try:
                values = _values(callback, found[1] or {}, arrays)
            except NameNotFound as error:
                self._say(
                    f"What {type(callback).__name__} remembered can't be restored: {error}. It starts as at the "
                    "beginning of training."
                )
                continue
            for name, value in values.items():
                setattr(callback, name, value)


def _written(writer: Writer, path: str, values: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Those of `values` that can be written, and the names of the others."""
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
