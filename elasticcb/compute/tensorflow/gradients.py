"""From the gradients of a step to what is pushed: of the weights' dtypes, rows added up, clipped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import keras
import tensorflow as tf

from elasticcb.errors import ModelFileError
from elasticcb.optimizers.traits import clips_on_server
from elasticcb.optimizers.variables import leaves
from elasticcb.sharding.partition import VariableSpec

Dense = dict[int, Any]  # gradients by variable
Rows = dict[int, tuple[Any, Any]]  # (unique int64 ids, gradients of these rows) by variable

# Gradients of rows of a variable of at most so many bytes are made dense: to sort, send, check and apply rows of a
# variable by itself takes a server and a worker longer than so many bytes do among the other dense gradients.
SMALL_BYTES = 256 << 10


@dataclass(frozen=True)
class Clipping:
    """By the global norm of the gradients of these variables."""

    norm: float
    variables: frozenset[int]


def clippings(
    model: keras.Model, specs: Sequence[VariableSpec], optimizers: Sequence[keras.optimizers.Optimizer], num_ps: int
) -> list[Clipping]:
    """What the worker clips, because a server sees only its own part of the gradients.

    Raises:
        ModelFileError: it is for the server to clip, and there are several of them.
    """
    found = []
    for place, optimizer in enumerate(optimizers):
        own = {i: model.weights[i] for i, spec in enumerate(specs) if spec.trainable and spec.optimizer == place}
        for leaf in leaves(optimizer, place, own):
            if clips_on_server(leaf.optimizer):
                _check_one_server(leaf.optimizer, num_ps)
            elif leaf.optimizer.global_clipnorm:
                found.append(Clipping(leaf.optimizer.global_clipnorm, frozenset(leaf.variables)))
    return found


def _check_one_server(optimizer: keras.optimizers.Optimizer, num_ps: int) -> None:
    if num_ps > 1:
        raise ModelFileError(
            f"The optimizer {optimizer.name!r} has global_clipnorm and gradient_accumulation_steps both. The norm is "
            f"that of all accumulated gradients, and each of the {num_ps} parameter servers holds only a part of them. "
            "Use one parameter server (--num_ps=1), or clipnorm or clipvalue instead of global_clipnorm."
        )


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
    """The gradient of each of the rows [n, dim] that a step was given."""
    if isinstance(gradient, tf.IndexedSlices):
        places = tf.reshape(gradient.indices, [-1])
        gradient = tf.math.unsorted_segment_sum(gradient.values, places, tf.shape(rows)[0])
    return tf.cast(gradient, rows.dtype)


def _prepared(gradient: Any, spec: VariableSpec) -> Any:
    if not isinstance(gradient, tf.IndexedSlices):
        return tf.cast(gradient, spec.dtype)
    given, values = tf.reshape(gradient.indices, [-1]), tf.cast(gradient.values, spec.dtype)
    if spec.elements * values.dtype.size <= SMALL_BYTES:
        return tf.math.unsorted_segment_sum(values, given, spec.rows)
    ids, positions = tf.unique(tf.cast(given, tf.int64))
    values = tf.math.unsorted_segment_sum(values, positions, tf.size(ids))
    return tf.IndexedSlices(values, ids, gradient.dense_shape)
