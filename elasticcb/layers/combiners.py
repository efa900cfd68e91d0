"""Looks up vectors of dense, ragged and sparse ids, and combines the vectors of an example."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from keras import ops

COMBINERS = (None, "sum", "mean", "sqrtn")

Lookup = Callable[[Any], Any]  # rows [..., dim] of int ids [...]


def combine(ids: Any, lookup: Lookup, combiner: str | None, mask_zero: bool, weights: Any = None) -> Any:
    """The vectors of `ids`, combined along their last axis.

    Args:
        mask_zero: ignore the id 0 if there is a combiner.
        weights: weight of each id, with the type and shape of `ids`; None: 1.
    """
    if isinstance(ids, tf.RaggedTensor):
        return _of_ragged(ids, lookup, combiner, mask_zero, weights)
    if isinstance(ids, tf.SparseTensor):
        if combiner is None:
            return lookup(tf.sparse.to_dense(tf.sparse.reorder(ids)))
        return _of_sparse(ids, lookup, combiner, mask_zero, weights)
    rows = lookup(ids)
    return rows if combiner is None else _of_dense(ids, rows, combiner, mask_zero, weights)


def _of_dense(ids: Any, rows: Any, combiner: str, mask_zero: bool, weights: Any) -> Any:
    counted, rows = _weighted(ids, rows, mask_zero, weights)
    return _scaled(ops.sum(rows, -2), counted, combiner, lambda values: ops.sum(values, -1))


def _weighted(ids: Any, rows: Any, mask_zero: bool, weights: Any) -> tuple[Any, Any]:
    """The weight of each id, with the shape of `ids`, and the weighted rows."""
    dtype = keras.backend.standardize_dtype(rows.dtype)
    counted = ops.ones_like(ids, dtype=dtype)
    if weights is None and not mask_zero:
        return counted, rows
    if weights is not None:
        counted = counted * ops.cast(weights, dtype)
    if mask_zero:
        counted = counted * ops.cast(ops.not_equal(ids, 0), dtype)
    return counted, rows * counted[..., None]


def _of_ragged(ids: tf.RaggedTensor, lookup: Lookup, combiner: str | None, mask_zero: bool, weights: Any) -> Any:
    rows = lookup(ids.flat_values)
    if combiner is None:
        return ids.with_flat_values(rows)
    flat = weights.flat_values if isinstance(weights, tf.RaggedTensor) else weights
    if ids.flat_values.shape.rank != 1:  # the last axis has one length
        return ids.with_flat_values(_of_dense(ids.flat_values, rows, combiner, mask_zero, flat))
    *outer, splits = ids.nested_row_splits
    count = tf.size(splits, splits.dtype) - 1
    segments = tf.repeat(tf.range(count), splits[1:] - splits[:-1])
    combined = _of_segments(ids.flat_values, rows, segments, count, combiner, mask_zero, flat)
    if outer:
        return tf.RaggedTensor.from_nested_row_splits(combined, outer, validate=False)
    return combined


def _of_sparse(ids: tf.SparseTensor, lookup: Lookup, combiner: str, mask_zero: bool, weights: Any) -> tf.Tensor:
    outer = ids.dense_shape[:-1]
    steps = tf.math.cumprod(outer, exclusive=True, reverse=True)
    segments = tf.reduce_sum(ids.indices[:, :-1] * steps, 1)
    given = weights.values if isinstance(weights, tf.SparseTensor) else weights
    combined = _of_segments(ids.values, lookup(ids.values), segments, tf.reduce_prod(outer), combiner, mask_zero, given)
    result = tf.reshape(combined, tf.concat([outer, [combined.shape[-1]]], 0))
    result.set_shape([*ids.shape[:-1], combined.shape[-1]])
    return result


def _of_segments(
    ids: tf.Tensor, rows: tf.Tensor, segments: tf.Tensor, count: tf.Tensor, combiner: str, mask_zero: bool, weights: Any
) -> tf.Tensor:
    counted, rows = _weighted(ids, rows, mask_zero, weights)

    def total(values: tf.Tensor) -> tf.Tensor:
        return tf.math.unsorted_segment_sum(values, segments, count)

    return _scaled(total(rows), counted, combiner, total)


def _scaled(sums: Any, counted: Any, combiner: str, total: Callable[[Any], Any]) -> Any:
    if combiner == "sum":
        return sums
    by = total(counted) if combiner == "mean" else ops.sqrt(total(ops.square(counted)))
    return ops.divide_no_nan(sums, by[..., None])
