"""Variables with a varying number of rows."""

# mypy: allow-subclassing-any

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from elasticcb.keras_private import initialize, set_shape_of, set_value_of, value_of
from elasticcb.rpc.tensors import Array, aligned, dtype_of
from elasticcb.tf.convert import tensor_of

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
    return aligned(shape, tf.as_dtype(dtype).as_numpy_dtype, np.zeros)
