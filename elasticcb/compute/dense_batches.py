"""Batches of tf.data as dense numeric arrays, for frameworks without other tensor types."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from elasticcb.compute.registry import chosen_backend
from elasticcb.errors import ModelFileError
from elasticcb.rpc.tensors import Array


def arrays_of(batch: Any) -> Any:
    """A batch of the input pipeline, with tensors as NumPy arrays. Raises `ModelFileError` for tensors that Keras
    supports only on TensorFlow."""
    return keras.tree.map_structure(_array, batch)


def records_in(batch: Any) -> int:
    """Number of records in a batch of arrays."""
    return len(next(array for array in keras.tree.flatten(batch) if array is not None))


def repeated(batch: Any, size: int) -> Any:
    """A batch of `size` records, repeating those of `batch`."""
    places = np.arange(size) % records_in(batch)
    return keras.tree.map_structure(lambda array: None if array is None else array[places], batch)


def _array(leaf: Any) -> Array | None:
    if leaf is None:
        return None
    for attribute, kind, instead in _NOT_DENSE:
        if hasattr(leaf, attribute):
            raise ModelFileError(
                f"A batch holds a {kind} tensor, which Keras does not support on {chosen_backend()}. Give dense "
                f"tensors: {instead} in the input pipeline."
            )
    array = np.asarray(leaf)
    if array.dtype.kind in "OSU":
        raise ModelFileError(
            f"A batch holds strings, which Keras does not support on {chosen_backend()}. Turn them into numbers in "
            "the input pipeline: tf.strings.to_hash_bucket_fast, or keras.layers.StringLookup within dataset.map."
        )
    return array


_NOT_DENSE = (
    ("nested_row_splits", "ragged", "tensor.to_tensor(), or dataset.padded_batch,"),
    ("dense_shape", "sparse", "tf.sparse.to_dense(tensor)"),
)
