"""The state of callbacks that run on the caller's objects and on their copies on workers, on its way between them.

With one worker, hooks on the master and on the worker take turns: never both at the same time. So what a hook left is
sent before a hook elsewhere runs, and all hooks see one state, as in `fit`. It is the attributes of the callbacks, and
variables of enclosing functions and modules that hooks change. Objects are changed in place where they can be, so that
others who refer to them see the change.
"""

from __future__ import annotations

import functools
import itertools
import logging
import threading
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any

import numpy as np

from elasticcb.callbacks.attribute_use import GIVEN, Slot, use_of
from elasticcb.callbacks.placement import overridden_hooks
from elasticcb.callbacks.shared_attributes import Change, Key, Placed, is_same
from elasticcb.errors import ElasticCBError
from elasticcb.keras_private import KerasSaveable
from elasticcb.serialization import carry
from elasticcb.serialization.object_paths import references, slots_of
from elasticcb.serialization.process_state import Draws, draws_of

logger = logging.getLogger(__name__)

_LARGE_BYTES = 1 << 20  # of arrays that no hook changes, and that are not sent again
_WHAT = "The state of callbacks"
_Key = str | tuple[str, int]  # the name of an attribute; or that of a variable, and which one of that name


@dataclass
class Sent:
    """A message.

    Attributes:
        values: of each callback.
        left: for each callback, attributes that stay where they are: with their types if they can't be sent, else "".
        variables: values of variables of the program that have changed, by number.
        attributes: the same of attributes (shared_attributes.py).
        random: the random states of Python, NumPy, PyTorch and Keras, which hooks share; None: they don't.
    """

    values: list[dict[_Key, Any]]
    left: list[dict[str, str]]
    variables: dict[int, Any]
    attributes: dict[Key, Change]
    random: dict[str, Any] | None = None


class SharedState:
    """The state of callbacks in this process.

    Args:
        callbacks: the same ones in each process, in order.
        whole: whether to send all attributes, the variables that hooks change, and random states; else only
            `Placed.follows`.
        model: what they refer to as the model; it does not travel.
        variables: sent with it.
    """

    def __init__(self, callbacks: Iterable[Placed], whole: bool, model: Any, variables: SharedVariables) -> None:
        self._states = [_State(each.callback, None if whole else each.follows) for each in callbacks]
        self._model, self._variables, self._whole, self._draws = model, variables, whole, Draws()
        self._kept: list[set[_Key]] = [set() for _ in self._states]  # what was left out of the last message

    def dump(self, attributes: Mapping[Key, Change] | None = None) -> tuple[bytes, list[dict[str, str]]]:
        """The state, with changed attributes of other objects (shared_attributes.py), and `Sent.left`."""
        values, left = zip(*(state.get() for state in self._states), strict=True) if self._states else ((), ())
        random = self._draws.read() if self._whole and self._states else None
        sent = Sent([*values], [*left], self._variables.changed(), dict(attributes or {}), random)
        self._kept = [set(each) for each in left]
        try:
            return self._dumped(sent), sent.left
        except ElasticCBError:
            for key in [key for key, change in sent.attributes.items() if not self._can_be_sent(change)]:
                logger.warning("%s can't be sent to other processes.", key[1])
                del sent.attributes[key]
            for own, stays, kept in zip(sent.values, sent.left, self._kept, strict=True):
                for name in [name for name, value in own.items() if not self._can_be_sent(value)]:
                    kind = type(own.pop(name)).__name__
                    kept.add(name)
                    stays[name if isinstance(name, str) else name[0]] = kind
            return self._dumped(sent), sent.left

    def _dumped(self, value: Any) -> bytes:
        return carry.dumps(value, _WHAT, references(self._model))

    def _can_be_sent(self, value: Any) -> bool:
        try:
            return bool(self._dumped(value))
        except ElasticCBError:
            return False

    def read(self, data: bytes) -> Sent:
        """The message that another process dumped."""
        sent: Sent = carry.loads(data, references(self._model))
        return sent

    def adopt(self, sent: Sent) -> None:
        """Sets the callbacks and variables here to the state."""
        if sent.random is not None:
            self._draws.write(sent.random)
        self._variables.adopt(sent.variables)
        adopted: dict[int, Any] = {}
        for state, values, left, kept in zip(self._states, sent.values, sent.left, self._kept, strict=True):
            state.set({key: value for key, value in values.items() if key not in kept}, kept | left.keys(), adopted)


class _State:
    """The state of one callback."""

    def __init__(self, callback: Any, only: set[Slot] | None) -> None:
        use = use_of(callback, overridden_hooks(callback))
        self._own, self._only = vars(callback), only
        self._fixed = self._own.keys() - use.changes if use.is_whole else set()
        counts: dict[str, Iterator[int]] = {}
        self._variables = {
            (each.name, next(counts.setdefault(each.name, itertools.count()))): each
            for each in use.variables
            if only is None or each in only
        }

    def get(self) -> tuple[dict[_Key, Any], dict[str, str]]:
        """What to send, and attributes that stay."""
        own = self._attributes()
        left = {name: "" for name, value in own.items() if name in self._fixed and _is_large(value)}
        values: dict[_Key, Any] = {name: value for name, value in own.items() if name not in left}
        return values | {key: variable.value for key, variable in self._variables.items()}, left

    def set(self, values: Mapping[_Key, Any], left: Set[_Key], adopted: dict[int, Any]) -> None:
        for name in self._attributes().keys() - values.keys() - left:
            del self._own[name]
        for key, value in values.items():
            if isinstance(key, str):
                self._own[key] = _adopt(self._own.get(key), value, adopted)
            elif key in self._variables:
                self._variables[key].set(_adopt(self._variables[key].value, value, adopted))

    def _attributes(self) -> dict[str, Any]:
        return {
            name: value
            for name, value in self._own.items()
            if name not in GIVEN
            and (self._only is None or name in self._only)
            and not isinstance(value, types.FunctionType)  # a hook, or what it calls: it is where it is needed
        }


def _is_large(value: Any) -> bool:
    parts = value if isinstance(value, (tuple, list)) else (value,)
    # Classes say what an object is: proxies of the user's may have any attribute.
    return sum(int(part.nbytes) for part in parts if hasattr(type(part), "nbytes")) >= _LARGE_BYTES


def _adopt(mine: Any, theirs: Any, adopted: dict[int, Any]) -> Any:
    """`mine`, changed so that it equals `theirs` of another process; or `theirs`, if it is of another kind.

    Args:
        adopted: what is kept here, by the identities of what arrived and of what is kept.
    """
    if id(theirs) in adopted:
        return adopted[id(theirs)]
    if mine is theirs:  # what both refer to, such as the model
        return mine
    kind, own = type(mine), _variables_of(mine)
    draws, other_draws = draws_of(mine), draws_of(theirs)
    if kind is type(theirs) and draws is not None and other_draws is not None:
        draws[1](other_draws[0]())
        return mine
    if kind is type(theirs) and kind in (functools.partial, types.MethodType):
        for one, other in zip(_bound(mine), _bound(theirs), strict=False):
            _adopt(one, other, adopted)
        return mine
    if kind is type(theirs) and kind in _LOCKS:
        return mine
    is_variable = own is not None
    alike = kind is type(theirs) and (kind in _CONTAINERS or is_variable or _is_plain(mine))
    if alike and is_variable:
        alike = [tuple(each.shape) for each in own] == [tuple(each.shape) for each in _variables_of(theirs)]
    if not alike or id(mine) in adopted:
        adopted[id(theirs)] = theirs
        return theirs
    adopted[id(theirs)] = adopted[id(mine)] = mine
    if is_variable:
        for one, other in zip(own, _variables_of(theirs), strict=True):
            one.assign(other.numpy())
    elif kind in (list, deque):
        elements = [_adopt(*each, adopted) for each in zip([*mine, *[None] * len(theirs)], theirs, strict=False)]
        mine.clear()
        mine.extend(elements)
    elif kind is set:
        mine.clear()
        mine.update(theirs)
    else:
        items, new = (mine, theirs) if kind in _CONTAINERS else (vars(mine), vars(theirs))
        values = {key: _adopt(items.get(key), value, adopted) for key, value in new.items()}
        items.clear()
        items.update(values)
    return mine


def _bound(function: Any) -> list[Any]:
    """What a partial, or a method, gives to its function."""
    return (
        [function.__self__]
        if isinstance(function, types.MethodType)
        else [function.func, *function.args, *function.keywords.values()]
    )


_LOCKS = (type(threading.Lock()), type(threading.RLock()))
_CONTAINERS = (list, deque, set, dict, Counter, OrderedDict, defaultdict)


def _variables_of(thing: Any) -> Any:
    """The variables of a Keras object, or a variable itself; None: it is something else."""
    if hasattr(type(thing), "assign") and hasattr(type(thing), "numpy"):
        return [thing]
    return getattr(thing, "variables", None) if isinstance(thing, KerasSaveable) else None


def _is_plain(thing: Any) -> bool:
    """Whether it is an object whose state are its attributes."""
    kind = type(thing)
    by_default = kind.__reduce_ex__ is object.__reduce_ex__ and kind.__reduce__ is object.__reduce__
    fixed = (type, types.ModuleType, types.FunctionType, types.MethodType)
    return by_default and hasattr(thing, "__dict__") and not isinstance(thing, fixed) and not any(slots_of(kind))


class SharedVariables:
    """Variables of a program besides the weights, which losses, layers, data and callbacks may share.

    Args:
        variables: by number, the same in each process.
    """

    def __init__(self, variables: Mapping[int, Any]) -> None:
        self._variables = dict(variables)
        self._known = self._read()
        self._ever: set[int] = set()  # those that have changed, and may be back at the first value

    def __len__(self) -> int:
        return len(self._variables)

    def _read(self) -> dict[int, Any]:
        return {number: np.array(variable.numpy()) for number, variable in self._variables.items()}

    def differing(self) -> list[int]:
        """Those that differ from what they were at first, or from what another process has sent."""
        return [number for number, value in self._read().items() if not is_same(value, self._known[number])]

    def changed(self) -> dict[int, Any]:
        """The values of those that have ever differed."""
        self._ever.update(self.differing())
        return {number: value for number, value in self._read().items() if number in self._ever}

    def follow(self, values: Mapping[int, Any]) -> None:
        """These values of another process do not count as changed here."""
        self._known |= {number: value for number, value in values.items() if number in self._variables}

    def names_of(self, numbers: Iterable[int]) -> list[str]:
        return [str(getattr(self._variables[n], "path", "") or self._variables[n].name) for n in numbers]

    def adopt(self, values: Mapping[int, Any]) -> None:
        """Sets variables to values of another process. A hook may set them back to what they were at first."""
        for number, value in values.items():
            if number in self._variables:
                self._ever.add(number)
                self._variables[number].assign(value)
