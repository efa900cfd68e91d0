"""Attributes and globals of a program that hooks set in one process, and that others read.

Such as `model.beta`, `optimizer.momentum`, `dataset.scale`, or a global of the script that a loss uses. A step that is
compiled has them as they were at its first batch, here as in `fit`.

Callbacks whose hooks share what their processes do not are refused: an error is better than another model. What a hook
of batches changes, and a hook on the master uses, is refused. So is a hook of batches on several workers that sets
something of the model and reads what it has changed itself.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import itertools
import pickle
import sys
import types
from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Mapping
from enum import Enum
from typing import Any, NamedTuple, cast

import keras
import numpy as np

from elasticcb.callbacks.attribute_use import Slot, Use, in_words, use_of
from elasticcb.callbacks.placement import TABLE, Place, hooks_at, overridden_hooks, place_of
from elasticcb.errors import CallbackWarning, UsageError
from elasticcb.keras_private import KerasSaveable, KerasVariable, layers_of
from elasticcb.serialization import own_modules
from elasticcb.serialization.process_state import drawing, draws_of, without_draws
from elasticcb.settings import Command, JobSettings, written

Key = tuple[int, str]  # number of the holder, and name
_ITERATORS: tuple[Any, ...] = (itertools.count, itertools.cycle, *map(type, (iter([]), iter(()), iter(range(0)))))
_SIMPLE = (bool, int, float, complex, str, bytes, type(None), np.generic)
_MOST_PARTS = 10_000  # of a value that is compared by what is in it
_MOST_BYTES = 1 << 20
# Of a model; set by what runs in this process: Keras, and ModelMetrics.
_OF_KERAS = frozenset(
    {
        "built", "compiled", "compute_metrics", "history", "loss", "metrics", "optimizer", "predict_function",
        "stop_evaluating", "stop_predicting", "stop_training", "test_function", "test_step", "train_function",
        "train_step", "training",
    }
)  # fmt: skip
_PLAIN = (
    keras.regularizers.Regularizer,
    keras.constraints.Constraint,
    keras.optimizers.schedules.LearningRateSchedule,
)
_WITHOUT_RECORDS = frozenset({"elasticcb", "flax", "jax", "jaxlib", "keras", "numpy", "tensorflow", "torch"})
_BY_THEMSELVES = (keras.callbacks.Callback, keras.metrics.Metric, KerasVariable)  # these travel in other ways


class _Absent(Enum):
    ABSENT = "absent"


class Attribute(NamedTuple):
    """An attribute, a global or a variable of an enclosing function."""

    holder: Any
    name: str

    def __str__(self) -> str:
        if isinstance(self.holder, types.FunctionType):
            return self.name
        named = self.holder if isinstance(self.holder, (type, types.ModuleType)) else type(self.holder)
        return f"{named.__name__}.{self.name}"


class Drawn(NamedTuple):
    """The state of a random generator, which stays the object that others refer to."""

    kind: type
    state: Any


class Iterated(NamedTuple):
    """An iterator of Python's, and where it is."""

    pickled: bytes


class Change(NamedTuple):
    """A value that is not what it was at first."""

    first: Any
    now: Any


class SharedAttributes:
    """Attributes of objects that several processes have.

    Args:
        objects: by number, the same in each process.
        takes_turns: whether only one process changes them at a time; else this one keeps what it has changed itself.
    """

    def __init__(self, objects: Mapping[int, Any], takes_turns: bool = True) -> None:
        self._objects = {number: each for number, each in objects.items() if _is_holder(each)}
        self._takes_turns = takes_turns
        self._first = self._read()
        self._ever: dict[Key, None] = {}  # those that have changed, and may be back at the first value
        self._adopted: dict[Key, Any] = {}

    def _read(self) -> dict[Key, Any]:
        seen: set[tuple[int, str]] = set()  # functions share globals
        found: dict[Key, Any] = {}
        for number, thing in self._objects.items():
            for name, value in _attributes(thing):
                if isinstance(thing, types.FunctionType):
                    place = id(_cells(thing).get(name, thing.__globals__)), name
                    if place in seen:
                        continue
                    seen.add(place)
                found[number, name] = _copied(value)
        return found

    def changed(self) -> dict[Key, Change]:
        """Those that have ever differed from what they were at first."""
        values, absent = self._read(), _Absent.ABSENT
        for key in {**values, **self._first}:
            if not is_same(values.get(key, absent), self._first.get(key, absent)):
                self._ever[key] = None
        found = {key: Change(self._first.get(key, absent), values.get(key, absent)) for key in self._ever}
        return {key: change for key, change in found.items() if self._is_to_be_sent(key, change)}

    def is_known(self, changes: Mapping[Key, Change], sent: Mapping[Key, Change]) -> bool:
        """Whether another process that has got `sent` knows the changes, as far as can be seen."""
        return is_same({**changes}, {**sent}) and all(_has_parts(change.now) for change in changes.values())

    def undo(self, was_built: bool) -> None:
        """Sets values that are compared by their parts back to what they were at first: of a model that was not built
        before, only numbers and containers that `build` does not set."""
        for (number, name), change in self.changed().items():
            thing, first = self._objects[number], change.first
            if not was_built and (
                type(first) is not type(change.now)
                or not (type(first) in (int, float) or isinstance(first, (dict, list, deque, set)))
                or not _has_parts(change.now)
                or name in _set_by_build(cast(Hashable, type(thing)))
            ):
                continue
            if first is not _Absent.ABSENT and _has_parts(first):
                with contextlib.suppress(Exception):  # of a user's property
                    _set(thing, name, _in_place(_get(thing, name), first))

    def _is_to_be_sent(self, key: Key, change: Change) -> bool:
        if _has_parts(change.now):
            return True
        is_own = change.now is not self._adopted.get(key)
        return is_own and _may_travel(self._objects[key[0]], change.now)

    def of_optimizers(self, changes: Iterable[Key]) -> list[Attribute]:
        """Those of optimizers."""
        found = [Attribute(self._objects[number], name) for number, name in changes]
        return [each for each in found if isinstance(each.holder, keras.optimizers.Optimizer)]

    def adopt(self, changes: Mapping[Key, Change]) -> tuple[list[Attribute], list[Attribute]]:
        """Sets them to values of another process; returns those that were set, and those that were not, because this
        process has changed them, too, or because they can't be set."""
        found: list[Attribute] = []
        conflicts: list[Attribute] = []
        for key, (first, value) in changes.items():
            number, name = key
            if number not in self._objects:
                continue
            if key in self._first:  # else it is read through another function
                self._ever[key] = None
            thing = self._objects[number]
            here = _copied(_get(thing, name))
            if is_same(here, value):
                continue
            known = self._adopted.get(key, first)
            attribute = Attribute(thing, name)
            if not self._takes_turns and _has_parts(known) and not is_same(here, known):
                conflicts.append(attribute)
                continue
            try:
                _set(thing, name, _in_place(_get(thing, name), value))
            except Exception:  # of a user's property
                conflicts.append(attribute)
                continue
            self._adopted[key] = _copied(value)
            found.append(attribute)
        return found, conflicts


@contextlib.contextmanager
def without_traces(model: keras.Model, is_eager: bool = True) -> Iterator[None]:
    """Context that builds or tries a model. As in Keras, which builds symbolically, no numbers are drawn by what only
    looks like a step of training, and no attributes changed: of a model that was not built before, no counts, and no
    containers such as a replay buffer."""
    holders = [*layers_of(model), getattr(model, "loss", None)]
    objects = dict(enumerate([*holders, *_code_of(holders)]))
    attributes = SharedAttributes(objects)
    was_built = model.built
    with without_draws(model, of_python=was_built):
        yield
    if was_built or is_eager:  # else TensorFlow traces it twice in `fit`
        attributes.undo(was_built)


# ---------------------------------------------------------------- what has them


def _is_holder(thing: Any) -> bool:
    if isinstance(thing, types.FunctionType):
        return not own_modules.is_installed(thing.__code__.co_filename)
    if isinstance(thing, types.ModuleType):
        return own_modules.is_own(thing.__name__)
    if isinstance(thing, type):
        return _is_users(thing)
    if isinstance(thing, _BY_THEMSELVES) or not hasattr(thing, "__dict__"):
        return False
    return isinstance(thing, (KerasSaveable, *_PLAIN)) or _is_users(type(thing)) or _is_record(type(thing))


def _is_record(kind: type) -> bool:
    """Of a package, with attributes as its state, such as an `argparse.Namespace`."""
    by_default = kind.__reduce_ex__ is object.__reduce_ex__ and kind.__reduce__ is object.__reduce__
    package = kind.__module__.partition(".")[0]
    return issubclass(kind, types.SimpleNamespace) or (by_default and package not in _WITHOUT_RECORDS)


def _is_users(kind: type) -> bool:
    # In the workers' processes, the user's modules need not be there.
    return kind.__module__ not in sys.modules or own_modules.is_of_user(kind.__module__)


def _attributes(thing: Any) -> Iterator[tuple[str, Any]]:
    """Names and values of what it may share."""
    if isinstance(thing, types.FunctionType):
        own = _cells(thing)
        for name, cell in own.items():
            with contextlib.suppress(ValueError):  # it is empty
                yield name, cell.cell_contents
        names = own_modules.globals_in(thing.__code__)
        yield from ((name, thing.__globals__[name]) for name in names if name in thing.__globals__ and name not in own)
        return
    yield from ((name, value) for name, value in list(vars(thing).items()) if _is_own(thing, name))
    if isinstance(thing, keras.layers.Layer):
        with contextlib.suppress(Exception):  # of a user's property
            yield "trainable", thing.trainable


def _is_own(thing: Any, name: str) -> bool:
    if isinstance(thing, (type, types.ModuleType)):
        return not name.startswith("__")
    if not isinstance(thing, KerasSaveable):
        return not isinstance(thing, _PLAIN) or not name.startswith("_")
    of_keras = name in _OF_KERAS if isinstance(thing, keras.Model) else name == "built"
    return not of_keras and (not name.startswith("_") or name in _named_by_user(cast(Hashable, type(thing))))


@functools.lru_cache(maxsize=1000)
def _named_by_user(kind: Any) -> frozenset[str]:
    """What the methods of the user's classes name."""
    return frozenset().union(*(own_modules.names_in(method.__code__) for method in _methods(kind)))


def _methods(kind: Any) -> list[types.FunctionType]:
    methods = [method for each in kind.__mro__ if _is_users(each) for method in vars(each).values()]
    return [method for method in methods if isinstance(method, types.FunctionType)]


def _code_of(holders: Iterable[Any]) -> list[Any]:
    """The user's functions and modules that run when these are called."""
    found: dict[int, Any] = {}
    pending = [each for holder in holders for each in (holder, *_methods(type(holder)))]
    while pending:
        thing = pending.pop()
        is_code = isinstance(thing, (types.FunctionType, types.ModuleType)) and _is_holder(thing)
        if is_code and id(thing) not in found:
            found[id(thing)] = thing
            if isinstance(thing, types.FunctionType):
                pending += [value for _, value in _attributes(thing)]
    return [*found.values()]


@functools.lru_cache(maxsize=1000)
def _set_by_build(kind: Any) -> frozenset[str]:
    methods = [vars(each)["build"] for each in kind.__mro__ if "build" in vars(each) and _is_users(each)]
    return frozenset().union(*(own_modules.names_in(inspect.unwrap(method).__code__) for method in methods))


def _cells(function: types.FunctionType) -> dict[str, types.CellType]:
    return dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))


def _get(thing: Any, name: str) -> Any:
    if not isinstance(thing, types.FunctionType):
        return getattr(thing, name, _Absent.ABSENT)
    if name not in _cells(thing):
        return thing.__globals__.get(name, _Absent.ABSENT)
    try:
        return _cells(thing)[name].cell_contents
    except ValueError:
        return _Absent.ABSENT


def _set(thing: Any, name: str, value: Any) -> None:
    if isinstance(thing, types.FunctionType):
        if name in _cells(thing):
            _cells(thing)[name].cell_contents = value
        elif value is _Absent.ABSENT:
            thing.__globals__.pop(name, None)
        else:
            thing.__globals__[name] = value
    elif value is _Absent.ABSENT:
        delattr(thing, name)
    else:
        setattr(thing, name, value)


# ---------------------------------------------------------------- values


def _copy_of(value: Any) -> tuple[Any, bool]:
    """A copy of a value that consists of numbers, strings, arrays, tensors and containers of these, and True: it is
    compared by what is in it. Others, and large ones, as they are, and False: they are compared by their identity."""
    budget = [_MOST_PARTS, _MOST_BYTES]

    def copied(part: Any) -> Any:
        budget[0] -= 1
        budget[1] -= part.nbytes if hasattr(type(part), "nbytes") else 0
        if (draws := draws_of(part)) is not None:
            part = Drawn(type(part), draws[0]())
        if isinstance(part, _ITERATORS):
            part = Iterated(pickle.dumps(part))
            budget[1] -= len(part.pickled)
        if min(budget) < 0:
            raise TypeError("it is large")
        if isinstance(part, (*_SIMPLE, _Absent, Drawn, Iterated)):
            return part
        if isinstance(part, np.ndarray) and part.dtype != object:
            return part.copy()
        if _is_tensor(part):
            return part
        if isinstance(part, dict):
            return _like(part, {key: copied(each) for key, each in dict(part).items()})
        if isinstance(part, tuple):
            parts = [copied(each) for each in part]
            return tuple(parts) if type(part) is tuple else type(part)(*parts)
        if isinstance(part, (list, deque)):
            return _like(part, [copied(each) for each in list(part)])
        if isinstance(part, (set, frozenset)) and all(isinstance(each, _SIMPLE) for each in set(part)):
            return part.copy()
        raise TypeError(type(part))

    try:
        return copied(value), True
    except Exception:  # of the user's classes, or of a container that changes meanwhile
        return value, False


def _is_tensor(value: Any) -> bool:
    return keras.ops.is_tensor(value) and not hasattr(value, "assign") and not hasattr(value, "graph")


def _copied(value: Any) -> Any:
    return _copy_of(value)[0]


def _has_parts(value: Any) -> bool:
    return _copy_of(value)[1]


def _like(given: Any, parts: Any) -> Any:
    """A container of these parts: of the same class, unless Keras tracks it, which needs its tracker."""
    if type(given) in (dict, list) or hasattr(given, "tracker"):
        return parts
    made = copy.copy(given)
    made.clear()
    (made.update if isinstance(made, dict) else made.extend)(parts)
    return made


def _in_place(mine: Any, theirs: Any) -> Any:
    """The container or random generator `mine`, to which others may refer, with what is in `theirs`; or `theirs`."""
    theirs = _revived(mine, theirs)
    if type(mine) is not type(theirs) or not isinstance(mine, (dict, list, deque, set)):
        return theirs
    parts = copy.copy(theirs)
    mine.clear()
    (mine.extend if isinstance(mine, (list, deque)) else mine.update)(parts)
    return mine


def _revived(mine: Any, theirs: Any) -> Any:
    """`theirs`, with random generators, those of `mine` if possible, and iterators in place of their states."""
    if isinstance(theirs, Iterated):
        return pickle.loads(theirs.pickled)
    if isinstance(theirs, Drawn):
        return drawing(mine, *theirs)
    if isinstance(theirs, dict):
        own = mine if isinstance(mine, dict) else {}
        return _like(theirs, {key: _revived(own.get(key), each) for key, each in theirs.items()})
    if isinstance(theirs, (list, tuple, deque)):
        before = [*mine[: len(theirs)]] if isinstance(mine, (list, tuple)) else []
        parts = list(map(_revived, [*before, *[None] * (len(theirs) - len(before))], theirs))
        if not isinstance(theirs, tuple):
            return _like(theirs, parts)
        return tuple(parts) if type(theirs) is tuple else type(theirs)(*parts)
    return theirs


def _may_travel(holder: Any, value: Any) -> bool:
    """Whether a value that is compared by its identity is sent: functions, objects of the user's, large containers."""
    if isinstance(holder, keras.optimizers.Optimizer) or isinstance(value, (keras.layers.Layer, *_BY_THEMSELVES)):
        return False
    if isinstance(value, (dict, list, tuple, deque, set)):
        parts = value.values() if isinstance(value, dict) else value
        return all(isinstance(each, (*_SIMPLE, np.ndarray)) for each in parts)
    return isinstance(value, (types.FunctionType, type, np.ndarray)) or callable(value) or _is_users(type(value))


def is_same(one: Any, other: Any) -> bool:
    """Whether two values are the same, with their types; NaN is the same as NaN."""
    if one is other or type(one) is not type(other):
        return one is other
    if isinstance(one, np.ndarray):
        if one.dtype != other.dtype or one.shape != other.shape:
            return False
        return bool((one == other).all()) if one.dtype == object else one.tobytes() == other.tobytes()
    if _is_tensor(one):
        return is_same(keras.ops.convert_to_numpy(one), keras.ops.convert_to_numpy(other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(is_same(each, other[key]) for key, each in one.items())
    if isinstance(one, (list, tuple, deque)):
        return len(one) == len(other) and all(map(is_same, one, other))
    if isinstance(one, (*_SIMPLE, set, frozenset)):
        return bool(one == other or (one != one and other != other))
    return False


_HOOKS = {Command.TRAIN: ("train", "epoch", "test"), Command.EVALUATE: ("test",), Command.PREDICT: ("predict",)}
_BEGIN = frozenset({"on_train_begin", "on_predict_begin"})  # in each process, before everything else
_OWN = "let hooks of batches and other hooks use attributes of their own"


def shares_state(settings: JobSettings) -> bool:
    """Whether callbacks on the worker have the state of those on the master (shared_state.py)."""
    return not settings.model.definition and not _has_several(settings)


def _has_several(settings: JobSettings) -> bool:
    return settings.cluster.num_workers > 1 or settings.cluster.autoscale.most > 1


class Placed:
    """A callback with hooks of batches on workers.

    Args:
        batches: its hooks of batches.
        others: its hooks on the master, except those that begin the job.

    Attributes:
        on_workers, on_master: what these do.
        follows: what only hooks on the master change, and hooks of batches read.
    """

    def __init__(self, callback: Any, batches: list[str], others: list[str]) -> None:
        self.callback, self.name = callback, type(callback).__name__
        self.batches, self.others = batches, others
        self.on_workers, self.on_master = use_of(callback, batches), use_of(callback, others)
        self.follows = self.on_workers.reads & self.on_master.changes - self.on_workers.changes

    def those(self, hooks: Iterable[str], slots: set[Slot]) -> str:
        """Which of `hooks` use any of `slots`, for messages."""
        uses = {name: use_of(self.callback, [name]) for name in hooks}
        return f"{self.name}.{' and '.join(name for name, use in uses.items() if slots & _used(use))}"


def _used(use: Use) -> set[Slot]:
    return use.reads | use.changes


def placed(callbacks: Iterable[Any], settings: JobSettings) -> list[Placed]:
    """The callbacks with hooks of batches on workers, as far as the table decides for each hook."""
    in_program, one_worker = not settings.model.definition, shares_state(settings)
    found = []
    for callback in callbacks:
        if place_of(callback) is not None or type(callback).__module__.startswith("elasticcb."):
            continue
        overridden = overridden_hooks(callback)
        of_command = {name for name in overridden if name.split("_")[1] in _HOOKS.get(settings.command, ())}
        worker, master = (
            sorted(of_command & hooks_at(callback, place, overridden, in_program, one_worker))
            for place in (Place.WORKER, Place.MASTER)
        )
        batches = [name for name in worker if TABLE[name].of_batch]
        # On the command line, each worker ends its own predictions.
        others = _BEGIN if in_program else _BEGIN | {"on_predict_end"}
        if batches:
            found.append(Placed(callback, batches, [name for name in master if name not in others]))
    return found


def sharing(callbacks: Iterable[Any], settings: JobSettings) -> list[Placed]:
    """The callbacks whose state is sent to workers."""
    found = [] if settings.model.definition else placed(callbacks, settings)
    return found if shares_state(settings) or any(each.follows for each in found) else []


def check_hooks(callbacks: Iterable[Any], settings: JobSettings) -> None:
    """Raises `UsageError`, before training, for callbacks whose hooks would not do the same as in `fit`."""
    problems = [text for each in placed(callbacks, settings) for text in _problems(each, settings)]
    if problems:
        raise UsageError("\n".join(problems))


def _problems(each: Placed, settings: JobSettings) -> Iterator[str]:
    worker, master, in_program = each.on_workers, each.on_master, not settings.model.definition
    if shares_state(settings):
        return
    shared = worker.changes & _used(master)
    if not in_program:
        shared |= each.follows
    if shared:
        ways = ["use num_workers=1, where all hooks share one state"] if in_program else []
        if not worker.sets:
            uses_model = worker.reads & {"model", "_model"}
            model = ", after the batch and on weights that may be newer," if uses_model else ""
            ways.append(
                f'put @elasticcb.callbacks.runs_on("master") above the class: all of its hooks then run{model} on one '
                "object, for the batches of all workers"
            )
        yield (
            f"{each.those(each.batches, shared)} (on workers) and {each.those(each.others, shared)} (on the master) "
            f"share {in_words(shared)}, but each process has its own copy of the callback, so they would not do the "
            f"same as in fit. {_choice([*ways, _OWN])}"
        )
    kept = worker.changes & worker.reads
    if kept and worker.sets and _has_several(settings):
        ways = [
            written("use {num_workers:1}", in_program),
            'compute it from logs["version"], the number of batches of all workers',
            "use a keras.optimizers.schedules.LearningRateSchedule, or hooks of epochs",
        ]
        yield (
            f"{each.those(each.batches, kept)} sets {' and '.join(sorted(worker.sets))} on workers, and keeps "
            f"{in_words(kept)} from batch to batch. Each worker has its own copy of the callback, which sees only its "
            f"own batches, so this would not do the same as in fit. {_choice(ways)}"
        )


def _choice(ways: list[str]) -> str:
    text = f"{'; or '.join(ways)}."
    return text[0].upper() + text[1:]


def left_on_workers(callbacks: Iterable[Any], settings: JobSettings) -> Iterator[CallbackWarning]:
    """What hooks of batches collect on several workers, where the caller of `fit` may look for it in vain."""
    for each in [] if settings.model.definition or shares_state(settings) else placed(callbacks, settings):
        collected = each.on_workers.fills
        if "the model" in each.on_workers.sets:
            text = (
                f"{each.those(each.batches, {'model', '_model'})} sets something of the model on "
                f"{settings.cluster.num_workers} workers, in a copy on each: neither hooks elsewhere nor your model "
                "get it. Use num_workers=1, where it comes back."
            )
            yield CallbackWarning(f"{each.name} sets something of the model", text)
        if collected:
            text = (
                f"{each.those(each.batches, collected)} changes {in_words(collected)} on "
                f"{settings.cluster.num_workers} workers, in a copy of the callback on each: the object that you "
                "passed does not get it. To collect it there, use num_workers=1, or put "
                '@elasticcb.callbacks.runs_on("master") above the class.'
            )
            yield CallbackWarning(f"{each.name} collects on workers", text)
