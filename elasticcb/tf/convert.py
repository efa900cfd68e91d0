"""Arrays as tensors and tensors as arrays, of the same memory where that can be: a model's weights are not copied."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context

from elasticcb.rpc.tensors import SHARED_ALIGNMENT, Array

_DTYPES = (np.float32, np.float64, np.int64)  # of what is large, and of counts and ids


def tensor_of(array: Array) -> tf.Tensor:
    """A tensor that may share the memory of `array`, which must not be written to while the tensor is used.

    TensorFlow never writes into memory that is not its own. A variable that the tensor is assigned to may share the
    memory as well.
    """
    if array.dtype in _DTYPES and array.size and not array.ctypes.data % SHARED_ALIGNMENT:
        view = array.view()
        try:
            view.flags.writeable = True  # else NumPy does not hand it over
        except ValueError:
            pass  # of bytes, which are never written
        else:
            return tf.experimental.dlpack.from_dlpack(view.__dlpack__())
    return tf.convert_to_tensor(array)


def forget_kernels() -> None:
    """Frees what TensorFlow keeps of each operation on a variable for as long as the process lives.

    For when many variables are gone for good: some 70 kB for each small model that there was. What is called again is
    made again. Keras's `clear_session` does the same, and forgets its own settings of all threads besides.
    """
    context.context().clear_kernel_cache()


def array_of(tensor: tf.Tensor) -> Array:
    """The tensor's array, read-only, without a copy where NumPy knows the dtype."""
    shape = tensor._shape_tuple()  # `shape` makes an object of each dimension
    dtype = _numpy_dtype(tensor.dtype)
    array: Array = tensor.numpy() if dtype is None or 0 in shape else np.frombuffer(tensor, dtype).reshape(shape)
    return array


@functools.cache
def _numpy_dtype(dtype: tf.DType) -> np.dtype[Any] | None:
    """NumPy's own; None where it has none that holds the tensor's bytes."""
    has_one = dtype.is_numpy_compatible and dtype not in (tf.bfloat16, tf.string)
    return np.dtype(dtype.as_numpy_dtype) if has_one else None
