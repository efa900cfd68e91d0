"""From the gradients of a step to what is pushed: of the weights' dtypes, rows added up, clipped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from elasticcb.optimizer_traits import clips_on_server, unwrapped
from elasticcb.ps.partition import VariableSpec

Dense = dict[int, Any]  # gradients by variable
Rows = dict[int, tuple[Any, Any]]  # (unique int64 ids, gradients of these rows) by variable


def sort_gradients(
    gradients: Mapping[int, Any], specs: Sequence[VariableSpec], optimizers: Sequence[keras.optimizers.Optimizer]
) -> tuple[Dense, Rows]:
    """Dense gradients and unique rows by variable, clipped by their global norm if their optimizer says so."""
    prepared = {index: _prepared(gradient, specs[index].dtype) for index, gradient in sorted(gradients.items())}
    for number, optimizer in enumerate(optimizers):
        clip_norm = unwrapped(optimizer).global_clipnorm
        own = [index for index in prepared if specs[index].optimizer == number]
        if clip_norm and own and not clips_on_server(optimizer):
            # Here, because a server sees only its own part of the gradients.
            clipped, _ = tf.clip_by_global_norm([prepared[index] for index in own], clip_norm)
            prepared.update(zip(own, clipped, strict=True))
    dense = {i: gradient for i, gradient in prepared.items() if not isinstance(gradient, tf.IndexedSlices)}
    rows = {i: (g.indices, g.values) for i, g in prepared.items() if isinstance(g, tf.IndexedSlices)}
    return dense, rows


def _prepared(gradient: Any, dtype: str) -> Any:
    if not isinstance(gradient, tf.IndexedSlices):
        return tf.cast(gradient, dtype)
    ids, positions = tf.unique(tf.cast(tf.reshape(gradient.indices, [-1]), tf.int64))
    values = tf.math.unsorted_segment_sum(tf.cast(gradient.values, dtype), positions, tf.size(ids))
    return tf.IndexedSlices(values, ids, gradient.dense_shape)
