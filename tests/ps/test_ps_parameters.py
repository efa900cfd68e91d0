"""One server's arrays: what movements make of them, and what is read meanwhile."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from elasticcb.optimizers.traits import may_split
from elasticcb.sharding.partition import VariableSpec
from helpers_ps import TRAINABLE, Part, initial_values, movements

optimizers = keras.optimizers


def adam():
    return optimizers.Adam(0.1)


def test_a_movement_of_the_only_worker_is_added_to_the_last_digit():
    part, expected = Part(adam, initial_values()), initial_values()
    for step in range(5):
        part.push(movements(step), base=step)
        for index in TRAINABLE:
            expected[index] = expected[index] + movements(step)[index]
    for index in TRAINABLE:
        np.testing.assert_array_equal(part.values()[index], expected[index])
    assert part.parameters.version == 5


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_a_mean_of_weights_of_other_dtypes_is_one_of_float32_at_least(dtype):
    specs = (VariableSpec("dense/kernel", (40, 6), dtype, True), VariableSpec("dense/bias", (6,), "float32", True))
    part = Part(adam, initial_values(specs), specs)
    before = part.values()[0].astype(np.float64)
    moved = [movements(step, specs) for step in range(3)]
    part.parameters.merge([part.make(each, base=0) for each in moved])
    mean = sum(each[0].astype(np.float64) for each in moved) / 3
    after = part.values()[0]
    assert str(after.dtype) == dtype
    tolerance = {"float16": 1e-3, "bfloat16": 1e-2, "float64": 1e-12}[dtype]
    np.testing.assert_allclose(after.astype(np.float64), before + mean, rtol=tolerance, atol=tolerance)


def test_only_elementwise_optimizers_without_clipnorm_may_be_split():
    class Own(optimizers.Adam):
        pass

    class Declared(optimizers.Adam):
        elementwise = True

    assert may_split(optimizers.Adam())
    assert may_split(optimizers.SGD(clipvalue=1.0))
    assert may_split(Declared())
    assert not may_split(Own())
    assert not may_split(optimizers.Adam(clipnorm=1.0))
    assert not may_split(optimizers.Lamb())


def test_what_was_read_stays_as_it_was():
    part = Part(adam, initial_values())
    slots = {(1, "momentum"): np.ones((4, 6), np.float32)}
    part.push(movements(0), slots=slots)
    snapshot, exported = part.parameters.snapshot(), part.parameters.dense()
    copies = {dtype: block.copy() for dtype, block in snapshot.weights.items()}
    kernel = exported.weights[1].copy()
    for step in range(1, 4):
        slots[1, "momentum"][...] = step  # the memory of a call is used again
        part.push(movements(step), slots=slots)
    assert all(np.array_equal(copies[dtype], snapshot.weights[dtype]) for dtype in copies)
    np.testing.assert_array_equal(exported.weights[1], kernel)
    np.testing.assert_array_equal(exported.optimizers.slots[1, "momentum"], 1.0)
    np.testing.assert_array_equal(part.parameters.dense().optimizers.slots[1, "momentum"], 3.0)
    assert snapshot.version == 1


def test_a_server_without_variables_follows_the_versions():
    specs = (VariableSpec("dense/bias", (2,), "float32", True),)
    empty = next(part for index in range(2) if not (part := Part(adam, initial_values(specs), specs, 2, index)).slices)
    empty.push(movements(0, specs), batches=3)
    assert empty.parameters.version == 3
    assert not empty.values()[0].any()


def test_names_and_counters_of_several_optimizers_are_kept_apart():
    specs = tuple(VariableSpec(f"v{i}", (3,), "float32", True, optimizer=i) for i in range(2))
    multi = optimizers.MultiOptimizer(optimizers.OptimizerMap(optimizers.SGD(0.1), {"v1": optimizers.Adam(0.2)}))
    both = tuple(VariableSpec(f"v{i}", (3,), "float32", True) for i in range(2))
    held = Part(lambda: multi, initial_values(both), both).parameters.dense().optimizers
    assert held.optimizers == ("0.0/Adam", "0.1/SGD")
    part = Part(adam, initial_values(specs[:1]), specs[:1])
    part.push(movements(0, specs[:1]), shared={"iterations": np.int64(1), "1/iterations": np.int64(5)})
    part.push(movements(0, specs[:1]), shared={"iterations": np.int64(1), "1/iterations": np.int64(5)}, base=0)
    shared = part.parameters.optimizers.state().shared
    assert (int(shared["iterations"]), int(shared["1/iterations"])) == (2, 6)
