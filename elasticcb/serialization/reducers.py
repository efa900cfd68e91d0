"""How a program is pickled, and what of it is Keras's: each object from its attributes, or, if it belongs to a process,
made again.

Functions are arguments of `pickle`: one that makes the object, and often one that sets its state.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import linecache
import sys
import threading
import types
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, cast

import cloudpickle
import keras
import numpy as np
import tensorflow as tf

from elasticcb.keras_private import DynamicBackend, KerasSaveable, KerasVariable, Node, tracking, value_of
from elasticcb.optimizers.traits import public_class
from elasticcb.serialization import library_objects, own_modules
from elasticcb.serialization.library_objects import Buffer, make_buffer, tensor_of
from elasticcb.tf.tensors import untouched_zeros

_PLAIN = (bool, int, float, str, tuple, type(None))
_TRACKED = tuple(kind for name, kind in vars(tracking).items() if name.startswith("Tracked") and isinstance(kind, type))
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


class Hollow:
    """Says which objects travel without their content.

    Args:
        weights: variables whose values the servers hold; they travel as shapes.
        rows: variables and arrays with rows that the servers hold; they travel without rows.
        optimizers: those whose state the servers hold; they travel as before their first step.
        buffers: those of PyTorch, which then travel like variables.
        portable: whether another Keras backend reads it. Then nothing refers to the model's variables.
    """

    def __init__(
        self,
        weights: Iterable[Any] = (),
        rows: Iterable[Any] = (),
        optimizers: Iterable[Any] = (),
        portable: bool = False,
        buffers: Iterable[Buffer] = (),
    ) -> None:
        self.portable = portable
        self.weights = {id(each): each for each in weights}
        self.parameters = {id(value_of(each)): each for each in self.weights.values()}
        self.buffers = {id(each.tensor): each for each in buffers}
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


class ObjectPickler(cloudpickle.Pickler):
    """Pickles objects of a program by their kinds, and functions with the variables of the scope that they share.

    Args:
        lists_values: list the values of variables, instead of writing them where the variables are.

    Attributes:
        last: the object whose turn came last, for messages.
        sources: lines of the user's files whose functions it has met.
        used: names in modules that the reader imports, and that these functions use, by module.
        modules: names of own modules that objects refer to as modules.
        values, variables: those listed.
        is_steady: as `Graph.is_steady`.
    """

    def __init__(self, file: Any, hollow: Hollow, lists_values: bool, buffer_callback: Any) -> None:
        super().__init__(file, protocol=5, buffer_callback=buffer_callback)
        self.hollow, self._lists_values = hollow, lists_values
        self.last: Any = None
        self.sources: dict[str, list[str]] = {}
        self.used: dict[str, set[str]] = {}
        self.modules: set[str] = set()
        self.values: list[Any] = []
        self.variables: list[Any] = []
        self.is_steady = lists_values

    def listed(self, variable: Any, value: Any) -> Any:
        """The value of a variable, or its place where values are listed."""
        if value is None or not self._lists_values:
            return value
        self.values.append(value)
        self.variables.append(variable)
        return _Listed(len(self.values) - 1)

    def reducer_override(self, obj: Any) -> Any:
        self.last = obj
        reduce = _reducer_of(cast(Hashable, type(obj)))
        if reduce is not None:
            return reduce(self, obj)
        if type(obj) is types.FunctionType and _is_of_package(obj):
            return _reduce_function_of_package(obj)
        if id(obj) in self.hollow.parameters:  # of a module of PyTorch, which a layer holds
            return value_of, (self.hollow.parameters[id(obj)],)
        if id(obj) in self.hollow.buffers:
            return tensor_of, (self.hollow.buffers[id(obj)],)
        if id(obj) in self.hollow.rows and isinstance(obj, np.ndarray):
            return np.zeros, ((0, *obj.shape[1:]), obj.dtype)
        reduced = super().reducer_override(obj)
        if isinstance(obj, types.FunctionType) and reduced is not NotImplemented:
            self._note_code(obj)
        return library_objects.reduce_class(obj, reduced) if isinstance(obj, type) else reduced

    def _function_getnewargs(self, func: Any) -> Any:
        if own_modules.is_own(str(func.__globals__.get("__name__"))):
            self.globals_ref.setdefault(id(func.__globals__), _Globals(func.__globals__))
        # With its own cells: functions of one scope share its variables.
        return (*super()._function_getnewargs(func)[:-1], func.__closure__)

    def _note_code(self, function: types.FunctionType) -> None:
        file = function.__code__.co_filename
        if file not in self.sources and not own_modules.is_installed(file):
            self.sources[file] = linecache.getlines(file, function.__globals__)
        for module, names in own_modules.used_by(function):
            self.used.setdefault(module, set()).update(names)


# ---------------------------------------------------------------- what is computed from identities, once all is there

_reading = threading.local()


@contextlib.contextmanager
def finishing(values: Sequence[Any], modules: Collection[str]) -> Iterator[dict[int, Any]]:
    """Context of reading; returns the variables that are read, by the place of their value in `values`.

    Args:
        modules: own modules that objects refer to as modules: these have one set of globals with their functions.
    """
    before = dict(vars(_reading))
    _reading.later, _reading.values, _reading.variables, _reading.modules = [], values, {}, modules
    try:
        yield _reading.variables
        for finish in _reading.later:
            finish()
    finally:
        vars(_reading).clear()
        vars(_reading).update(before)


def _later(finish: Callable[[], None]) -> None:
    _reading.later.append(finish)


# ---------------------------------------------------------------- globals of own modules


class _Globals:
    """Stands for those of a module's functions."""

    def __init__(self, variables: dict[str, Any]) -> None:
        names = ("__package__", "__name__", "__path__", "__file__")  # for relative imports, as in cloudpickle
        self._own = {name: variables[name] for name in names if name in variables}

    def __reduce__(self) -> Any:
        return _globals_of, (self._own,)


def _globals_of(own: dict[str, Any]) -> dict[str, Any]:
    name = own["__name__"]
    return vars(importlib.import_module(name)) if name in _reading.modules else own


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


def _reduce_cell(pickler: ObjectPickler, cell: types.CellType) -> Any:
    return types.CellType, (), _content(cell), None, None, _fill_cell


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


def _reduce_variable(pickler: ObjectPickler, variable: Any) -> Any:
    hollow = pickler.hollow
    if id(variable) in hollow.absent:
        return library_objects.nothing, ()
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


def _reduce_tf_variable(pickler: ObjectPickler, variable: Any) -> Any:
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


def _reduce_buffer(pickler: ObjectPickler, buffer: Buffer) -> Any:
    dtype = str(buffer.tensor.dtype).partition(".")[2]
    return _make_buffer, (buffer.path, dtype, pickler.listed(buffer, buffer.numpy()))


def _make_buffer(path: str, dtype: str, value: Any) -> Buffer:
    place, value = _listed(value)
    buffer = make_buffer(path, dtype, value)
    if place is not None:
        _reading.variables[place] = buffer
    return buffer


@dataclass(frozen=True)
class _Listed:
    """Where the value of a variable is in the list of values."""

    index: int


def _listed(value: Any) -> tuple[int | None, Any]:
    """The place in the list of values, if it is there, and the value."""
    return (value.index, _reading.values[value.index]) if isinstance(value, _Listed) else (None, value)


# ---------------------------------------------------------------- Keras objects


def _reduce_keras(pickler: ObjectPickler, thing: Any) -> Any:
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
    if isinstance(thing, (keras.optimizers.Optimizer, keras.layers.Layer)):
        plain = keras.layers.Layer if isinstance(thing, keras.layers.Layer) else keras.optimizers.SGD
        for name, value in vars(_new(plain)).items():  # what only this backend has
            if name not in ("build", "quantize"):
                vars(thing).setdefault(name, type(value)(value) if isinstance(value, (list, dict, set)) else value)


@functools.cache
def _new(kind: Any) -> Any:
    return kind()


def _reduce_node(pickler: ObjectPickler, node: Any) -> Any:
    return object.__new__, (type(node),), dict(vars(node)), None, None, _fill_node


def _fill_node(node: Any, state: dict[str, Any]) -> None:
    vars(node).update(state)
    # The way forward follows from the way back.
    for tensor in node.arguments.keras_tensors:
        operation = tensor._keras_history.operation
        if operation is not None:
            vars(operation).setdefault("_outbound_nodes", []).append(node)


def _reduce_tracked(pickler: ObjectPickler, tracked: Any) -> Any:
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


def _reduce_tracker(pickler: ObjectPickler, tracker: Any) -> Any:
    state = {name: value for name, value in vars(tracker).items() if name != "stored_ids"}
    return object.__new__, (type(tracker),), state, None, None, _fill_tracker


def _fill_tracker(tracker: Any, state: dict[str, Any]) -> None:
    vars(tracker).update(state)

    def finish() -> None:
        tracker.stored_ids = {name: {id(each) for each in store} for name, (_, store) in tracker.config.items()}

    _later(finish)


# ---------------------------------------------------------------- optimizers


def _state_of_optimizer(pickler: ObjectPickler, optimizer: Any, state: dict[str, Any]) -> dict[str, Any]:
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


def _update(thing: Any, state: dict[str, Any]) -> None:
    vars(thing).update(state)


def _reduce_dynamic_backend(pickler: ObjectPickler, backend: Any) -> Any:
    return type(backend), (backend._backend,)  # whose __getattr__ needs it before there is any state


def _is_of_user(kind: type, name: str) -> bool:
    """Whether a class of the user's defines a method, rather than a framework."""
    owner = next((each for each in kind.__mro__ if name in vars(each)), None)
    return owner is not None and not f"{owner.__module__}.".startswith(_OF_FRAMEWORKS)


_REDUCERS: dict[type | tuple[type, ...], Callable[[ObjectPickler, Any], Any]] = {
    KerasVariable: _reduce_variable,
    _TRACKED: _reduce_tracked,
    tracking.Tracker: _reduce_tracker,
    KerasSaveable: _reduce_keras,
    Node: _reduce_node,
    Enum: library_objects.reduce_member,
    functools._lru_cache_wrapper: library_objects.reduce_cached,
    tf.Variable: _reduce_tf_variable,
    Buffer: _reduce_buffer,
    DynamicBackend: _reduce_dynamic_backend,
    types.CellType: _reduce_cell,
    **library_objects.REDUCERS,
}


@functools.cache
def _reducer_of(kind: Any) -> Callable[[ObjectPickler, Any], Any] | None:
    return next((reduce for kinds, reduce in _REDUCERS.items() if issubclass(kind, kinds)), None)
