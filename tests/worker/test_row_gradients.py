"""What becomes of gradients of rows before they are pushed."""

import numpy as np
import pytest
import tensorflow as tf

from elasticcb.compute.tensorflow.gradients import SMALL_BYTES, sort_gradients
from elasticcb.sharding.partition import VariableSpec

DIM = 4
LARGEST_SMALL = SMALL_BYTES // (4 * DIM)  # rows


def sorted_rows(rows, dtype="float32"):
    """What is pushed of gradients [[1, …]], [[2, …]], [[4, …]] of the rows 3, 0, 3 of a variable."""
    spec = VariableSpec("words/embeddings", (rows, DIM), dtype, True)
    values = tf.constant([[1.0], [2.0], [4.0]]) * tf.ones([1, DIM])
    gradient = tf.IndexedSlices(values, tf.constant([3, 0, 3]), tf.constant([rows, DIM]))
    dense, pairs, _ = sort_gradients({0: gradient}, [spec], ())
    return dense, pairs


@pytest.mark.parametrize(
    ("rows", "dtype"), [(4, "float32"), (LARGEST_SMALL, "float32"), (2 * LARGEST_SMALL, "float16")]
)
def test_those_of_a_small_variable_are_made_dense(rows, dtype):
    dense, pairs = sorted_rows(rows, dtype)
    assert not pairs
    assert dense[0].dtype == dtype
    expected = np.zeros((rows, DIM), dtype)
    expected[0], expected[3] = 2, 5
    np.testing.assert_array_equal(dense[0], expected)


def test_those_of_a_larger_variable_stay_rows_with_one_gradient_for_each():
    dense, pairs = sorted_rows(LARGEST_SMALL + 1)
    assert not dense
    ids, values = pairs[0]
    assert ids.dtype == tf.int64
    assert dict(zip(ids.numpy().tolist(), values.numpy()[:, 0].tolist(), strict=True)) == {3: 5.0, 0: 2.0}
