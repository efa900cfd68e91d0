"""Vectors of dense, ragged and sparse ids, and how those of one example become one vector."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

COMBINERS = (None, "sum", "mean", "sqrtn")

Lookup = Callable[[tf.Tensor], tf.Tensor]  # rows [..., dim] of int ids [...]


def combine(ids: Any, lookup: Lookup, combiner: str | None, mask_zero: bool) -> Any:
    """The vectors of `ids`, combined along their last axis.

    Args:
        ids: integers, a tensor, RaggedTensor or SparseTensor.
        combiner: one of `COMBINERS`.
        mask_zero: the id 0 does not count, where there is a combiner.
    """
    if isinstance(ids, tf.RaggedTensor):
        return _of_ragged(ids, lookup, combiner, mask_zero)
    if isinstance(ids, tf.SparseTensor):
        if combiner is None:
            return lookup(tf.sparse.to_dense(tf.sparse.reorder(ids)))
        return _of_sparse(ids, lookup, combiner, mask_zero)
    rows = lookup(ids)
    return rows if combiner is None else _of_dense(ids, rows, combiner, mask_zero)


def _of_dense(ids: tf.Tensor, rows: tf.Tensor, combiner: str, mask_zero: bool) -> tf.Tensor:
    counted = tf.cast(ids != 0, rows.dtype) if mask_zero else tf.ones_like(ids, rows.dtype)
    if mask_zero:
        rows *= counted[..., None]
    return _scaled(tf.reduce_sum(rows, -2), tf.reduce_sum(counted, -1), combiner)


def _of_ragged(ids: tf.RaggedTensor, lookup: Lookup, combiner: str | None, mask_zero: bool) -> Any:
    rows = lookup(ids.flat_values)
    if combiner is None:
        return ids.with_flat_values(rows)
    if ids.flat_values.shape.rank != 1:  # the last axis has one length
        return ids.with_flat_values(_of_dense(ids.flat_values, rows, combiner, mask_zero))
    *outer, splits = ids.nested_row_splits
    count = tf.size(splits, splits.dtype) - 1
    segments = tf.repeat(tf.range(count), splits[1:] - splits[:-1])
    combined = _of_segments(ids.flat_values, rows, segments, count, combiner, mask_zero)
    if outer:
        return tf.RaggedTensor.from_nested_row_splits(combined, outer, validate=False)
    return combined


def _of_sparse(ids: tf.SparseTensor, lookup: Lookup, combiner: str, mask_zero: bool) -> tf.Tensor:
    outer = ids.dense_shape[:-1]
    steps = tf.math.cumprod(outer, exclusive=True, reverse=True)
    segments = tf.reduce_sum(ids.indices[:, :-1] * steps, 1)
    combined = _of_segments(ids.values, lookup(ids.values), segments, tf.reduce_prod(outer), combiner, mask_zero)
    result = tf.reshape(combined, tf.concat([outer, [combined.shape[-1]]], 0))
    result.set_shape([*ids.shape[:-1], combined.shape[-1]])
    return result


def _of_segments(
    ids: tf.Tensor, rows: tf.Tensor, segments: tf.Tensor, count: tf.Tensor, combiner: str, mask_zero: bool
) -> tf.Tensor:
    counted = tf.cast(ids != 0, rows.dtype) if mask_zero else tf.ones_like(ids, rows.dtype)
    if mask_zero:
        rows *= counted[:, None]
    sums = tf.math.unsorted_segment_sum(rows, segments, count)
    return _scaled(sums, tf.math.unsorted_segment_sum(counted, segments, count), combiner)


def _scaled(sums: tf.Tensor, counts: tf.Tensor, combiner: str) -> tf.Tensor:
    if combiner == "sum":
        return sums
    return tf.math.divide_no_nan(sums, (counts if combiner == "mean" else tf.sqrt(counts))[..., None])
