"""Converts inputs of an embedding layer to ids: integers, floats with integer values, or strings."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from elasticcb.errors import ModelFileError
from elasticcb.rpc.tensors import Array

# FarmHash's Fingerprint64 modulo this, plus 1, fits in int64, and no string has the id 0. Checkpoints contain such ids.
_STRING_IDS = 2**63 - 2


def integer_ids(inputs: Any, name: str, input_dim: int | None, mask_zero: bool) -> Any:
    """Returns ids of the same tensor type as the inputs (tensor, RaggedTensor or SparseTensor), int64 unless they are
    integers already.

    Args:
        name, input_dim, mask_zero: arguments of the layer. With `mask_zero`, the empty string is padding as well.

    Raises `ModelFileError` for invalid inputs.
    """
    if not isinstance(inputs, (tf.RaggedTensor, tf.SparseTensor)):
        inputs = keras.ops.convert_to_tensor(inputs)
    dtype = keras.backend.standardize_dtype(inputs.dtype)
    if "int" in dtype:
        return inputs
    if dtype == "string":
        if input_dim is None:
            return _of_strings(inputs, mask_zero)
        raise ModelFileError(
            f"The embedding layer {name!r} was given strings, which it hashes to 63-bit ids, but has "
            f"input_dim={input_dim}. Remove input_dim; or convert strings to ids below it with keras.layers.Hashing "
            "or keras.layers.StringLookup."
        )
    # Keras casts the inputs of a Sequential model without an Input to floats.
    exact = 2 ** {"float16": 11, "bfloat16": 8, "float32": 24, "float64": 53}.get(dtype, 0)
    if exact > 1 and input_dim is not None and input_dim <= exact:
        return tf.cast(inputs, tf.int64) if tf.is_tensor(inputs) else keras.ops.cast(inputs, "int32")
    limit = f"{dtype} represents only ids up to {exact} exactly." if exact > 1 else "It takes integers or strings."
    raise ModelFileError(
        f"The embedding layer {name!r} was given {dtype} of shape {inputs.shape}. {limit} Convert numbers to ids with "
        "keras.layers.Discretization or keras.ops.cast. Start a Sequential model with keras.Input(..., "
        'dtype="int64") or dtype="string"; otherwise, Keras casts ids to floats.'
    )


class HeldIds:
    """The ids of the rows that a layer holds, with the interface of a tf.Variable.

    For layers on other frameworks: the ids are already known when these trace a step that reads them.
    """

    def __init__(self) -> None:
        self._ids: Array = np.zeros(0, np.int64)

    def assign(self, ids: Array) -> None:
        self._ids = ids

    def numpy(self) -> Array:
        return self._ids


def id_of_text(text: str) -> int:
    """The id of a string that is not padding."""
    return int(_of_strings(tf.constant(text), mask_zero=False))


def padding_of(dtype: Any) -> int | str:
    """The padding value of a layer with `mask_zero` for inputs of this dtype."""
    return "" if keras.backend.standardize_dtype(dtype) == "string" else 0


def _of_strings(strings: Any, mask_zero: bool) -> Any:
    if isinstance(strings, tf.RaggedTensor):
        return strings.with_flat_values(_of_strings(strings.flat_values, mask_zero))
    if isinstance(strings, tf.SparseTensor):
        return tf.SparseTensor(strings.indices, _of_strings(strings.values, mask_zero), strings.dense_shape)
    ids = tf.strings.to_hash_bucket_fast(strings, _STRING_IDS) + 1
    return tf.where(tf.equal(strings, ""), tf.zeros_like(ids), ids) if mask_zero else ids
