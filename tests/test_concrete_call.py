"""Compiled functions whose operations run one after another, and those that can't."""

from __future__ import annotations

import pytest
import tensorflow as tf

from elasticcb.tf.concrete_call import quick_call

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
