"""Converts between arrays and tensors, sharing memory where possible: a model's weights are not copied."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context

from elasticcb.rpc.tensors import SHARED_ALIGNMENT, Array

_DTYPES = (np.float32, np.float64, np.int64)  # of large data, and of counts and ids


def tensor_of(array: Array) -> tf.Tensor:
    """A tensor that may share the memory of `array`, which must not be modified while the tensor is used.

    TensorFlow never writes into memory that it does not own. A variable that is assigned the tensor may share the
    memory too.
    """
    if array.dtype in _DTYPES and array.size and not array.ctypes.data % SHARED_ALIGNMENT:
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
