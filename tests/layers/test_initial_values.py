"""Initial rows: functions of (seed, id), of the distribution that the initializer names."""

from __future__ import annotations

import json

import keras
import numpy as np
import pytest
import tensorflow as tf

from elasticcb.errors import ModelFileError
from elasticcb.layers.initial_values import InitialValues

init = keras.initializers
IDS = np.arange(20_000)


def rows(initializer, ids=IDS, seed=1, input_dim=None, dim=4, dtype="float32"):
    return InitialValues(initializer, seed, input_dim, dim, dtype)(ids).numpy()


@pytest.mark.parametrize("initializer", ["uniform", "normal", init.TruncatedNormal()])
def test_row_depends_on_seed_and_id_alone(initializer):
    whole = rows(initializer)
    some = np.array([17, 3, 19_999, 17])
    np.testing.assert_array_equal(rows(initializer, some), whole[some])
    compiled = tf.function(InitialValues(initializer, 1, None, 4))
    np.testing.assert_array_equal(compiled(tf.constant(some)), whole[some])


@pytest.mark.parametrize("initializer", ["uniform", "normal", init.TruncatedNormal(), init.HeNormal()])
def test_rows_columns_and_tables_differ(initializer):
    one = rows(initializer, input_dim=100)
    other = rows(initializer, input_dim=100, seed=2)
    assert len(np.unique(one)) > 0.98 * one.size  # float32 has few values close to the ends
    assert not (one == other).any(axis=0).all()
    correlations = np.corrcoef(np.concatenate([one, other, np.roll(one, 1, axis=0)], 1).T) - np.eye(12)
    assert np.abs(correlations).max() < 0.04


@pytest.mark.parametrize(
    ("initializer", "input_dim", "deviation", "bound"),
    [
        (init.RandomUniform(-2, 2), None, 4 / 12**0.5, 2),
        (init.RandomNormal(stddev=3.0), None, 3.0, 30),
        (init.TruncatedNormal(stddev=3.0), None, 3 * 0.8796, 6),
        (init.GlorotUniform(), 96, (2 / 100) ** 0.5, (6 / 100) ** 0.5),
        (init.HeNormal(), 50, 0.2, 2 * 0.2 / 0.8796),
        (init.VarianceScaling(2.0, "fan_out", "untruncated_normal"), None, 0.5**0.5, 7),
    ],
)
def test_rows_have_the_distribution_of_the_initializer(initializer, input_dim, deviation, bound):
    values = rows(initializer, input_dim=input_dim)
    assert abs(values.mean()) < 0.02 * deviation
    assert values.std() == pytest.approx(deviation, rel=0.02)
    assert np.abs(values).max() <= bound * 1.0001


def test_minval_and_mean_shift_the_values():
    uniform = rows(init.RandomUniform(3, 4))
    assert uniform.min() >= 3
    assert uniform.max() <= 4
    assert rows(init.RandomNormal(mean=5.0, stddev=0.1)).mean() == pytest.approx(5, abs=0.01)


@pytest.mark.parametrize(("initializer", "value"), [("zeros", 0), ("ones", 1), (init.Constant(0.25), 0.25)])
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
def test_constants_fill_rows_of_any_dtype(initializer, value, dtype):
    filled = InitialValues(initializer, 0, None, 3, dtype)([5, 6])
    assert filled.dtype == dtype
    assert np.array_equal(tf.cast(filled, "float32"), np.full((2, 3), value, "float32"))


def test_large_ids_have_rows_of_their_own():
    found = rows("uniform", np.array([0, 2**32, 2**62, 2**62 + 1]))
    assert len(np.unique(found)) == found.size


def test_json_of_an_initializer_gives_the_same_rows():
    config = json.dumps(keras.saving.serialize_keras_object(init.GlorotUniform()))
    np.testing.assert_array_equal(rows(config, input_dim=9), rows("glorot_uniform", input_dim=9))


class Own(keras.initializers.Initializer):
    def __call__(self, shape, dtype=None):
        return keras.ops.ones(shape, dtype)


@pytest.mark.parametrize("initializer", [init.Orthogonal(), init.Constant([1.0, 2.0]), Own()])
def test_initializer_of_whole_tables_is_refused(initializer):
    with pytest.raises(ModelFileError, match=r"a single row.*Expected one of Keras's own"):
        rows(initializer)


def test_scaling_by_the_number_of_rows_needs_one():
    with pytest.raises(ModelFileError, match=r"GlorotUniform.*input_dim"):
        rows("glorot_uniform")
