"""How objects of Python and TensorFlow that `pickle` refuses, or would take apart, are pickled."""

from __future__ import annotations

import functools
import importlib
import threading
import types
import weakref
from collections.abc import Callable
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
    # These modules are created at import, and cloudpickle would take some of them apart.
    if f"{module.__name__}.".startswith(("keras.", "torch.")) or own_modules.is_own(module.__name__):
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
