"""Converts between arrays and tensors, sharing memory where possible: a model's weights are not copied. Variables with
a varying number of rows. The devices of TensorFlow in a process whose Keras backend is another framework.
"""

# mypy: allow-subclassing-any

from __future__ import annotations

import contextlib
import functools
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context

from elasticcb.keras_private import initialize, set_shape_of, set_value_of, value_of
from elasticcb.rpc.tensors import ALIGNMENT, Array, aligned, dtype_of

_DTYPES = (np.float32, np.float64, np.int64)  # of large data, and of counts and ids


def tensor_of(array: Array) -> tf.Tensor:
    """A tensor that may share the memory of `array`, which must not be modified while the tensor is used.

    TensorFlow never writes into memory that it does not own. A variable that is assigned the tensor may share the
    memory too.
    """
    if array.dtype in _DTYPES and array.size and not array.ctypes.data % ALIGNMENT:
        view = array.view()
        try:
            view.flags.writeable = True  # required by NumPy's export
        except ValueError:
            pass  # of bytes, which are never written
        else:
            return tf.experimental.dlpack.from_dlpack(view.__dlpack__())
    return tf.convert_to_tensor(array)


def forget_kernels() -> None:
    """Frees the kernels that TensorFlow caches for operations on variables for the life of the process.

    For when many variables are gone for good: about 70 kB per small model. Kernels are recreated when needed. Keras's
    `clear_session` does the same, but also resets its own settings of all threads.
    """
    context.context().clear_kernel_cache()


def array_of(tensor: tf.Tensor) -> Array:
    """The tensor's array, read-only, without a copy if NumPy supports the dtype."""
    shape = tensor._shape_tuple()  # `shape` would create an object per dimension
    dtype = _numpy_dtype(tensor.dtype)
    array: Array = tensor.numpy() if dtype is None or 0 in shape else np.frombuffer(tensor, dtype).reshape(shape)
    return array


@functools.cache
def _numpy_dtype(dtype: tf.DType) -> np.dtype[Any] | None:
    """NumPy's own dtype; None if there is none for the tensor's bytes."""
    has_one = dtype.is_numpy_compatible and dtype not in (tf.bfloat16, tf.string)
    return np.dtype(dtype.as_numpy_dtype) if has_one else None


# Otherwise they hold arrays of another framework, which can simply be replaced.
OF_TENSORFLOW = issubclass(keras.Variable, tf.__internal__.types.Tensor)


class RowVariable(keras.Variable):
    """Has any number of rows, regardless of `shape`."""

    free_rows = True

    def _initialize(self, value: Any) -> None:  # called by Keras
        if not OF_TENSORFLOW:
            super()._initialize(value)
            return
        with tf.init_scope(), tf.device("/CPU:0"):
            self._value = _free(value() if callable(value) else value, self)


def make_free_rows(variable: keras.Variable) -> None:
    """Empties a variable and allows it any number of rows from now on."""
    if not OF_TENSORFLOW:
        _exchange(variable, np.zeros((0, *variable.shape[1:]), dtype_of(variable.dtype)))
        return
    with tf.init_scope(), tf.device("/CPU:0"):
        _replace(variable, _free(tf.zeros([0, *variable.shape[1:]], variable.dtype), variable))


def _replace(variable: keras.Variable, value: tf.Variable) -> None:
    value._unique_id = value_of(variable)._unique_id  # by which an already built optimizer identifies it
    set_value_of(variable, value)


def _free(value: Any, variable: keras.Variable) -> tf.Variable:
    return tf.Variable(
        value,
        dtype=variable.dtype,
        shape=[None, *variable.shape[1:]],
        trainable=variable.trainable,
        name=variable.name,
    )


def _exchange(variable: keras.Variable, rows: Array) -> None:
    set_shape_of(variable, rows.shape)
    tensor = keras.ops.convert_to_tensor(rows, dtype=variable.dtype)
    if hasattr(value_of(variable), "requires_grad"):  # PyTorch's, which layers list: it stays in place
        value_of(variable).data, value_of(variable).grad = tensor, None
    else:
        initialize(variable, tensor)


def fill(variable: keras.Variable, rows: Array) -> None:
    """Sets the rows of a variable with free rows. Shares their memory: don't modify them afterwards."""
    if not OF_TENSORFLOW:
        _exchange(variable, rows)
        return
    value_of(variable).assign(tensor_of(rows))
    set_shape_of(variable, rows.shape)


def make_whole(variable: keras.Variable, rows: Array) -> None:
    """Gives a variable the shape and value of `rows`. Shares their memory: don't modify them afterwards."""
    if not OF_TENSORFLOW:
        _exchange(variable, rows)
        return
    with tf.init_scope(), tf.device("/CPU:0"):
        _replace(
            variable,
            tf.Variable(tensor_of(rows), dtype=variable.dtype, trainable=variable.trainable, name=variable.name),
        )
    set_shape_of(variable, rows.shape)


def untouched_zeros(shape: tuple[int, ...], dtype: Any) -> Array:
    """Zeros that TensorFlow shares, and that take no memory until they are written."""
    return aligned(shape, tf.as_dtype(dtype).as_numpy_dtype, zeros=True)


def leave_gpus() -> None:
    """Makes TensorFlow, which only reads the data here, leave the GPUs to others."""
    with contextlib.suppress(RuntimeError):  # already initialized by the caller's program
        tf.config.set_visible_devices([], "GPU")
