"""Compiled functions whose operations run one after another, and those that can't."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import tensorflow as tf

from elasticcb.tf.batch_signatures import quick_call

NUMBER = [tf.TensorSpec([], tf.float32)]


def test_a_function_with_a_loop_runs_though_operations_can_not_go_one_after_another():
    doubled = quick_call(lambda x: tf.while_loop(lambda x: x < 10.0, lambda x: (2.0 * x,), [x])[0], NUMBER)
    assert [float(doubled([tf.constant(value)])) for value in (1.0, 3.0)] == [16.0, 12.0]


def test_a_function_that_fails_is_not_run_again():
    runs = tf.Variable(0.0)

    def count_and_fail(x):
        with tf.control_dependencies([runs.assign_add(1.0)]):
            return tf.debugging.check_numerics(x, "it is not finite")

    call = quick_call(count_and_fail, NUMBER)
    with pytest.raises(tf.errors.InvalidArgumentError, match="it is not finite"):
        call([tf.constant(float("nan"))])
    assert float(runs) == 1


class Pair(NamedTuple):
    first: tf.Tensor
    rest: dict[str, tf.Tensor]


@pytest.mark.parametrize(
    "structure",
    [
        lambda x: x,
        lambda x: None,
        lambda x: [],
        lambda x: [x],
        lambda x: (x, None, {2: x + 1, 1: {"a": x + 2, "b": ()}}),
        lambda x: Pair(x, {"b": x + 1, "a": x + 2}),
        lambda x: {"ragged": tf.RaggedTensor.from_row_lengths(x[None] + [1.0, 2.0], [0, 2]), "same": [x, x]},
    ],
)
def test_what_a_call_returns_has_the_structure_of_what_the_function_returns(structure):
    def listed(value):
        leaves = tf.nest.flatten(value, expand_composites=True)
        tf.nest.assert_same_structure(value, structure(tf.constant(3.0)), expand_composites=True)
        return [None if leaf is None else leaf.numpy().tolist() for leaf in leaves]

    assert listed(quick_call(structure, NUMBER)([tf.constant(3.0)])) == listed(structure(tf.constant(3.0)))
