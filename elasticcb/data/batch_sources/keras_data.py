"""All uses of Keras's data handling."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from elasticcb.keras_private import (
    array_data_adapter,
    array_slicing,
    arrays_of_adapter,
    data_adapter_utils,
    data_adapters,
    generator_data_adapter,
    py_dataset_adapter,
    standardized_batch,
    tf_dataset_adapter,
)

ArrayDataAdapter = array_data_adapter.ArrayDataAdapter
GeneratorDataAdapter = generator_data_adapter.GeneratorDataAdapter
PyDatasetAdapter = py_dataset_adapter.PyDatasetAdapter
TFDatasetAdapter = tf_dataset_adapter.TFDatasetAdapter

get_data_adapter = data_adapters.get_data_adapter
raise_unsupported_argument = data_adapters.raise_unsupported_arg
train_validation_split = array_slicing.train_validation_split


def arrays_of(adapter: Any) -> Any:
    """The arrays of an adapter, packed as `x`, `(x, y)` or `(x, y, sample_weight)`."""
    return keras.tree.lists_to_tuples(arrays_of_adapter(adapter))


def num_rows(arrays: Any) -> int:
    """Number of rows of each array of a checked structure."""
    return next(int(array.shape[0]) for array in keras.tree.flatten(arrays) if array is not None)


def standardized(adapter: Any, batch: Any) -> Any:
    """A batch of a `PyDataset`, as a tuple or dict, with sample weights from `class_weight`."""
    return standardized_batch(adapter, batch)


def to_tensorflow(array: Any) -> Any:
    """Converts an array of any type to the form from which Keras gathers batches: a NumPy array, a tensor (dense,
    ragged), or a tuple `(sparse, ragged_indices, ragged_values)` for a sparse array; floats are cast to `floatx`."""
    if data_adapter_utils.is_scipy_sparse(array):
        array = array.tocsr().sorted_indices()  # Keras assumes that rows are in order
    elif isinstance(array, tf.SparseTensor):
        array = tf.sparse.reorder(array)
    return array_slicing.convert_to_sliceable(array, target_backend="tensorflow")


def is_sparse(converted: Any) -> bool:
    """Whether `to_tensorflow` returned the tuple of a sparse array."""
    return isinstance(converted, array_slicing.TensorflowSparseWrapper)


def float_cast(dtype: np.dtype[Any]) -> np.dtype[Any] | None:
    """The dtype to which Keras casts an array of this dtype; None if it does not cast it."""
    floatx = np.dtype(keras.config.floatx())
    return floatx if np.issubdtype(dtype, np.floating) and dtype != floatx else None


def map_arrays(function: Callable[[Any], Any], structure: Any) -> Any:
    """Applies `function` to each leaf of a nested structure; None stays None."""
    # Newer Keras also calls the function on None.
    return keras.tree.map_structure(lambda leaf: None if leaf is None else function(leaf), structure)


def to_batch(batch: Any) -> Any:
    """Normalizes a batch from the user's code: lists become tuples, leaves become NumPy arrays or tensors."""

    def convert(leaf: Any) -> Any:
        if data_adapter_utils.is_scipy_sparse(leaf):
            return data_adapter_utils.scipy_sparse_to_tf_sparse(leaf)
        if not data_adapter_utils.is_tensorflow_tensor(leaf):
            leaf = np.asarray(leaf)
            if leaf.dtype.kind in "OUS":
                return tf.convert_to_tensor(leaf, tf.string)
        return leaf

    return map_arrays(convert, keras.tree.lists_to_tuples(batch))


def fixed_rows(batches: Any) -> list[bool]:
    """`BatchSource.fixed` of a `tf.data.Dataset`; empty for other iterables."""
    if not isinstance(batches, tf.data.Dataset):
        return []
    shapes = [getattr(spec, "shape", None) for spec in tf.nest.flatten(batches.element_spec)]
    return [bool(shape is not None and shape.rank and shape[0] is not None) for shape in shapes]


def weighted(dataset: tf.data.Dataset, class_weight: Mapping[int, float] | None) -> tf.data.Dataset:
    """A dataset of batches with sample weights from `class_weight`."""
    if class_weight is None:
        return dataset
    return dataset.map(tf_dataset_adapter.make_class_weight_map_fn(class_weight))


def class_weights(class_weight: Mapping[int, float] | None) -> Callable[[Any], Any]:
    """A function that adds sample weights to a batch."""
    if class_weight is None:
        return lambda batch: batch
    weigh = tf_dataset_adapter.make_class_weight_map_fn(class_weight)
    return lambda batch: weigh(*batch)


def capped_steps(steps: int | None) -> int | None:
    """`steps` under `keras.config.max_steps_per_epoch()`, with Keras's warning."""
    limit = keras.config.max_steps_per_epoch()
    if limit and (not steps or limit < steps):
        warnings.warn(f"Limiting steps_per_epoch to {limit}", stacklevel=3)
        return limit
    return steps


def warn_of_missing_data() -> None:
    """Keras's warning when data ends before `steps`."""
    warnings.warn(
        "Your input ran out of data; interrupting training. Make sure that your dataset or generator can generate at "
        "least `steps_per_epoch * epochs` batches. You may need to use the `.repeat()` function when building your "
        "dataset.",
        stacklevel=3,
    )
