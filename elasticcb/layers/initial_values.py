"""Initial rows of embedding tables: pure functions of (seed, id).

So it does not matter which server creates a row, in which order, or how often, and an exported model returns for an
unseen id the row that training would have started from. The numbers come from a counter-based generator: the finalizer
of SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", OOPSLA 2014) over (seed, id,
column), in TensorFlow operations, so that the same code runs in a job and in a SavedModel.
"""

from __future__ import annotations

import json
import math
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from elasticcb.errors import ModelFileError

_GOLDEN = 0x9E3779B97F4A7C15
_SUPPORTED = (
    "uniform, normal and truncated normal, zeros, ones and constant, and the variance scaling family "
    "(Glorot, He, Lecun)"
)


class InitialValues:
    """The initial rows of one table.

    Args:
        initializer: a Keras initializer, its name, or JSON of `keras.saving.serialize_keras_object`. Its own seed is
            ignored.
        input_dim: upper bound (exclusive) of ids; None: no limit.

    Attributes:
        kind: equal for tables whose rows differ only in the seed.
        start: start value derived from the seed, for `initial_rows`.

    Raises:
        ModelFileError: the initializer can't create a single row, or needs an `input_dim`.
    """

    def __init__(self, initializer: Any, seed: int, input_dim: int | None, dim: int, dtype: str = "float32") -> None:
        if isinstance(initializer, str) and initializer.startswith("{"):
            initializer = keras.saving.deserialize_keras_object(json.loads(initializer))
        draw = _distribution(keras.initializers.get(initializer), input_dim, dim)
        self.kind = RowKind(draw, dim, tf.as_dtype(dtype).name)
        self.start = _mix_number(seed)

    def __call__(self, ids: Any) -> tf.Tensor:
        """Rows [n, dim] of `ids`, int64 [n]."""
        return initial_rows(self.kind, tf.convert_to_tensor(ids, tf.int64), _constant(self.start))


class Draw(NamedTuple):
    """A method of `_Cells`, and its arguments."""

    method: str
    arguments: tuple[float, ...]


class RowKind(NamedTuple):
    """Everything that initial rows depend on, except seed and id."""

    draw: Draw
    dim: int
    dtype: str


def initial_rows(kind: RowKind, ids: tf.Tensor, starts: tf.Tensor) -> tf.Tensor:
    """Rows [n, dim] of tables of one kind.

    Args:
        ids: int64 [n].
        starts: `InitialValues.start` of the table of each id, uint64 [n], or one for all.
    """
    cells = _Cells(ids, kind.dim, starts)
    return tf.cast(getattr(cells, kind.draw.method)(*kind.draw.arguments), kind.dtype)


class _Cells:
    """The random numbers of some rows."""

    def __init__(self, ids: tf.Tensor, dim: int, start: tf.Tensor) -> None:
        self._ids = ids
        self._dim = dim
        self._start = start

    def filled(self, value: float) -> tf.Tensor:
        return tf.fill([tf.size(self._ids), self._dim], tf.constant(value, tf.float64))

    def uniform(self, low: float, high: float) -> tf.Tensor:
        """In [low, high), float64."""
        rows = _mix(tf.bitcast(self._ids, tf.uint64) * _constant(_GOLDEN) + self._start)
        # An array, because tf.constant would convert a list via float64.
        columns = tf.constant(np.array([_mix_number(column + 1) for column in range(self._dim)], np.uint64))
        bits = tf.bitwise.right_shift(_mix(rows[:, None] ^ columns[None, :]), _constant(11))
        unit = tf.cast(tf.bitcast(bits, tf.int64), tf.float64) * 2.0**-53  # the 53 bits of a float64
        return low + unit * (high - low)

    def normal(self, mean: float, deviation: float, bound: float = math.inf) -> tf.Tensor:
        """Within `bound` deviations of the mean."""
        outside = math.erfc(bound / math.sqrt(2)) / 2
        # The midpoint of one of 2**53 intervals, so neither 0 nor 1.
        share = outside + (self.uniform(0.0, 1.0) + 2.0**-54) * (1 - 2 * outside)
        return mean + tf.math.ndtri(tf.minimum(share, 1 - 2.0**-53)) * deviation


def _distribution(initializer: Any, input_dim: int | None, dim: int) -> Draw:
    kinds = keras.initializers
    kind = type(initializer)
    if kind is kinds.RandomUniform:
        return Draw("uniform", (float(initializer.minval), float(initializer.maxval)))
    if kind is kinds.RandomNormal:
        return Draw("normal", (float(initializer.mean), float(initializer.stddev)))
    if kind is kinds.TruncatedNormal:
        return Draw("normal", (float(initializer.mean), float(initializer.stddev), 2.0))
    if kind is kinds.Constant and not hasattr(initializer.value, "__len__"):
        return Draw("filled", (float(initializer.value),))
    if kind in (kinds.Zeros, kinds.Ones):
        return Draw("filled", (float(kind is kinds.Ones),))
    if isinstance(initializer, kinds.VarianceScaling) and kind.__module__.startswith("keras."):
        return _variance_scaling(initializer, input_dim, dim)
    raise ModelFileError(
        f"The embeddings_initializer {getattr(initializer, 'name', None) or kind.__name__!r} can't create a single "
        f"row from its id. Received: {initializer!r}. Expected one of Keras's own: {_SUPPORTED}."
    )


def _variance_scaling(initializer: Any, input_dim: int | None, dim: int) -> Draw:
    if input_dim is None and initializer.mode != "fan_out":
        raise ModelFileError(
            f"The embeddings_initializer {type(initializer).__name__} scales values by the number of rows, which is "
            "unknown without input_dim. Set the layer's input_dim, or use an initializer with a fixed scale, such as "
            '"uniform" or keras.initializers.RandomNormal(stddev=0.05).'
        )
    fans = {"fan_in": input_dim or 0, "fan_out": dim, "fan_avg": ((input_dim or 0) + dim) / 2}
    variance = initializer.scale / max(1.0, fans[initializer.mode])
    if initializer.distribution == "uniform":
        limit = math.sqrt(3 * variance)
        return Draw("uniform", (-limit, limit))
    if initializer.distribution == "untruncated_normal":
        return Draw("normal", (0.0, math.sqrt(variance)))
    # Truncation reduces the standard deviation to this share.
    return Draw("normal", (0.0, math.sqrt(variance) / 0.87962566103423978, 2.0))


def _mix(value: tf.Tensor) -> tf.Tensor:
    value = (value ^ tf.bitwise.right_shift(value, _constant(30))) * _constant(0xBF58476D1CE4E5B9)
    value = (value ^ tf.bitwise.right_shift(value, _constant(27))) * _constant(0x94D049BB133111EB)
    return value ^ tf.bitwise.right_shift(value, _constant(31))


def _mix_number(value: int) -> int:
    """Like `_mix`, for a Python number."""
    bits = (value * _GOLDEN + _GOLDEN) % 2**64
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB % 2**64
    return bits ^ (bits >> 31)


def _constant(value: int) -> tf.Tensor:
    return tf.constant(value, tf.uint64)
