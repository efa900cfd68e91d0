"""An embedding layer without a fixed size: parameter servers hold its rows, and create a row when an id is first
used."""

# mypy: allow-subclassing-any

from __future__ import annotations

import dataclasses
import json
import zlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import ops

from elasticcb.errors import ModelFileError, UsageError
from elasticcb.layers.ids import HeldIds, integer_ids, padding_of
from elasticcb.layers.initial_values import InitialValues
from elasticcb.rpc.tensors import Array
from elasticcb.settings.table import read_table_options
from elasticcb.sharding.table_state import TableSpec
from elasticcb.tf.tensors import OF_TENSORFLOW, RowVariable, fill

_COMBINERS = (None, "sum", "mean", "sqrtn")

_Lookup = Callable[[Any], Any]  # rows [..., dim] of int ids [...]


@keras.saving.register_keras_serializable(package="elasticcb")
class Embedding(keras.layers.Layer):
    """Maps ids to vectors; parameter servers hold the vectors of ids that have been used.

    In a job, parameter servers hold the rows, sharded by id; a step reads and updates only the rows of its batch.
    Outside a job, it is an ordinary layer over the rows that it holds. An id without a row has its initial value, which
    is a function of the table's seed and the id.

    Args:
        output_dim: dimension of the vectors.
        input_dim: upper bound (exclusive) of ids; None: no limit.
        embeddings_initializer: initializer of rows. One of Keras's own that can create a single row: uniform, normal,
            truncated normal, zeros, ones, constant; and, with an `input_dim`, the variance scaling family.
        mask_zero: treat the id 0, or the empty string, as padding: later layers get a mask; a `combiner` ignores it.
        combiner: how the vectors along the last axis of the ids are combined: "sum", "mean", or "sqrtn" (the sum
            divided by the square root of the count); None: not combined. Without ids, the result is zeros.
        seed: seed of initial rows; None: derived from the layer's name.
        embeddings_regularizer: regularizer of the rows that a batch uses, each counted once; added to the loss. Ignored
            padding does not count as use.
        learning_rate_multiplier: in a job, factor by which the optimizer's learning rate (and weight decay) is
            multiplied for the rows; None: 1.
        max_rows: in a job, maximum number of rows on all parameter servers together; the job's `embedding_when_full`
            says what happens when it is reached. None: no limit.
        min_count: in a job, number of lookups in training after which an id gets its own row; None: the job's
            `embedding_min_count`.
        max_age: in a job, remove rows that were not trained for this many versions, or for a time such as "12h" or
            "7d"; 0: never; None: the job's `embedding_max_age`.
        rows_dtype: in a job, dtype in which parameter servers store rows: "float32", or "bfloat16" with stochastic
            rounding; None: the job's `embedding_rows_dtype`. Independent of the layer's `dtype`.

    Call:
        inputs: ids, integers of any shape [...]: dense, ragged, or sparse; floats if they can represent all ids below
            `input_dim`; or, without an `input_dim`, strings, which are hashed to ids. Without a combiner, an id that is
            absent from a sparse tensor counts as 0, as with `keras.layers.Embedding`.
        weights: with a combiner, weight of each id, with the type and shape of the ids; None: 1. "mean" divides by the
            sum of the weights, "sqrtn" by the square root of the sum of their squares.
        Returns [..., output_dim], ragged for ragged ids; with a combiner, without the ids' last axis.

    Raises:
        ModelFileError: the initializer can't create a single row.

    Example:

        layer = elasticcb.layers.Embedding(16, combiner="mean")
        layer(tf.ragged.constant([[3, 5_000_000_000], []]))  # [2, 16]
    """

    def __init__(
        self,
        output_dim: int,
        input_dim: int | None = None,
        embeddings_initializer: Any = "uniform",
        mask_zero: bool = False,
        combiner: str | None = None,
        seed: int | None = None,
        embeddings_regularizer: Any = None,
        min_count: int | None = None,
        max_age: int | str | None = None,
        learning_rate_multiplier: float | None = None,
        max_rows: int | None = None,
        rows_dtype: str | None = None,
        **kwargs: Any,
    ) -> None:
        _check_number("output_dim", output_dim)
        if input_dim is not None:
            _check_number("input_dim", input_dim)
        self.table_options, problems = read_table_options(
            {
                "min_count": min_count,
                "max_age": max_age,
                "learning_rate_multiplier": learning_rate_multiplier,
                "max_rows": max_rows,
                "rows_dtype": rows_dtype,
            }
        )
        if problems:
            raise UsageError("\n".join(f"Embedding: {problem}" for problem in problems))
        if combiner not in _COMBINERS:
            raise UsageError(f"Embedding got an unknown combiner {combiner!r}. Expected one of {_COMBINERS}.")
        super().__init__(**kwargs)
        self.output_dim = output_dim
        self.input_dim = input_dim
        self.embeddings_initializer = keras.initializers.get(embeddings_initializer)
        self.mask_zero = mask_zero
        self.combiner = combiner
        self.seed = seed
        self.embeddings_regularizer = keras.regularizers.get(embeddings_regularizer)
        self.autocast = False
        self.supports_masking = mask_zero and combiner is None
        self.supports_jit = not OF_TENSORFLOW  # whose search XLA can't compile
        # The version at which a job last trained each of `rows`, int64 [n]; None: unknown.
        self.used: Array | None = None
        self._embeddings: Any = None  # created by `build`, like `_ids`
        self._ids: Any = None
        self._initial_values()  # reports an invalid initializer now

    built: bool

    def build(self, input_shape: Any = None) -> None:
        if self.built:
            return
        self._embeddings = RowVariable(
            shape=(0, self.output_dim),
            initializer=keras.initializers.Zeros(),
            dtype=self.variable_dtype,
            autocast=False,
            name="embeddings",
        )
        # Tracked as trainable, like `add_weight` does, so that the layer can be unfrozen.
        self._embeddings.trainable = self.trainable
        # Not one of the layer's weights, because it is not trained.
        if OF_TENSORFLOW:
            with tf.init_scope(), tf.device("/CPU:0"):
                self._ids = tf.Variable(tf.zeros([0], tf.int64), shape=[None], trainable=False, name="ids")
        else:
            self._ids = HeldIds()
        self.built = True

    def get_build_config(self) -> dict[str, Any] | None:
        return {"rows": self.embeddings.shape[0]} if self.built else None

    def build_from_config(self, config: dict[str, Any]) -> None:
        """Resizes to this many rows, with initial values: Keras creates an optimizer's slots before it loads saved
        values."""
        self.set_rows(np.arange(config.get("rows", 0)))

    @property
    def embeddings(self) -> keras.Variable:
        """The rows that the layer itself holds, [n, output_dim], ordered by id."""
        self.build()
        return self._embeddings

    @property
    def ids(self) -> Any:
        """The ids of these rows, int64 [n], in ascending order; `ids.numpy()` is an array."""
        self.build()
        return self._ids

    def rows(self) -> tuple[Array, Array]:
        """The ids in ascending order, int64 [n], and their rows, [n, output_dim]."""
        return self.ids.numpy(), self.embeddings.numpy()

    def set_rows(self, ids: Any, rows: Any = None) -> None:
        """Replaces the layer's rows by the rows of these ids.

        Args:
            ids: int64 [n], unique, in any order.
            rows: [n, output_dim]; None: the ids' initial values.

        Raises:
            UsageError: the ids are not unique or out of range, or the shapes do not match.
        """
        ids = np.array(ids, np.int64)
        if rows is None:
            rows = self._initial_values()(ids).numpy()
        self.hold(ids, np.array(rows, self.variable_dtype))

    def hold(self, ids: Array, rows: Array) -> None:
        """Like `set_rows`, without copies if the ids are in order: neither array may be changed afterwards."""
        self.used = None
        if ids.ndim != 1 or rows.shape != (len(ids), self.output_dim):
            raise UsageError(
                f"The rows of the layer {self.name!r} have shape {rows.shape} for ids of shape {ids.shape}. Expected "
                f"ids [n] and rows [n, {self.output_dim}]."
            )
        if len(ids) and not (ids[1:] > ids[:-1]).all():
            order = np.argsort(ids, kind="stable")
            ids, rows = ids[order], rows[order]
            if not (ids[1:] > ids[:-1]).all():
                raise UsageError(f"The layer {self.name!r} was given several rows of the same id. Give each id once.")
        if len(ids) and (ids[0] < 0 or (self.input_dim is not None and ids[-1] >= self.input_dim)):
            raise UsageError(
                f"The layer {self.name!r} was given rows of ids from {ids[0]} to {ids[-1]}. Expected ids from 0 on"
                + ("." if self.input_dim is None else f", below input_dim={self.input_dim}.")
            )
        self.build()
        fill(self._embeddings, rows)
        self._ids.assign(ids)

    def table_spec(self) -> TableSpec:
        """The description of the table for other processes of a job."""
        config = keras.saving.serialize_keras_object(self.embeddings_initializer)
        return TableSpec(self.input_dim, json.dumps(config), self._table_seed(), self.table_options)

    def call(self, inputs: Any, weights: Any = None) -> Any:
        ids = integer_ids(inputs, self.name, self.input_dim, self.mask_zero)
        if weights is not None:
            weights = self._checked_weights(ids, weights)
        lookup = self._lookup if self.embeddings_regularizer is None else self._regularized_lookup
        outputs = _combine(ids, lookup, self.combiner, self.mask_zero, weights)
        return keras.ops.cast(outputs, self.compute_dtype)

    def _checked_weights(self, ids: Any, weights: Any) -> Any:
        """Converts weights to a tensor of the same type as the ids."""
        if self.combiner is None:
            raise ModelFileError(
                f"The embedding layer {self.name!r} was given weights of ids, but has no combiner. Set combiner to "
                '"sum", "mean" or "sqrtn", or multiply the result by the weights.'
            )
        special = (tf.RaggedTensor, tf.SparseTensor)
        if not isinstance(weights, special):
            weights = keras.ops.convert_to_tensor(weights)
        if [isinstance(ids, kind) for kind in special] != [isinstance(weights, kind) for kind in special]:
            raise ModelFileError(
                f"The embedding layer {self.name!r} was given a {type(ids).__name__} of ids and a "
                f"{type(weights).__name__} of weights. Both must have the same type and shape."
            )
        if not tf.TensorShape(ids.shape).is_compatible_with(weights.shape):
            raise ModelFileError(
                f"The embedding layer {self.name!r} was given ids of shape {ids.shape} and weights of shape "
                f"{weights.shape}. Both must have the same shape."
            )
        return weights

    def _regularized_lookup(self, ids: tf.Tensor) -> tf.Tensor:
        """Like `_lookup`, and adds the regularizer's value for the rows to the loss."""
        if not OF_TENSORFLOW:
            raise ModelFileError(
                f"The embedding layer {self.name!r} has an embeddings_regularizer, which needs Keras on TensorFlow "
                "(KERAS_BACKEND=tensorflow). Remove it, or use weight decay of the optimizer."
            )
        rows = self._lookup(ids)
        unique, places = tf.unique(tf.reshape(ids, [-1]))
        one_of_each = tf.math.unsorted_segment_min(tf.range(tf.size(places)), places, tf.size(unique))
        if self.mask_zero:
            one_of_each = tf.boolean_mask(one_of_each, unique != 0)
        self.add_loss(self.embeddings_regularizer(tf.gather(tf.reshape(rows, [-1, self.output_dim]), one_of_each)))
        return rows

    def _lookup(self, ids: tf.Tensor) -> tf.Tensor:
        """Rows [..., output_dim] of integer `ids` [...]; in a job, from its parameter servers."""
        if not OF_TENSORFLOW:
            return self._held_rows(ids)
        flat = tf.cast(tf.reshape(ids, [-1]), tf.int64)
        with tf.control_dependencies(self._in_range(flat)):
            flat = tf.identity(flat)
        held = tf.convert_to_tensor(self._ids)
        places = tf.raw_ops.LowerBound(sorted_inputs=held[None], values=flat[None], out_type=tf.int64)[0]
        inside = tf.where(places < tf.size(held, tf.int64))
        same = tf.equal(tf.gather(held, tf.gather_nd(places, inside)), tf.gather_nd(flat, inside))
        found = tf.tensor_scatter_nd_update(tf.zeros_like(flat, tf.bool), inside, same)
        here, missing = tf.where(found)[:, 0], tf.where(~found)[:, 0]
        rows = tf.dynamic_stitch(
            [tf.cast(here, tf.int32), tf.cast(missing, tf.int32)],
            [
                tf.gather(self._embeddings.value, tf.gather(places, here)),
                self._initial_values()(tf.gather(flat, missing)),
            ],
        )
        shape = tf.concat([tf.shape(ids), [self.output_dim]], 0)
        rows = tf.reshape(rows, shape)
        rows.set_shape([*ids.shape, self.output_dim] if ids.shape.rank is not None else None)
        return rows

    def _held_rows(self, ids: Any) -> Any:
        """The same on other frameworks, where an id without a row gets zeros, because TensorFlow computes initial
        values."""
        held = self._ids.numpy()
        if len(held) and held[-1] > np.iinfo(keras.backend.standardize_dtype(ids.dtype)).max:
            raise ModelFileError(
                f"The embedding layer {self.name!r} holds rows of ids up to {held[-1]}, but was called with ids of "
                f"dtype {keras.backend.standardize_dtype(ids.dtype)}, which can't represent them outside of a job. "
                "Hash ids to a smaller range in the data, or use the model with KERAS_BACKEND=tensorflow."
            )
        if not len(held):
            return keras.ops.zeros((*ids.shape, self.output_dim), dtype=self.variable_dtype)
        sorted_ids = keras.ops.convert_to_tensor(held, dtype=ids.dtype)
        places = keras.ops.minimum(keras.ops.searchsorted(sorted_ids, keras.ops.reshape(ids, -1)), len(held) - 1)
        places = keras.ops.reshape(places, ids.shape)
        found = keras.ops.equal(keras.ops.take(sorted_ids, places), ids)
        rows = keras.ops.take(self._embeddings.value, places, axis=0)
        return keras.ops.where(found[..., None], rows, keras.ops.zeros_like(rows))

    def _in_range(self, ids: tf.Tensor) -> list[Any]:
        limit = "" if self.input_dim is None else f", below input_dim={self.input_dim}"
        message = f"The layer {self.name!r} was called with ids out of range. Expected ids from 0 on{limit}."
        checks = [tf.debugging.assert_greater_equal(ids, tf.zeros([], tf.int64), message)]
        if self.input_dim is not None:
            checks.append(tf.debugging.assert_less(ids, tf.constant(self.input_dim, tf.int64), message))
        return [check for check in checks if check is not None]  # None when run eagerly

    def _initial_values(self) -> InitialValues:
        return InitialValues(
            self.embeddings_initializer, self._table_seed(), self.input_dim, self.output_dim, self.variable_dtype
        )

    def _table_seed(self) -> int:
        return zlib.crc32(self.name.encode()) if self.seed is None else self.seed

    def compute_mask(self, inputs: Any, mask: Any = None) -> Any:
        if not self.supports_masking or isinstance(inputs, tf.RaggedTensor):
            return None
        if isinstance(inputs, tf.SparseTensor):
            inputs = tf.sparse.to_dense(inputs)
        return keras.ops.not_equal(inputs, padding_of(inputs.dtype))

    def compute_output_shape(self, input_shape: Any) -> tuple[Any, ...]:
        return (*(input_shape if self.combiner is None else input_shape[:-1]), self.output_dim)

    def compute_output_spec(self, inputs: Any, weights: Any = None) -> keras.KerasTensor:
        ragged = getattr(inputs, "ragged", False) and (self.combiner is None or len(inputs.shape) > 2)
        return keras.KerasTensor(self.compute_output_shape(inputs.shape), dtype=self.compute_dtype, ragged=ragged)

    def save_own_variables(self, store: Any) -> None:
        if self.built:
            store["ids"], store["rows"] = self.rows()

    def load_own_variables(self, store: Any) -> None:
        self.set_rows(store["ids"], store["rows"])

    def get_config(self) -> dict[str, Any]:
        rows_dtype = self.table_options.rows_dtype
        return {
            **super().get_config(),
            "output_dim": self.output_dim,
            "input_dim": self.input_dim,
            "embeddings_initializer": keras.initializers.serialize(self.embeddings_initializer),
            "mask_zero": self.mask_zero,
            "combiner": self.combiner,
            "seed": self.seed,
            "embeddings_regularizer": keras.regularizers.serialize(self.embeddings_regularizer),
            **dataclasses.asdict(self.table_options),
            "rows_dtype": None if rows_dtype is None else rows_dtype.value,
        }


def _check_number(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UsageError(f"Embedding takes an integer of at least 1 as {name}. Received: {value!r}.")


def _combine(ids: Any, lookup: _Lookup, combiner: str | None, mask_zero: bool, weights: Any = None) -> Any:
    """The vectors of dense, ragged or sparse `ids`, combined along their last axis.

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


def _of_ragged(ids: tf.RaggedTensor, lookup: _Lookup, combiner: str | None, mask_zero: bool, weights: Any) -> Any:
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


def _of_sparse(ids: tf.SparseTensor, lookup: _Lookup, combiner: str, mask_zero: bool, weights: Any) -> tf.Tensor:
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
