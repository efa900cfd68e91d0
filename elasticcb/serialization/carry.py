"""A Python program as bytes: models, losses, callbacks and data are one graph of objects.

One pickle with one memo, so that one object of the program is one object where it is read. Keras objects are restored
from their attributes, without `get_config`, `from_config`, `build` or `__init__`. Only what belongs to a process is
made again: functions that the framework has compiled, lookup tables (from their entries), locks.

Functions and classes of the user's own modules travel as those of a script do: by value, with the globals that they
use. Installed packages are imported.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import linecache
import mmap
import pickle
import struct
import sys
import tempfile
import threading
import types
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, cast

import cloudpickle
import keras
import numpy as np
import tensorflow as tf

from elasticcb.errors import UsageError, describe
from elasticcb.keras_private import DynamicBackend, KerasSaveable, KerasVariable, Node, tracking
from elasticcb.optimizers.traits import public_class
from elasticcb.serialization import own_modules
from elasticcb.serialization.object_paths import path_of
from elasticcb.tf.row_variables import untouched_zeros

_PLAIN = (bool, int, float, str, tuple, type(None))
_TRACKED = tuple(kind for name, kind in vars(tracking).items() if name.startswith("Tracked") and isinstance(kind, type))
_LOCKS = {type(make()): make for make in (threading.Lock, threading.RLock, threading.local)}
_TABLES = (tf.lookup.StaticHashTable, tf.lookup.experimental.MutableHashTable, tf.lookup.experimental.DenseHashTable)
# What a framework has compiled in this process, and what calls leave behind.
_LEFT_OUT: dict[type, dict[str, Callable[[], Any]]] = {
    keras.Model: dict.fromkeys(("train_function", "test_function", "predict_function", "history"), lambda: None),
    keras.layers.Layer: {"_losses": list, "_loss_ids": set, "_losses_override": list},
}
# Attributes by which TensorFlow tracks an object. Others may begin like these: `_self_attention`.
_OF_TRACKING = (
    "_self_setattr_tracking", "_self_unconditional_", "_self_update_uid", "_self_name_based_restores",
    "_self_saveable_object_factories",
)  # fmt: skip
_OF_FRAMEWORKS = ("keras.", "tensorflow.", "torch.", "builtins", "flax.")
_NOT_SENT = {
    tf.data.Dataset: "create it in a function that each worker calls (elasticcb.DatasetFactory)",
    tf.data.Iterator: "create it where it is used",
}
_KEPT = (KerasVariable, KerasSaveable, type, types.FunctionType)
_LARGE_BYTES = 1 << 20
_ALIGNMENT_BYTES = 64
_lock = threading.RLock()  # cloudpickle's list of modules belongs to the process


class Hollow:
    """Says which objects travel without their content.

    Args:
        weights: variables whose values the servers hold; they travel as shapes.
        rows: variables and arrays with rows that the servers hold; they travel without rows.
        optimizers: those whose state the servers hold; they travel as before their first step.
        portable: whether another Keras backend reads it. Then nothing refers to the model's variables.
    """

    def __init__(
        self,
        weights: Iterable[Any] = (),
        rows: Iterable[Any] = (),
        optimizers: Iterable[Any] = (),
        portable: bool = False,
    ) -> None:
        self.portable = portable
        self.weights = {id(each): each for each in weights}
        self.rows = {id(each): each for each in rows}
        self.optimizers = {id(each): each for each in _with_inner(optimizers)}
        self.absent: dict[int, Any] = {}  # variables that become None
        for optimizer in self.optimizers.values():
            kept = (optimizer._iterations, vars(optimizer).get("_learning_rate"))
            slots = [each for each in optimizer._variables if all(each is not own for own in kept)]
            own = [*slots, *(optimizer._trainable_variables if portable else ())]
            self.absent.update({id(each): each for each in own})
            if portable:
                self.weights[id(optimizer._iterations)] = optimizer._iterations


def dumps(
    value: Any,
    names: str | Mapping[str, Any],
    known: Sequence[Any] = (),
    hollow: Hollow | None = None,
    keeps: tuple[type, ...] = (),
    elsewhere: bool = True,
) -> bytes:
    """Pickles `value`.

    Args:
        names: how messages call it; or its parts, by name.
        known: objects that the reader has, in this order: they travel as references.
        hollow: objects that travel without their content.
        keeps: objects of these kinds are added to `known`.
        elsewhere: whether other processes read it; otherwise own modules travel like installed ones.

    Raises:
        UsageError: something in it can't be pickled; the message has its path.
    """
    roots = {names: value} if isinstance(names, str) else names
    return _dumped(lambda: _Pickler(known, hollow or Hollow(), keeps, False), [value], roots, None, elsewhere)


def dumps_graph(
    parts: Any, others: Any, names: Mapping[str, Any], hollow: Hollow, folder: Path | None, elsewhere: bool = True
) -> tuple[bytes, list[Any], dict[int, Any]]:
    """Pickles two objects that may share objects, for `Graph`; returns also the variables that travel with their
    values, in the order of `Graph.variables`, and all objects, by their numbers there. The bytes of the first depend
    neither on the second nor on the values of variables.

    Args:
        folder: large arrays are written to a file in it, which readers map into memory.
        names, hollow, elsewhere: as for `dumps`, as are raised errors.
    """
    picklers: list[_Pickler] = []

    def make() -> _Pickler:
        picklers.append(_Pickler([], hollow, (), folder is not None, True))
        return picklers[-1]

    data = _dumped(make, [parts, others], names, folder, elsewhere)
    return data, picklers[-1].variables, dict(picklers[-1].memo.copy().values())


def _dumped(
    make: Callable[[], _Pickler],
    values: Sequence[Any],
    roots: Mapping[str, Any],
    folder: Path | None,
    elsewhere: bool,
) -> bytes:
    imported = set() if elsewhere else set(sys.modules)
    with _lock:
        while True:
            pickler = make()
            try:
                with own_modules.by_value(imported):
                    sections = pickler.sections(values)
                blocks = None if folder is None else pickler.write_arrays(folder)
                return pickle.dumps((pickler.sources, sections, blocks, pickler.values, pickler.is_steady))
            except Exception as error:  # any error of a user's __reduce__
                path, module = path_of(roots, pickler.last)
                if module and module not in imported and own_modules.is_own(module):
                    # Created when the module is imported, as a connection or a reader: so a worker does that.
                    imported.add(module)
                    continue
                if isinstance(error, UsageError):
                    raise
                raise _refused(path, pickler.last, error) from error


class Copies:
    """Makes copies of an object in this process. They share Keras objects (a model that data reads), classes, and
    functions without variables of their own.
    """

    def __init__(self, value: Any, name: str) -> None:
        self._kept: list[Any] = []
        self._data = dumps(value, name, self._kept, keeps=_KEPT)

    def new(self) -> Any:
        """The object as it was."""
        return loads(self._data, self._kept)


def loads(data: bytes, known: Sequence[Any] = ()) -> Any:
    """The inverse of `dumps`. Use it only for data of a process that has the job's token."""
    return Graph(data, known).parts


class Graph:
    """The objects of `dumps_graph`, where they are read.

    Args:
        before: an earlier graph, which nobody uses any more. If it can be used again and the first object is the same,
            it is that of this graph too, and its variables get the new values.

    Attributes:
        variables: those that travel with their values, by place.
        continues: whether `parts` is that of `before`.
        objects: those of the second object and its parts too that have attributes, by number.
        is_steady: whether `parts` can be used again: of its state, only variables change.
    """

    def __init__(self, data: bytes, known: Sequence[Any] = (), before: Graph | None = None) -> None:
        sources, (*sections, modules), blocks, values, self.is_steady = pickle.loads(data)
        first, *second = sections
        self._fixed = first, modules
        self.parts: Any = None
        self.variables: dict[int, Any] = {}
        self._memo: list[Any] = []
        self._kept: dict[int, Any] = {}  # variables of `parts`
        self.continues = before is not None and before.is_steady and before._fixed == self._fixed
        with _finishing(values) as variables:
            if before is not None and self.continues:
                self.parts, self._memo, self._kept = before.parts, before._memo, before._kept
                for place, variable in self._kept.items():
                    variable.assign(values[place])
                # The second object refers to objects in the first by their places in the memo.
                content = b"".join([*map(_memoizing, range(len(self._memo))), pickle.NONE, pickle.STOP, *second])
                unpickler = _Unpickler(io.BytesIO(content), self._memo, blocks)
                unpickler.load()
            else:
                for file, lines in sources.items():  # for tracebacks, and for AutoGraph, which converts source code
                    linecache.cache[file] = (sum(map(len, lines)), None, lines, file)
                unpickler = _Unpickler(io.BytesIO(b"".join([*sections, modules])), known, blocks)
                self.parts = unpickler.load()
                self._kept = dict(variables)
                self._memo = [*unpickler.memo.copy().values()] if self.is_steady else []
            self.others: Any = unpickler.load() if second else None
            with contextlib.suppress(EOFError):
                while True:
                    for module, attributes in unpickler.load():
                        own_modules.set_values(module, attributes)
            read = unpickler.memo.copy() if second else {}
            self.objects = {number: each for number, each in read.items() if hasattr(each, "__dict__")}
            self.variables = self._kept | variables


def _memoizing(place: int) -> bytes:
    """Memoizes a known object."""
    return pickle.BININT + struct.pack("<i", place) + pickle.BINPERSID + pickle.MEMOIZE + pickle.POP


def _refused(path: str, item: Any, error: Exception) -> UsageError:
    kind = type(item).__name__
    advice = next((text for each, text in _NOT_SENT.items() if isinstance(item, each) and text), None)
    advice = advice or "create it where it is used, or leave it out of the state by defining __getstate__ in its class"
    article = "an" if kind[0].lower() in "aeiou" else "a"
    return UsageError(f"{path}: {article} {kind} can't be sent to workers ({describe(error)}); {advice}.")


class _Pickler(cloudpickle.Pickler):
    def __init__(
        self, known: Any, hollow: Hollow, keeps: tuple[type, ...], separates_arrays: bool, lists_values: bool = False
    ) -> None:
        self._buffer = io.BytesIO()
        super().__init__(self._buffer, protocol=5, buffer_callback=self._is_small if separates_arrays else None)
        self._objects = known
        self._known = {id(each): index for index, each in enumerate(known)}
        self._keeps = keeps
        self._arrays: list[pickle.PickleBuffer] = []
        self.hollow = hollow
        self.sources: dict[str, list[str]] = {}
        self._used: dict[str, set[str]] = {}  # names in modules that the reader imports, and code uses
        self.last: Any = None
        self.lists_values = lists_values  # those of variables, instead of writing them where the variables are
        self.values: list[Any] = []
        self.variables: list[Any] = []
        self.is_steady = lists_values

    def sections(self, values: Sequence[Any]) -> list[bytes]:
        """A pickle of each value, and those of the attributes that own modules have now."""
        ends = [0]
        for value in values:
            self.dump(value)
            ends.append(self._buffer.tell())
            if self._arrays and len(ends) == 2:  # their content is not part of the pickle
                self.is_steady = False
        while self._used:  # their functions may use others
            used, self._used = self._used, {}
            self.dump([(module, own_modules.values_of(module, names)) for module, names in used.items()])
        data = self._buffer.getvalue()
        return [data[start:end] for start, end in zip(ends, [*ends[1:], len(data)], strict=True)]

    def listed(self, variable: Any, value: Any) -> Any:
        """The value of a variable, or its place where values are listed."""
        if value is None or not self.lists_values:
            return value
        self.values.append(value)
        self.variables.append(variable)
        return _Place(len(self.values) - 1)

    def _is_small(self, buffer: pickle.PickleBuffer) -> bool:
        if buffer.raw().nbytes < _LARGE_BYTES:
            return True
        self._arrays.append(buffer)
        return False

    def write_arrays(self, folder: Path) -> tuple[str, list[tuple[int, int]]] | None:
        """Writes the large arrays to one file; returns its path, and where each begins and ends."""
        if not self._arrays:
            return None
        places = []
        with tempfile.NamedTemporaryFile(prefix="program-", suffix=".bin", dir=folder, delete=False) as file:
            for buffer in self._arrays:
                file.write(bytes(-file.tell() % _ALIGNMENT_BYTES))
                begin = file.tell()
                file.write(buffer.raw())
                places.append((begin, file.tell()))
        return file.name, places

    def persistent_id(self, obj: Any) -> int | None:
        is_kept = isinstance(obj, self._keeps) and not getattr(obj, "__closure__", None)
        if is_kept and id(obj) not in self._known:
            self._known[id(obj)] = len(self._objects)
            self._objects.append(obj)
        return self._known.get(id(obj)) if self._known else None

    def reducer_override(self, obj: Any) -> Any:
        self.last = obj
        reduce = _reducer_of(cast(Hashable, type(obj)))
        if reduce is not None:
            return reduce(self, obj)
        if type(obj) is types.CellType:
            return types.CellType, (), _content(obj), None, None, _fill_cell
        if type(obj) is types.FunctionType and _is_of_package(obj):
            return _reduce_function_of_package(obj)
        if id(obj) in self.hollow.rows and isinstance(obj, np.ndarray):
            return np.zeros, ((0, *obj.shape[1:]), obj.dtype)
        reduced = super().reducer_override(obj)
        if isinstance(obj, types.FunctionType) and reduced is not NotImplemented:
            self._note_code(obj)
        return reduced

    def _function_getnewargs(self, func: Any) -> Any:
        # With its own cells: functions of one scope share its variables.
        return (*super()._function_getnewargs(func)[:-1], func.__closure__)

    def _note_code(self, function: types.FunctionType) -> None:
        file = function.__code__.co_filename
        if file not in self.sources and not own_modules.is_installed(file):
            self.sources[file] = linecache.getlines(file, function.__globals__)
        for module, names in own_modules.used_by(function):
            self._used.setdefault(module, set()).update(names)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: Any, known: Sequence[Any], blocks: tuple[str, list[tuple[int, int]]] | None) -> None:
        super().__init__(file, buffers=None if blocks is None else _mapped(*blocks))
        self._known = known

    def persistent_load(self, index: int) -> Any:
        return self._known[index]


def _mapped(path: str, places: list[tuple[int, int]]) -> Iterator[memoryview]:
    with open(path, "rb") as file:
        content = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))  # may be changed by this process
    return (content[begin:end] for begin, end in places)


# ---------------------------------------------------------------- what is computed from identities, once all is there

_reading = threading.local()


@contextlib.contextmanager
def _finishing(values: Sequence[Any]) -> Iterator[dict[int, Any]]:
    """Context of reading; returns the variables that are read, by the place of their value in `values`."""
    before = dict(vars(_reading))
    _reading.later, _reading.values, _reading.variables = [], values, {}
    try:
        yield _reading.variables
        for finish in _reading.later:
            finish()
    finally:
        vars(_reading).clear()
        vars(_reading).update(before)


def _later(finish: Callable[[], None]) -> None:
    _reading.later.append(finish)


# ---------------------------------------------------------------- functions that functions of packages have created


def _is_of_package(function: types.FunctionType) -> bool:
    own = (
        "<locals>" in function.__qualname__
        and vars(sys.modules.get(function.__module__, types)) is function.__globals__
    )
    return own and own_modules.is_installed(function.__code__.co_filename)


def _reduce_function_of_package(function: types.FunctionType) -> Any:
    """Like cloudpickle, which would look for what each of them uses, as Keras creates some for each layer."""
    cells = [_content(cell) for cell in function.__closure__ or ()]
    own = {name: getattr(function, name) for name in ("__name__", "__qualname__", "__defaults__", "__kwdefaults__")}
    created = function.__code__, function.__module__, len(cells)
    return _make_function, created, (cells, own, vars(function)), None, None, _fill_function


def _content(cell: Any) -> tuple[Any, ...]:
    try:
        return (cell.cell_contents,)
    except ValueError:  # it is empty
        return ()


def _fill_cell(cell: types.CellType, content: tuple[Any, ...]) -> None:
    if content:
        (cell.cell_contents,) = content


def _make_function(code: Any, module: str, cells: int) -> types.FunctionType:
    closure = tuple(types.CellType() for _ in range(cells))
    return types.FunctionType(code, vars(importlib.import_module(module)), closure=closure)


def _fill_function(function: types.FunctionType, state: Any) -> None:
    contents, own, attributes = state
    for cell, content in zip(function.__closure__ or (), contents, strict=True):
        _fill_cell(cell, content)
    for name, value in own.items():
        setattr(function, name, value)
    vars(function).update(attributes)


# ---------------------------------------------------------------- variables


def _reduce_variable(pickler: _Pickler, variable: Any) -> Any:
    hollow = pickler.hollow
    if id(variable) in hollow.absent:
        return _nothing, ()
    state = {
        name: value for name, value in vars(variable).items() if name != "_value" and not name.startswith(_OF_TRACKING)
    }
    plain = {name: value for name, value in state.items() if isinstance(value, _PLAIN)}
    others = {name: value for name, value in state.items() if name not in plain and name != "_raw_value"}
    shape: tuple[int, ...] | None = None
    value: Any = None
    if id(variable) in hollow.rows:
        shape = plain["_shape"] = (0, *variable.shape[1:])
    elif id(variable) in hollow.weights:
        shape = tuple(variable.shape)
    elif variable._value is not None:
        value = np.asarray(variable.numpy())
    if shape is None:
        value = pickler.listed(variable, value)
    kind = None if type(variable) is keras.Variable else type(variable)
    # Values first: what refers to a variable may ask for them before the others are there.
    return _make_variable, (kind, plain, shape, value), others, None, None, _update


def _make_variable(kind: Any, plain: dict[str, Any], shape: tuple[int, ...] | None, value: Any) -> Any:
    kind = kind or keras.Variable
    variable: Any = kind.__new__(kind)
    vars(variable).update(plain)
    variable._value = None
    place, value = _listed(value)
    if place is not None:
        _reading.variables[place] = variable
    if shape is not None:
        value = np.zeros(shape, bool) if plain["_dtype"] == "bool" else untouched_zeros(shape, plain["_dtype"])
    if value is not None:
        variable._initialize(variable._convert_to_tensor(value, dtype=plain["_dtype"]))
        vars(variable).update({"_shape": plain["_shape"]})
    return variable


def _reduce_tf_variable(pickler: _Pickler, variable: Any) -> Any:
    value, shape = variable.numpy(), variable.shape
    if id(variable) in pickler.hollow.rows:
        value, shape = np.zeros((0, *value.shape[1:]), value.dtype), None
    else:
        value = pickler.listed(variable, value)
    name = variable.name.partition(":")[0].rpartition("/")[2]
    return _make_tf_variable, (value, variable.dtype.name, variable.trainable, name, shape, variable.aggregation)


def _make_tf_variable(value: Any, dtype: str, trainable: bool, name: str, shape: Any, aggregation: Any) -> Any:
    place, value = _listed(value)
    options = {"dtype": dtype, "trainable": trainable, "shape": shape, "aggregation": aggregation}
    variable = tf.Variable(value, name=name or None, **options)
    if place is not None:
        _reading.variables[place] = variable
    return variable


@dataclass(frozen=True)
class _Place:
    """Where the value of a variable is in the list of values."""

    index: int


def _listed(value: Any) -> tuple[int | None, Any]:
    """The place in the list of values, if it is there, and the value."""
    return (value.index, _reading.values[value.index]) if isinstance(value, _Place) else (None, value)


# ---------------------------------------------------------------- Keras objects


def _reduce_keras(pickler: _Pickler, thing: Any) -> Any:
    if _is_of_user(type(thing), "__reduce__") or _is_of_user(type(thing), "__reduce_ex__"):
        return NotImplemented
    state = dict(vars(thing))
    if _is_of_user(type(thing), "__getstate__"):
        state = dict(thing.__getstate__())
    state = {name: value for name, value in state.items() if not name.startswith(_OF_TRACKING)}
    left_out = [item for kind, made in _LEFT_OUT.items() if isinstance(thing, kind) for item in made.items()]
    state.update((name, make()) for name, make in left_out if name in state)
    state.pop("_outbound_nodes", None)
    if isinstance(thing, keras.Operation):
        state = _state_of_operation(state)
    kind = type(thing)
    if isinstance(thing, keras.optimizers.Optimizer):
        state = _state_of_optimizer(pickler, thing, state)
        kind = public_class(thing)
    if pickler.hollow.portable:
        return _make_keras, (kind,), _without_framework(state), None, None, _fill_portable
    return _make_keras, (kind,), state, None, None, _fill_keras


def _state_of_operation(state: dict[str, Any]) -> dict[str, Any]:
    for name in ("build", "quantize"):  # Keras's wrappers, which `__new__` makes
        if hasattr(state.get(name), "__wrapped__"):
            del state[name]
    if "_modules" in state:  # of PyTorch, whose parameters are the values of variables
        state["_modules"] = {name: each for name, each in state["_modules"].items() if name != "_torch_params"}
    # Before what leads to the end of a graph: each operation is then reached from those before it, and not by a
    # recursion through all of them.
    first = {name: state.pop(name) for name in ("_inputs", "_operations") if name in state}
    return first | state


def _make_keras(kind: Any) -> Any:
    if issubclass(kind, keras.layers.Layer):
        return keras.layers.Layer.__new__(kind)
    return object.__new__(kind)


def _fill_keras(thing: Any, state: dict[str, Any]) -> None:
    if _is_of_user(type(thing), "__setstate__"):
        thing.__setstate__(state)
    else:
        vars(thing).update(state)
    if isinstance(thing, keras.Operation):
        vars(thing).setdefault("_outbound_nodes", [])
    if hasattr(type(thing), "torch_params") and thing.built:
        _later(lambda: thing.torch_params)  # makes them
    if isinstance(thing, keras.optimizers.Optimizer):
        _later(functools.partial(_finish_optimizer, thing))


def _without_framework(state: dict[str, Any]) -> dict[str, Any]:
    """Without the attributes of PyTorch's modules; those that are layers are then plain attributes."""
    modules = state.pop("_modules", {})
    hooks = [
        name for name in state if name.endswith("_hooks") or "_hooks_" in name or name in ("_parameters", "_buffers")
    ]
    return {name: value for name, value in state.items() if name not in hooks} | modules


def _fill_portable(thing: Any, state: dict[str, Any]) -> None:
    _fill_keras(thing, state)
    of_class = _plain_optimizer if isinstance(thing, keras.optimizers.Optimizer) else _plain_layer
    if isinstance(thing, (keras.optimizers.Optimizer, keras.layers.Layer)):
        for name, value in vars(of_class()).items():  # what only this backend has
            if name not in ("build", "quantize"):
                vars(thing).setdefault(name, type(value)(value) if isinstance(value, (list, dict, set)) else value)


@functools.cache
def _plain_optimizer() -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD()


@functools.cache
def _plain_layer() -> keras.layers.Layer:
    return keras.layers.Layer()


def _reduce_node(pickler: _Pickler, node: Any) -> Any:
    return object.__new__, (type(node),), dict(vars(node)), None, None, _fill_node


def _fill_node(node: Any, state: dict[str, Any]) -> None:
    vars(node).update(state)
    # The way forward follows from the way back.
    for tensor in node.arguments.keras_tensors:
        operation = tensor._keras_history.operation
        if operation is not None:
            vars(operation).setdefault("_outbound_nodes", []).append(node)


def _reduce_tracked(pickler: _Pickler, tracked: Any) -> Any:
    items = dict(tracked) if isinstance(tracked, dict) else list(tracked)
    return _make_tracked, (type(tracked),), (items, tracked.tracker), None, None, _fill_tracked


def _make_tracked(kind: Any) -> Any:
    tracked = kind.__new__(kind)
    tracked.tracker = None
    return tracked


def _fill_tracked(tracked: Any, state: Any) -> None:
    items, tracker = state
    base: Any = next(each for each in (list, dict, set) if isinstance(tracked, each))
    (base.extend if base is list else base.update)(tracked, items)
    tracked.tracker = tracker


def _reduce_tracker(pickler: _Pickler, tracker: Any) -> Any:
    state = {name: value for name, value in vars(tracker).items() if name != "stored_ids"}
    return object.__new__, (type(tracker),), state, None, None, _fill_tracker


def _fill_tracker(tracker: Any, state: dict[str, Any]) -> None:
    vars(tracker).update(state)

    def finish() -> None:
        tracker.stored_ids = {name: {id(each) for each in store} for name, (_, store) in tracker.config.items()}

    _later(finish)


# ---------------------------------------------------------------- optimizers


def _state_of_optimizer(pickler: _Pickler, optimizer: Any, state: dict[str, Any]) -> dict[str, Any]:
    """Without the keys by which it knows variables, which are those of this process."""
    for name in ("_trainable_variables_indices", "_exclude_from_weight_decay_cache", "apply"):
        state.pop(name, None)
    if state.get("_exclude_from_weight_decay"):
        keys, variables = state["_exclude_from_weight_decay"], pickler.hollow.weights.values()
        state["_exclude_from_weight_decay"] = [each for each in variables if optimizer._var_key(each) in keys]
    if id(optimizer) in pickler.hollow.optimizers:
        state["built"] = False
        state.pop("_var_to_optimizer_idx", None)
    if "_var_to_optimizer_idx" in state:  # of a MultiOptimizer
        indices = state["_var_to_optimizer_idx"]
        state["_var_to_optimizer_idx"] = [indices[optimizer._var_key(each)] for each in optimizer._trainable_variables]
    return state


def _finish_optimizer(optimizer: Any) -> None:
    own = vars(optimizer)
    if not own["built"]:
        _remove_absent(own)
    own["_trainable_variables_indices"] = {
        optimizer._var_key(variable): index for index, variable in enumerate(own["_trainable_variables"])
    }
    if "_var_to_optimizer_idx" in own:
        keys = own["_trainable_variables_indices"]
        own["_var_to_optimizer_idx"] = dict(zip(keys, own["_var_to_optimizer_idx"], strict=True))
    if own.get("_exclude_from_weight_decay"):
        own["_exclude_from_weight_decay"] = {optimizer._var_key(each) for each in own["_exclude_from_weight_decay"]}


def _remove_absent(own: dict[str, Any]) -> None:
    """As before `build`, of an optimizer whose slots are None."""
    own["_trainable_variables"] = []
    for value in own.values():
        if isinstance(value, list):
            value[:] = [each for each in value if each is not None]
        elif isinstance(value, dict):
            for key in [key for key, each in value.items() if each is None]:
                del value[key]


def _with_inner(optimizers: Iterable[Any]) -> Iterator[Any]:
    for each in optimizers:
        yield each
        inner = getattr(each, "inner_optimizer", None)
        yield from _with_inner([*([] if inner is None else [inner]), *(getattr(each, "optimizers", None) or ())])


# ---------------------------------------------------------------- what belongs to a process


def _nothing() -> None:
    return None


def _update(thing: Any, state: dict[str, Any]) -> None:
    vars(thing).update(state)


def _reduce_weak(pickler: _Pickler, reference: Any) -> Any:
    target = reference()
    return (functools.partial, (_nothing,)) if target is None else (weakref.ref, (target,))


def _reduce_lock(pickler: _Pickler, lock: Any) -> Any:
    return _LOCKS[type(lock)], ()


def _reduce_tensor(pickler: _Pickler, tensor: Any) -> Any:
    if not hasattr(tensor, "numpy"):  # of a function that was traced here, and has left it behind
        return _nothing, ()
    if tensor.dtype in (tf.variant, tf.resource):
        _cannot("it refers to memory of this process")
    return tf.constant, (tensor.numpy(), tensor.dtype.name)


def _reduce_composite(pickler: _Pickler, tensor: Any) -> Any:
    parts = tf.nest.flatten(tensor, expand_composites=True)
    return _make_composite, (tf.type_spec_from_value(tensor), parts)


def _make_composite(spec: Any, parts: list[Any]) -> Any:
    return tf.nest.pack_sequence_as(spec, parts, expand_composites=True)


def _reduce_tf_function(pickler: _Pickler, function: Any) -> Any:
    # Without its traces.
    options = {name: getattr(function, f"_{name}") for name in ("autograph", "jit_compile", "reduce_retracing")}
    return _make_tf_function, (function.python_function, function.input_signature, options)


def _make_tf_function(function: Any, input_signature: Any, options: dict[str, Any]) -> Any:
    return tf.function(function, input_signature=input_signature, **options)


def _reduce_table(pickler: _Pickler, table: Any) -> Any:
    keys, values = (each.numpy() for each in table.export())
    if isinstance(table, tf.lookup.experimental.DenseHashTable):
        _cannot("use tf.lookup.StaticHashTable or tf.lookup.experimental.MutableHashTable")
    default = table.default_value if hasattr(table, "default_value") else table._default_value
    default = np.asarray(default)
    mutable = isinstance(table, tf.lookup.experimental.MutableHashTable)
    pickler.is_steady = pickler.is_steady and not mutable
    return _make_table, (mutable, keys, values, table.key_dtype.name, table.value_dtype.name, default)


def _make_table(mutable: bool, keys: Any, values: Any, key_dtype: str, value_dtype: str, default: Any) -> Any:
    with tf.init_scope():
        keys, values = tf.constant(keys, key_dtype), tf.constant(values, value_dtype)
        default = tf.constant(default, value_dtype)
        if not mutable:
            return tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(keys, values), default)
        table = tf.lookup.experimental.MutableHashTable(key_dtype, value_dtype, default)
        table.insert(keys, values)
        return table


def _reduce_strategy(pickler: _Pickler, strategy: Any) -> Any:
    return tf.distribute.get_strategy, ()


def _reduce_dynamic_backend(pickler: _Pickler, backend: Any) -> Any:
    return type(backend), (backend._backend,)  # whose __getattr__ needs it before there is any state


def _reduce_module(pickler: _Pickler, module: types.ModuleType) -> Any:
    # These modules are created at import, and cloudpickle would take some of them apart.
    if f"{module.__name__}.".startswith(("keras.", "torch.")) or own_modules.is_own(module.__name__):
        return importlib.import_module, (module.__name__,)
    return cloudpickle.Pickler.reducer_override(pickler, module)


def _reduce_code(pickler: _Pickler, code: types.CodeType) -> Any:
    make, arguments = pickler.dispatch_table[types.CodeType](code)[:2]
    return _make_code, (make, arguments, code.co_filename)  # which cloudpickle would leave out


def _make_code(make: Callable[..., Any], arguments: tuple[Any, ...], file: str) -> types.CodeType:
    code: types.CodeType = make(*arguments)
    return code.replace(co_filename=file)


def _reduce_not_sent(pickler: _Pickler, thing: Any) -> NoReturn:
    _cannot("it belongs to this process")


def _cannot(reason: str) -> NoReturn:
    raise TypeError(reason)


def _is_of_user(kind: type, name: str) -> bool:
    """Whether a class of the user's defines a method, rather than a framework."""
    owner = next((each for each in kind.__mro__ if name in vars(each)), None)
    return owner is not None and not f"{owner.__module__}.".startswith(_OF_FRAMEWORKS)


_REDUCERS: dict[type | tuple[type, ...], Callable[[_Pickler, Any], Any]] = {
    KerasVariable: _reduce_variable,
    _TRACKED: _reduce_tracked,
    tracking.Tracker: _reduce_tracker,
    KerasSaveable: _reduce_keras,
    Node: _reduce_node,
    weakref.ref: _reduce_weak,
    tuple(_LOCKS): _reduce_lock,
    tf.distribute.Strategy: _reduce_strategy,
    (tf.RaggedTensor, tf.SparseTensor, tf.IndexedSlices): _reduce_composite,
    tf.Variable: _reduce_tf_variable,
    tf.types.experimental.PolymorphicFunction: _reduce_tf_function,
    _TABLES: _reduce_table,
    (tf.data.Dataset, tf.data.Iterator): _reduce_not_sent,
    DynamicBackend: _reduce_dynamic_backend,
    types.ModuleType: _reduce_module,
    types.CodeType: _reduce_code,
    tf.Tensor: _reduce_tensor,
}


@functools.cache
def _reducer_of(kind: Any) -> Callable[[_Pickler, Any], Any] | None:
    return next((reduce for kinds, reduce in _REDUCERS.items() if issubclass(kind, kinds)), None)
