from __future__ import annotations

import gc
import json

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework.func_graph import FuncGraph

from deep_cases import deep_but
from elasticcb.errors import ElasticCBError, ModelFileError
from elasticcb.optimizers.traits import may_split
from elasticcb.ps.optimizer import ServerOptimizer
from elasticcb.ps.parameters import Parameters
from elasticcb.ps.push_reader import PushReader
from elasticcb.rpc.shared_memory import aligned_copy
from elasticcb.sharding.partition import VariableSpec, partition
from elasticcb.sharding.push import Push
from helpers_ps import SPECS, TRAINABLE, Part, Signed, gradients, initial_values, plain_keras

pytestmark = pytest.mark.usefixtures("early_xla")
optimizers = keras.optimizers


OPTIMIZERS = {
    "SGD with momentum": lambda: optimizers.SGD(0.05, momentum=0.9),
    "SGD with Nesterov momentum": lambda: optimizers.SGD(0.05, momentum=0.9, nesterov=True),
    "Adam": lambda: optimizers.Adam(0.01),
    "Adam with amsgrad and a schedule": lambda: optimizers.Adam(
        optimizers.schedules.ExponentialDecay(0.02, 10, 0.9), amsgrad=True
    ),
    "AdamW": lambda: optimizers.AdamW(0.01, weight_decay=0.1),
    "Adagrad": lambda: optimizers.Adagrad(0.05),
    "RMSprop, centered": lambda: optimizers.RMSprop(0.01, centered=True, momentum=0.5),
    "Ftrl": lambda: optimizers.Ftrl(0.05, l1_regularization_strength=0.001),
    "Lion": lambda: optimizers.Lion(0.003),
    "Nadam": lambda: optimizers.Nadam(0.01),
    "Lamb": lambda: optimizers.Lamb(0.01),
    "Adafactor": lambda: optimizers.Adafactor(0.01),
    "Muon": lambda: optimizers.Muon(0.01),
    "a user's own": lambda: Signed(learning_rate=0.01),
    "SGD with clipnorm": lambda: optimizers.SGD(0.05, clipnorm=1.0),
    "Adam with clipvalue": lambda: optimizers.Adam(0.01, clipvalue=0.5),
    "Adam with EMA that overwrites": lambda: optimizers.Adam(
        0.01, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=7
    ),
    "SGD that accumulates": lambda: optimizers.SGD(0.05, momentum=0.9, gradient_accumulation_steps=3),
}


KEPT = ("SGD with momentum", "Adam with amsgrad and a schedule", "Muon", "a user's own", "SGD that accumulates")


@pytest.mark.parametrize("name", deep_but(OPTIMIZERS, *KEPT))
def test_fifty_steps_equal_plain_keras(name):
    make = OPTIMIZERS[name]
    values = initial_values()
    steps = [gradients(step) for step in range(50)]
    part = Part(make, values)
    for step in steps:
        part.push(step)
    expected, _ = plain_keras(make, values, steps)
    for index in TRAINABLE:
        difference = np.linalg.norm(part.values()[index] - expected[index])
        assert difference <= 1e-5 * np.linalg.norm(expected[index])
    assert part.parameters.version == 50


def test_two_servers_that_share_a_variable_equal_plain_keras():
    specs = (VariableSpec("dense/kernel", (300, 64), "float32", True),)
    values = initial_values(specs)
    parts = [Part(OPTIMIZERS["Adam"], values, specs, 2, index, split=True) for index in range(2)]
    whole = Part(OPTIMIZERS["Adam"], values, specs)
    for step in range(3):
        for part in [*parts, whole]:
            part.push(gradients(step, specs))
    assert all(len(part.slices) == 1 for part in parts)
    both = parts[0].values()[0] + parts[1].values()[0]
    np.testing.assert_allclose(both, whole.values()[0], rtol=1e-6)


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


IDS = np.array([7, 0, 3])


def rows_and_dense(step: int) -> tuple[np.ndarray, np.ndarray]:
    values = np.random.default_rng(step).normal(size=(3, 4)).astype(np.float32)
    dense = np.zeros((12, 4), np.float32)
    dense[IDS] = values
    return values, dense


@pytest.mark.parametrize("make", [lambda: optimizers.SGD(0.1), lambda: optimizers.Adagrad(0.1)])
def test_rows_equal_a_dense_update_where_a_zero_gradient_changes_nothing(make):
    by_rows, by_dense = Part(make, initial_values()), Part(make, initial_values())
    for step in range(5):
        values, dense = rows_and_dense(step)
        rest = {index: gradients(step)[index] for index in (1, 2)}
        by_rows.push(rest, {0: (IDS, values)})
        by_dense.push({**rest, 0: dense})
    for mine, other in zip(by_rows.values(), by_dense.values(), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-6)


def test_rows_of_adam_follow_the_lazy_formula():
    part = Part(lambda: optimizers.Adam(0.1, epsilon=1e-7), initial_values())
    weights = initial_values()[0].astype(np.float64)
    m, v = np.zeros((12, 4)), np.zeros((12, 4))
    for step in range(1, 6):
        ids = np.array([step, 7, 0])
        values = np.random.default_rng(step).normal(size=(3, 4)).astype(np.float32)
        part.push({}, {0: (ids, values)})
        m[ids] += (values - m[ids]) * 0.1
        v[ids] += (values.astype(np.float64) ** 2 - v[ids]) * 0.001
        rate = 0.1 * np.sqrt(1 - 0.999**step) / (1 - 0.9**step)
        weights[ids] -= m[ids] * rate / (np.sqrt(v[ids]) + 1e-7)
    np.testing.assert_allclose(part.values()[0], weights, rtol=1e-4, atol=1e-5)


def test_rows_alone_advance_the_optimizer_by_one_step():
    part = Part(lambda: optimizers.Nadam(0.1), initial_values())
    part.push({}, {0: (IDS, rows_and_dense(0)[0])})
    part.push({}, {0: (np.zeros(0, np.int64), np.zeros((0, 4), np.float32))})
    part.push({})
    assert int(part.parameters.optimizers.parts[0].optimizer.iterations) == 3
    assert part.parameters.version == 3


@pytest.mark.parametrize("name", ["Lamb", "a user's own", "Adam with EMA that overwrites"])
def test_rows_are_made_dense_where_the_optimizer_needs_the_whole_gradient(name):
    make = OPTIMIZERS[name]
    by_rows, by_dense = Part(make, initial_values()), Part(make, initial_values())
    for step in range(3):
        values, dense = rows_and_dense(step)
        by_rows.push({}, {0: (IDS, values)})
        by_dense.push({0: dense})
    np.testing.assert_allclose(by_rows.values()[0], by_dense.values()[0], rtol=1e-6)


def test_constraints_of_the_model_hold():
    constraint = json.dumps(keras.saving.serialize_keras_object(keras.constraints.NonNeg()))
    specs = (VariableSpec("dense/kernel", (3, 2), "float32", True, constraint),)
    part = Part(lambda: optimizers.SGD(1.0), [np.ones((3, 2), np.float32)], specs)
    part.push({0: np.full((3, 2), 2.0, np.float32)})
    assert np.array_equal(part.values()[0], np.zeros((3, 2)))


def test_the_learning_rate_of_a_push_holds_for_that_push_alone():
    part = Part(lambda: optimizers.SGD(0.5), initial_values())
    before = part.values()[2]
    ones = np.ones(6, np.float32)
    part.parameters.apply(part.make({2: ones}, learning_rate=2.0))
    np.testing.assert_allclose(part.values()[2], before - 2.0, rtol=1e-5)
    part.push({2: ones})
    np.testing.assert_allclose(part.values()[2], before - 2.5, rtol=1e-5)
    assert part.parameters.learning_rate == 0.5


def test_a_learning_rate_that_a_schedule_decides_on_is_not_set():
    part = Part(OPTIMIZERS["Adam with amsgrad and a schedule"], initial_values())
    with pytest.raises(ElasticCBError, match="uses a ExponentialDecay"):
        part.parameters.set_learning_rate(0.1)


def test_a_snapshot_stays_as_it_was():
    part = Part(lambda: optimizers.Adam(0.1), initial_values())
    snapshot = part.parameters.snapshot()
    copies = {dtype: block.copy() for dtype, block in snapshot.weights.items()}
    exported = part.parameters.dense()
    kernel = exported.weights[1].copy()
    for step in range(3):
        part.push({1: gradients(step)[1]}, {0: (IDS, rows_and_dense(step)[0])})
    assert all(np.array_equal(copies[dtype], snapshot.weights[dtype]) for dtype in copies)
    assert np.array_equal(exported.weights[1], kernel)
    assert np.array_equal(exported.weights[0], initial_values()[0])
    assert snapshot.version == 0


def test_blocks_are_made_once_per_version():
    part = Part(lambda: optimizers.SGD(0.1), initial_values())
    assert part.parameters.weights() is part.parameters.weights()


def test_the_moving_average_becomes_the_weights_at_the_end():
    def make():
        return optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5)

    part = Part(make, initial_values())
    steps = [gradients(step) for step in range(4)]
    for step in steps:
        part.push(step)
    part.parameters.finalize()
    weights, optimizer = plain_keras(make, initial_values(), steps)
    for place, index in enumerate(TRAINABLE):
        average = optimizer._model_variables_moving_average[place].numpy()
        np.testing.assert_allclose(part.values()[index], average, rtol=1e-5, atol=1e-6)
        assert not np.allclose(weights[index], average)


def test_bfloat16_weights_are_updated():
    specs = (VariableSpec("dense/kernel", (4, 2), "bfloat16", True), *SPECS[1:])
    part = Part(lambda: optimizers.SGD(1.0), initial_values(specs), specs)
    before = part.values()[0].astype(np.float32)
    part.push(gradients(0, specs))
    after = before - gradients(0, specs)[0].astype(np.float32)
    np.testing.assert_allclose(part.values()[0].astype(np.float32), after, atol=0.03)


@pytest.mark.parametrize("name", ["Adafactor", "Nadam", "Adam", "a user's own", "Muon"])
def test_every_variable_of_an_optimizer_is_known_by_what_it_belongs_to(name):
    part = Part(OPTIMIZERS[name], initial_values())
    optimizer: ServerOptimizer = part.parameters.optimizers.parts[0]
    values = [slot.value for slot in [*optimizer.slots, *optimizer.extras]]
    known = [getattr(value, "whole", value) for value in values] + list(optimizer.shared.values())
    assert {id(v) for v in known} == {id(v) for v in optimizer.optimizer.variables}
    expected = {"iterations", "learning_rate"} | ({"u_product"} if name == "Nadam" else set())
    assert set(optimizer.shared) == expected
    if name == "Adafactor":
        assert {slot.variable for slot in optimizer.extras} == set(TRAINABLE)


def test_an_optimizer_that_xla_can_not_compile_runs_without_it(caplog):
    class Uncompilable(Signed):
        def update_step(self, gradient, variable, learning_rate):
            gradient = tf.reshape(tf.py_function(lambda x: x, [gradient], gradient.dtype), variable.shape)
            super().update_step(gradient, variable, learning_rate)

    part, same = (
        Part(lambda: Uncompilable(0.1), initial_values()),
        Part(lambda: Signed(0.1), initial_values()),
    )
    for step in range(3):
        part.push(gradients(step))
        same.push(gradients(step))
    assert "runs without XLA" in caplog.text
    np.testing.assert_allclose(part.values()[1], same.values()[1], rtol=1e-5)


def test_a_gradient_that_an_optimizer_keeps_is_not_changed_by_the_next_push():
    class Keeping(keras.optimizers.Optimizer):
        def build(self, variables):
            super().build(variables)
            self.last = [self.add_variable_from_reference(v, name="last") for v in variables]

        def update_step(self, gradient, variable, learning_rate):
            tf.py_function(lambda: None, [], [])  # nothing that XLA compiles
            self.assign(self.last[self._get_variable_index(variable)], gradient)

    specs = (VariableSpec("dense/kernel", (64, 4), "float32", True),)
    part = Part(lambda: Keeping(0.1), initial_values(specs), specs)
    memory = aligned_copy(np.ones(256, np.float32))  # as that which a worker shares
    part.parameters.apply(part.reader.read(Push((0,), {"float32": memory}, {})))
    memory[...] = 2.0
    np.testing.assert_array_equal(part.parameters.dense().slots[0, "last"], 1.0)


def test_rows_are_applied_once_when_xla_can_not_compile_the_rest():
    class Uncompilable(Signed):
        elementwise = True

        def update_step(self, gradient, variable, learning_rate):
            shape = gradient.shape
            gradient = tf.py_function(lambda x: x, [gradient], gradient.dtype)
            gradient.set_shape(shape)
            super().update_step(gradient, variable, learning_rate)

    class Same(Signed):
        elementwise = True

    parts = [Part(lambda: Uncompilable(0.1), initial_values()), Part(lambda: Same(0.1), initial_values())]
    for part in parts:
        for step in range(3):
            part.push({1: gradients(step)[1]}, {0: (IDS, rows_and_dense(step)[0])})
    for mine, other in zip(*(part.values() for part in parts), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-5)


def test_gradients_of_two_dtypes_may_come_in_any_order():
    specs = (SPECS[0], VariableSpec("dense/kernel", (4, 6), "bfloat16", True), *SPECS[2:])
    part, same = (Part(lambda: optimizers.SGD(0.1), initial_values(specs), specs) for _ in range(2))
    for step in range(2):
        blocks = part.make(gradients(step, specs)).blocks
        for target, order in ((part, sorted(blocks, reverse=bool(step))), (same, sorted(blocks))):
            push = Push(tuple(TRAINABLE), {dtype: blocks[dtype] for dtype in order}, {})
            target.parameters.apply(target.reader.read(push))
    for mine, other in zip(part.values(), same.values(), strict=True):
        np.testing.assert_array_equal(mine.astype(np.float32), other.astype(np.float32))


def test_an_optimizer_that_fails_is_named_with_the_users_traceback():
    class Broken(Signed):
        def update_step(self, gradient, variable, learning_rate):
            raise ValueError("no idea what to do")

    part = Part(lambda: Broken(0.1), initial_values())
    with pytest.raises(ModelFileError, match=r"Broken failed on a parameter server.*no idea") as caught:
        part.push(gradients(0))
    assert "update_step" in caught.value.user_traceback


def test_an_update_is_forgotten_with_its_parameters():
    def graphs():
        gc.collect()
        return sum(isinstance(item, FuncGraph) for item in gc.get_objects())

    before = graphs()
    for _ in range(2):
        specs = [VariableSpec("a", (4, 2), "float32", True)]
        slices = partition(specs, 1, True)[0]
        values = {0: np.zeros((4, 2), "float32")}
        parameters = Parameters(specs, slices, lambda count: [keras.optimizers.Adam()], values)
        push = Push((0,), {"float32": np.ones(8, "float32")}, {})
        parameters.apply(PushReader(specs, slices).read(push))
        del parameters
    assert graphs() == before
