"""Encodes batches as NumPy arrays only: ragged and sparse tensors by their components."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from elasticcb.data.batch_sources import keras_data


@dataclass(frozen=True)
class _Leaf:
    """The components of a leaf: `count` arrays, starting with number `first`."""

    first: int
    dtypes: tuple[tf.DType, ...]
    spec: tf.TypeSpec | None  # TypeSpec of a ragged or sparse tensor


class Layout:
    """The structure of a source's batches, and how to split them into arrays and reassemble them."""

    def __init__(self, batch: Any) -> None:
        self.dtypes: list[tf.DType] = []
        self._leaves = keras_data.map_arrays(self._leaf, batch)

    def arrays(self, batch: Any) -> list[Any]:
        """The arrays of `batch`. Raises `ValueError` if its structure differs from the others."""
        if Layout(batch) != self:
            raise ValueError(f"All batches must have the same structure and dtypes: {self}. Received: {Layout(batch)}")
        flat: list[Any] = []
        keras_data.map_arrays(lambda leaf: flat.extend(_parts(leaf)), batch)
        return flat

    def batch(self, arrays: Sequence[Any]) -> Any:
        """Reassembles a batch from `arrays`: numbers as NumPy arrays, everything else as tensors."""

        def join(leaf: _Leaf) -> Any:
            parts = arrays[leaf.first : leaf.first + len(leaf.dtypes)]
            if leaf.spec is not None:
                tensors = [tf.constant(part, dtype) for part, dtype in zip(parts, leaf.dtypes, strict=True)]
                return tf.nest.pack_sequence_as(leaf.spec, tensors, expand_composites=True)
            return tf.constant(parts[0], tf.string) if leaf.dtypes[0] == tf.string else parts[0]

        return keras_data.map_arrays(join, self._leaves)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and self._leaves == other._leaves

    __hash__ = None  # type: ignore[assignment]

    def __str__(self) -> str:
        def name(leaf: _Leaf) -> str:
            kind = "" if leaf.spec is None else type(leaf.spec).__name__.removesuffix("TensorSpec").lower() + " "
            return kind + leaf.dtypes[0].name

        return str(keras_data.map_arrays(name, self._leaves))

    def _leaf(self, value: Any) -> _Leaf:
        spec: tf.TypeSpec | None = None
        if isinstance(value, tf.RaggedTensor):
            spec = tf.RaggedTensorSpec(None, value.dtype, value.ragged_rank, value.row_splits.dtype)
        elif isinstance(value, tf.SparseTensor):
            spec = tf.SparseTensorSpec(None, value.dtype)
        first = len(self.dtypes)
        self.dtypes += [tf.as_dtype(part.dtype) if part.dtype.kind != "O" else tf.string for part in _parts(value)]
        return _Leaf(first, tuple(self.dtypes[first:]), spec)


def _parts(leaf: Any) -> list[Any]:
    if isinstance(leaf, tf.RaggedTensor | tf.SparseTensor):
        return [part.numpy() for part in tf.nest.flatten(leaf, expand_composites=True)]
    return [np.asarray(leaf)]
