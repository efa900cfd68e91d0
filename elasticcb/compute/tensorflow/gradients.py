"""Converts the gradients of a step for a push: cast to the weights' dtypes, rows summed, clipped."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import tensorflow as tf

from elasticcb.compute.clipping import Clipping
from elasticcb.sharding.partition import VariableSpec

Dense = dict[int, Any]  # gradients by variable
Rows = dict[int, tuple[Any, Any]]  # (unique int64 ids, gradients of these rows) by variable

# Row gradients of variables up to this size in bytes are made dense: sorting, sending, checking and applying their rows
# separately takes longer than sending this many bytes with the other dense gradients.
SMALL_BYTES = 256 << 10
# Likewise for variables that the worker's own optimizers train: for gradients of rows, Keras's optimizers also read the
# whole variable, with conditions that TensorFlow runs slowly.
WORKER_BYTES = 2 << 20


def sort_gradients(
    gradients: Mapping[int, Any],
    specs: Sequence[VariableSpec],
    clipped: Sequence[Clipping],
    tables: Mapping[int, Any] = MappingProxyType({}),
) -> tuple[Dense, Rows, Dense]:
    """Dense gradients, unique rows, and gradients of the rows `tables` of embedding tables, by variable."""
    prepared = {
        index: _of_table(gradient, tables[index]) if index in tables else _prepared(gradient, specs[index])
        for index, gradient in sorted(gradients.items())
    }
    for clipping in clipped:
        own = [index for index in prepared if index in clipping.variables]
        if own:
            scaled, _ = tf.clip_by_global_norm([prepared[index] for index in own], clipping.norm)
            prepared.update(zip(own, scaled, strict=True))
    served = {i: prepared.pop(i) for i in tables if i in prepared}
    dense = {i: gradient for i, gradient in prepared.items() if not isinstance(gradient, tf.IndexedSlices)}
    rows = {i: (g.indices, g.values) for i, g in prepared.items() if isinstance(g, tf.IndexedSlices)}
    return dense, rows, served


def _of_table(gradient: Any, rows: Any) -> Any:
    """The gradient of each of the rows [n, dim] given to a step."""
    if isinstance(gradient, tf.IndexedSlices):
        places = tf.reshape(gradient.indices, [-1])
        gradient = tf.math.unsorted_segment_sum(gradient.values, places, tf.shape(rows)[0])
    return tf.cast(gradient, rows.dtype)


def made_dense(gradient: Any, shape: Sequence[int], dtype: Any, most_bytes: int) -> Any:
    """The dense gradient of a variable of at most `most_bytes`, if `gradient` is one of rows; those of equal rows are
    summed. Any other gradient is returned as it is."""
    kind = tf.as_dtype(dtype)
    if not isinstance(gradient, tf.IndexedSlices) or math.prod(shape) * kind.size > most_bytes:
        return gradient
    rows = tf.reshape(gradient.indices, [-1])
    return tf.math.unsorted_segment_sum(tf.cast(gradient.values, kind), rows, shape[0])


def _prepared(gradient: Any, spec: VariableSpec) -> Any:
    gradient = made_dense(gradient, spec.shape, spec.dtype, SMALL_BYTES)
    if not isinstance(gradient, tf.IndexedSlices):
        return tf.cast(gradient, spec.dtype)
    given, values = tf.reshape(gradient.indices, [-1]), tf.cast(gradient.values, spec.dtype)
    ids, positions = tf.unique(tf.cast(given, tf.int64))
    values = tf.math.unsorted_segment_sum(values, positions, tf.size(ids))
    return tf.IndexedSlices(values, ids, gradient.dense_shape)
