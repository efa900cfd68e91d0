"""How objects of Python, TensorFlow and PyTorch that `pickle` refuses, or would take apart, are pickled; and the user's
classes that travel by value: filled with their attributes, without calling what runs when a class is defined
(`__init_subclass__`, `__set_name__`, methods of metaclasses, and what makes the members of an enum).
"""

from __future__ import annotations

import abc
import contextlib
import functools
import importlib
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from typing import Any, NoReturn

import cloudpickle
import numpy as np
import tensorflow as tf

from elasticcb.serialization import own_modules

_LOCKS = {type(make()): make for make in (threading.Lock, threading.RLock, threading.local)}
_TABLES = (tf.lookup.StaticHashTable, tf.lookup.experimental.MutableHashTable, tf.lookup.experimental.DenseHashTable)
NOT_SENT = {
    tf.data.Dataset: "create it in a function that each worker calls (elasticcb.DatasetFactory)",
    tf.data.Iterator: "create it where it is used",
}


def nothing() -> None:
    return None


def _reduce_weak(pickler: Any, reference: Any) -> Any:
    target = reference()
    if target is None:
        return functools.partial, (nothing,)
    if isinstance(reference, weakref.KeyedRef):  # of a WeakValueDictionary
        return weakref.KeyedRef, (target, None, reference.key)
    return weakref.WeakMethod if isinstance(reference, weakref.WeakMethod) else weakref.ref, (target,)


def _reduce_lock(pickler: Any, lock: Any) -> Any:
    return _LOCKS[type(lock)], ()


def _reduce_tensor(pickler: Any, tensor: Any) -> Any:
    if not hasattr(tensor, "numpy"):  # of a function that was traced here, and has left it behind
        return nothing, ()
    if tensor.dtype in (tf.variant, tf.resource):
        _cannot("it refers to memory of this process")
    return tf.constant, (tensor.numpy(), tensor.dtype.name)


def _reduce_composite(pickler: Any, tensor: Any) -> Any:
    parts = tf.nest.flatten(tensor, expand_composites=True)
    return _make_composite, (tf.type_spec_from_value(tensor), parts)


def _make_composite(spec: Any, parts: list[Any]) -> Any:
    return tf.nest.pack_sequence_as(spec, parts, expand_composites=True)


def _reduce_tf_function(pickler: Any, function: Any) -> Any:
    # Without its traces.
    options = {name: getattr(function, f"_{name}") for name in ("autograph", "jit_compile", "reduce_retracing")}
    return _make_tf_function, (function.python_function, function.input_signature, options)


def _make_tf_function(function: Any, input_signature: Any, options: dict[str, Any]) -> Any:
    return tf.function(function, input_signature=input_signature, **options)


def _reduce_table(pickler: Any, table: Any) -> Any:
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


def _reduce_strategy(pickler: Any, strategy: Any) -> Any:
    return tf.distribute.get_strategy, ()


def _reduce_module(pickler: Any, module: types.ModuleType) -> Any:
    if is_own := own_modules.is_own(module.__name__):
        pickler.modules.add(module.__name__)
    # These modules are created at import, and cloudpickle would take some of them apart.
    if is_own or f"{module.__name__}.".startswith(("keras.", "torch.")):
        return importlib.import_module, (module.__name__,)
    return cloudpickle.Pickler.reducer_override(pickler, module)


def _reduce_code(pickler: Any, code: types.CodeType) -> Any:
    make, arguments = pickler.dispatch_table[types.CodeType](code)[:2]
    return _make_code, (make, arguments, code.co_filename)  # which cloudpickle would leave out


def _make_code(make: Callable[..., Any], arguments: tuple[Any, ...], file: str) -> types.CodeType:
    code: types.CodeType = make(*arguments)
    return code.replace(co_filename=file)


def _reduce_not_sent(pickler: Any, thing: Any) -> NoReturn:
    _cannot("it belongs to this process")


def _cannot(reason: str) -> NoReturn:
    raise TypeError(reason)


REDUCERS: dict[type | tuple[type, ...], Callable[[Any, Any], Any]] = {
    weakref.ref: _reduce_weak,
    tuple(_LOCKS): _reduce_lock,
    tf.distribute.Strategy: _reduce_strategy,
    (tf.RaggedTensor, tf.SparseTensor, tf.IndexedSlices): _reduce_composite,
    tf.types.experimental.PolymorphicFunction: _reduce_tf_function,
    _TABLES: _reduce_table,
    (tf.data.Dataset, tf.data.Iterator): _reduce_not_sent,
    types.ModuleType: _reduce_module,
    types.CodeType: _reduce_code,
    tf.Tensor: _reduce_tensor,
}

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


class Buffer:
    """A buffer, with what is used of variables."""

    def __init__(self, path: str, tensor: Any) -> None:
        self.path, self.tensor = path, tensor

    def numpy(self) -> np.ndarray:
        return np.array(self.tensor.detach().cpu().numpy())

    def assign(self, value: Any) -> None:
        self.tensor.data.copy_(self.tensor.new_tensor(np.asarray(value)))


def buffers_of(layers: Iterable[Any]) -> list[Buffer]:
    """The buffers in some layers; of other backends than PyTorch, none."""
    named = [pair for layer in layers if hasattr(layer, "named_buffers") for pair in layer.named_buffers()]
    return [Buffer(name, tensor) for name, tensor in {id(pair[1]): pair for pair in named}.values()]


def make_buffer(path: str, dtype: str, value: np.ndarray) -> Buffer:
    torch = importlib.import_module("torch")  # only if the model uses it
    return Buffer(path, torch.tensor(value, dtype=getattr(torch, dtype)))


def tensor_of(buffer: Buffer) -> Any:
    return buffer.tensor
