"""Classes of the user's that travel by value: filled with their attributes, without calling what runs when a class is
defined (`__init_subclass__`, `__set_name__`, methods of metaclasses, and what makes the members of an enum)."""

from __future__ import annotations

import abc
import contextlib
import functools
import types
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any

import cloudpickle

_pickling = cloudpickle.cloudpickle


def reduce_class(kind: type, reduced: Any) -> Any:
    """What `cloudpickle` makes of a class, `reduced`, if it goes by name; else how to make it from its attributes."""
    if not isinstance(reduced, tuple) or reduced[-1] is not _pickling._class_setstate:
        return reduced
    number = _pickling._get_or_create_tracker_id(kind)
    early = {name: vars(kind)[name] for name in ("__module__", "__orig_bases__", "__slots__") if name in vars(kind)}
    attributes, _ = _pickling._class_getstate(kind)
    attributes = {
        name: value for name, value in attributes.items() if not isinstance(value, types.MemberDescriptorType)
    }
    if issubclass(kind, Enum):  # without the combinations of flags that were used, which are made again
        named = {id(member) for member in vars(kind)["_member_map_"].values()}
        values = attributes.get("_value2member_map_", {})
        attributes["_value2member_map_"] = {value: each for value, each in values.items() if id(each) in named}
    return _make_class, (type(kind), kind.__name__, kind.__bases__, early, number), attributes, None, None, _fill_class


def _make_class(metaclass: Any, name: str, bases: tuple[type, ...], early: Mapping[str, Any], number: str) -> type:
    known: type | None = _pickling._DYNAMIC_CLASS_TRACKER_BY_ID.get(number)
    if known is not None:
        return known
    # The last `__new__` that is not written in Python makes the class.
    maker = next(each for each in metaclass.__mro__ if each is abc.ABCMeta or _has_native_new(each))
    with _without_init_subclass(bases):
        made: type = maker.__new__(metaclass, name, bases, dict(early))
    tracked: type = _pickling._lookup_class_or_track(number, made)
    return tracked


def _has_native_new(kind: type) -> bool:
    return isinstance(vars(kind).get("__new__"), types.BuiltinFunctionType)


@contextlib.contextmanager
def _without_init_subclass(bases: tuple[type, ...]) -> Iterator[None]:
    """Hides that of classes which travel by value: the effects of its calls travel too."""
    name = "__init_subclass__"
    ancestors = dict.fromkeys(each for base in bases for each in base.__mro__)
    own = [each for each in ancestors if each in _pickling._DYNAMIC_CLASS_TRACKER_BY_CLASS and name in vars(each)]
    methods = {each: vars(each)[name] for each in own}
    for each in own:
        type.__delattr__(each, name)
    try:
        yield
    finally:
        for each, method in methods.items():
            type.__setattr__(each, name, method)


def _fill_class(kind: type, attributes: Mapping[str, Any]) -> None:
    for name, value in attributes.items():
        if name != "_abc_impl":
            type.__setattr__(kind, name, value)
    if "__firstlineno__" in attributes:  # which setting others removes
        type.__setattr__(kind, "__firstlineno__", attributes["__firstlineno__"])
    for each in attributes.get("_abc_impl", ()):
        abc.ABCMeta.register(kind, each)  # type: ignore[arg-type]


def reduce_member(pickler: Any, member: Any) -> Any:
    """Members of enums that travel by value: with their attributes, and not by their values, which may be equal to
    nothing but themselves."""
    kind = type(member)
    maker = next(each for each in kind.__mro__ if _has_native_new(each))
    is_named = vars(kind)["_member_map_"].get(member._name_) is member
    if _pickling._should_pickle_by_reference(kind) or not is_named or not _can_be_made(maker):
        return NotImplemented
    arguments = () if maker is object else maker.__getnewargs__(member)  # type: ignore[attr-defined]
    return _make_member, (kind, member._name_, maker, arguments), dict(vars(member)), None, None, _fill_member


def _can_be_made(maker: type) -> bool:
    return maker is object or hasattr(maker, "__getnewargs__")


def _make_member(kind: Any, name: str, maker: Any, arguments: tuple[Any, ...]) -> Any:
    found = vars(kind).get("_member_map_", {}).get(name)
    return maker.__new__(kind, *arguments) if found is None else found


def _fill_member(member: Any, state: Mapping[str, Any]) -> None:
    for name, value in state.items():
        vars(member).setdefault(name, value)


def reduce_cached(pickler: Any, function: Any) -> Any:
    """A function of the user's with a cache (`functools.cache`): with an empty one."""
    by_value = ("__main__", *cloudpickle.list_registry_pickle_by_value())
    if "<locals>" not in function.__qualname__ and function.__module__ not in by_value:
        return NotImplemented
    own = {name: value for name, value in vars(function).items() if name not in ("__wrapped__", "cache_parameters")}
    parameters = function.cache_parameters()
    return _make_cached, (function.__wrapped__, parameters["maxsize"], parameters["typed"]), own


def _make_cached(function: Any, size: int | None, typed: bool) -> Any:
    return functools.lru_cache(size, typed)(function)
