from __future__ import annotations

import functools
from itertools import cycle

import keras
import numpy as np
import pytest
import tensorflow as tf

from elasticcb.errors import ModelFileError
from elasticcb.optimizers import RowWiseAdagrad
from elasticcb.optimizers.variables import Leaf, optimizer_variables
from elasticcb.ps.embedding_table import EmbeddingTable
from elasticcb.ps.table_update import TableUpdate, TableUpdates
from elasticcb.sharding.partition import VariableSpec
from helpers_ps import RowNorms

ROWS, DIM, STEPS = 40, 5, 6
SPEC = VariableSpec("emb/embeddings", (0, DIM), "float32", True, table="{}")
DENSE = VariableSpec("dense/bias", (3,), "float32", True)


class Signed(keras.optimizers.Optimizer):
    """A user's own optimizer: momentum on the signs of the gradient."""

    def build(self, variables):
        super().build(variables)
        self.memory = [self.add_variable_from_reference(v, name="memory") for v in variables]

    def update_step(self, gradient, variable, learning_rate):
        memory = self.memory[self._get_variable_index(variable)]
        self.assign(memory, 0.9 * memory + keras.ops.sign(gradient))
        self.assign_sub(variable, learning_rate * memory)


class ElementwiseSigned(Signed):
    elementwise = True


class WithNormOfAll(RowNorms):
    """Keeps one number for all rows of a variable, so that its promise is broken."""

    rowwise = True

    def build(self, variables):
        super().build(variables)
        self.last = [self.add_variable((1,), name="last") for _ in variables]


# Their update of a row without a gradient is nothing.
SAME_AS_DENSE = {
    "SGD": lambda: keras.optimizers.SGD(0.1),
    "Adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "SGD with a schedule": lambda: keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)),
    "Adagrad, clipped": lambda: keras.optimizers.Adagrad(0.1, clipnorm=0.5),
    "RowWiseAdagrad": lambda: RowWiseAdagrad(0.1),
}
ALL = {
    **SAME_AS_DENSE,
    "SGD with momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "Adam": lambda: keras.optimizers.Adam(0.1),
    "a user's own that reduces over rows": lambda: RowNorms(0.1),
}


class Worker:
    """A worker that trains a bias beside the table, by a function that makes optimizers."""

    def __init__(self, make):
        self.optimizer, self.bias = make(), keras.Variable(np.zeros(3, np.float32), name="bias")
        self.optimizer.build([self.bias])
        self._shared = optimizer_variables(self.optimizer, {0: self.bias}).shared

    @property
    def shared(self):
        """The steps and rates with which it sends gradients of rows."""
        return {name: variable.numpy() for name, variable in self._shared.items()}

    def step(self, gradient=0.0):
        self.optimizer.apply([tf.fill([3], gradient)], [self.bias])


def leaf(make):
    return Leaf("0", make(), {0: DENSE, 1: SPEC})


def batches(seed=0):
    random = np.random.default_rng(seed)
    for _ in range(STEPS):
        ids = random.permutation(ROWS)[: random.integers(1, ROWS)]
        yield ids, random.standard_normal((len(ids), DIM)).astype(np.float32)


def initial(ids):
    return np.random.default_rng(5).standard_normal((ROWS, DIM)).astype(np.float32)[ids]


def make_table(update):
    return EmbeddingTable(DIM, "float32", initial, update.slots_of(DIM))


def train(table, update, ids, gradients, version, worker=None):
    shared = {} if worker is None else worker.shared
    TableUpdates({1: update})({1: table}, {1: (ids, gradients)}, version, shared)


@pytest.mark.parametrize("name", SAME_AS_DENSE)
def test_rows_are_updated_as_a_dense_keras_update_does_it(name):
    worker, update = Worker(ALL[name]), TableUpdate(leaf(ALL[name]), SPEC)
    table = make_table(update)
    plain, whole = ALL[name](), keras.Variable(initial(np.arange(ROWS)), name="embeddings")
    plain.build([whole])
    for version, (ids, gradients) in enumerate(batches(), 1):
        train(table, update, ids, gradients, version, worker)
        worker.step()
        gradient = np.zeros((ROWS, DIM), np.float32)
        gradient[ids] = gradients
        plain.apply([tf.constant(gradient)], [whole])
    np.testing.assert_allclose(table.lookup(np.arange(ROWS), False), whole.numpy(), rtol=1e-5, atol=1e-6)


def train_as_keras(make, plain, multiplier=1.0, rates=None):
    """Trains a table, and a whole variable with `plain`, both beside a bias; asserts that their rows are equal.

    Args:
        rates: that are set after the third step.
    """
    worker, update = Worker(make), TableUpdate(leaf(make), SPEC, multiplier)
    table, whole = make_table(update), keras.Variable(initial(np.arange(ROWS)), name="embeddings")
    other = keras.Variable(np.zeros(3, np.float32), name="bias")
    plain.build([other, whole])
    random = np.random.default_rng(1)
    for version in range(1, STEPS):
        gradients = random.standard_normal((ROWS, DIM)).astype(np.float32)
        train(table, update, np.arange(ROWS), gradients, version, worker)
        worker.step(1.0)
        plain.apply([tf.ones(3), tf.constant(gradients)], [other, whole])
        if version == 3 and rates is not None:
            worker.optimizer.learning_rate, plain.learning_rate = rates
    np.testing.assert_allclose(table.lookup(np.arange(ROWS), False), whole.numpy(), rtol=1e-5, atol=1e-6)
    return worker.bias.numpy(), other.numpy()


@pytest.mark.parametrize("name", ALL)
def test_rows_with_a_gradient_in_every_step_are_updated_as_by_keras(name):
    train_as_keras(ALL[name], ALL[name]())


@pytest.mark.parametrize("int_dtype", ["int64", "int32"])  # of TensorFlow, and of other frameworks
def test_steps_and_rates_are_those_of_the_worker(int_dtype):
    update, tables = TableUpdate(leaf(lambda: keras.optimizers.Adam(0.1)), SPEC), []
    worker = Worker(lambda: keras.optimizers.Adam(0.3))
    for _ in range(4):
        worker.step()
    given = {"iterations": np.array(4, int_dtype), "learning_rate": np.float32(0.3)}
    ids, gradients = next(batches())
    for shared in (given, worker.shared):
        tables.append(make_table(update))
        TableUpdates({1: update})({1: tables[-1]}, {1: (ids, gradients)}, 1, shared)
    assert np.array_equal(*(table.lookup(np.arange(ROWS), False) for table in tables))
    fresh = make_table(update)
    train(fresh, update, ids, gradients, 1)
    assert not np.array_equal(fresh.lookup(ids, False), tables[0].lookup(ids, False))


def test_adam_of_rows_is_its_formula_with_the_steps_of_the_model():
    rate, beta_1, beta_2, epsilon = 0.1, 0.9, 0.999, 1e-7
    worker = Worker(lambda: keras.optimizers.Adam(rate))
    update = TableUpdate(leaf(lambda: keras.optimizers.Adam(rate)), SPEC)
    table = make_table(update)
    rows = initial(np.arange(ROWS)).astype(np.float64)
    momentum, velocity = np.zeros_like(rows), np.zeros_like(rows)
    for step, (ids, gradients) in enumerate(batches(), 1):
        train(table, update, ids, gradients, step, worker)
        worker.step()
        # Rows without a gradient: neither their averages decay nor do they move.
        momentum[ids] = beta_1 * momentum[ids] + (1 - beta_1) * gradients
        velocity[ids] = beta_2 * velocity[ids] + (1 - beta_2) * gradients.astype(np.float64) ** 2
        alpha = rate * np.sqrt(1 - beta_2**step) / (1 - beta_1**step)
        rows[ids] -= alpha * momentum[ids] / (np.sqrt(velocity[ids]) + epsilon)
    np.testing.assert_allclose(table.lookup(np.arange(ROWS), False), rows, rtol=1e-4, atol=1e-5)


def with_rate(name, rate):
    """One of each class that may update rows."""
    if name == "a user's own":
        return ElementwiseSigned(rate)
    if name == "RowWiseAdagrad":
        return RowWiseAdagrad(rate)
    more = {
        "SGD": {"momentum": 0.9, "nesterov": True},
        "AdamW": {"weight_decay": 0.1},
        "Ftrl": {"l1_regularization_strength": 0.01},
        "Lion": {"weight_decay": 0.1},
        "RMSprop": {"momentum": 0.5, "clipnorm": 2.0},
    }
    return getattr(keras.optimizers, name)(rate, **more.get(name, {}))


RATES = {
    "a number": lambda factor: 0.1 * factor,
    "a schedule": lambda factor: keras.optimizers.schedules.ExponentialDecay(0.1 * factor, 2, 0.5),
    "a function": lambda factor: lambda: 0.1 * factor,
}


OF_ROWS = ["SGD", "RMSprop", "Adam", "AdamW", "Adadelta", "Adagrad", "Adamax", "Ftrl", "Nadam", "Lion"]


@pytest.mark.parametrize(
    ("name", "rate"),
    [
        *zip(OF_ROWS, cycle(RATES), strict=False),
        ("a user's own", "a number"),
        ("RowWiseAdagrad", "a schedule"),
    ],
)
def test_table_with_a_multiplier_trains_as_keras_does_at_a_multiple_of_the_rate(name, rate):
    make, plain = lambda: with_rate(name, RATES[rate](1)), with_rate(name, RATES[rate](0.25))
    rates = (0.02, 0.005) if rate == "a number" else None  # a rate that is set counts, too
    bias, other = train_as_keras(make, plain, 0.25, rates)
    assert not np.allclose(bias, other)  # which trains at the rate itself


def test_slots_begin_as_keras_makes_them():
    make = functools.partial(keras.optimizers.Adagrad, 0.1, initial_accumulator_value=0.3)
    slots = TableUpdate(leaf(make), SPEC).slots_of(DIM)
    assert [slot.tolist() for slot in slots.values()] == [[pytest.approx(0.3)] * DIM]


def test_slots_of_an_optimizer_that_reduces_over_rows_have_widths_of_their_own():
    slots = TableUpdate(leaf(lambda: RowNorms(0.1)), SPEC).slots
    assert {name: slot.tolist() for name, slot in slots.items()} == {
        "norms": [1, 1, 1], "counts": 0, "memory": [0] * DIM,
    }  # fmt: skip


# The figures of docs/embeddings.md.
@pytest.mark.parametrize(
    ("name", "expected"), [("plain SGD", 112), ("RowWiseAdagrad", 116), ("Adagrad", 176), ("Adam", 240)]
)
def test_row_of_16_numbers_takes_the_memory_that_the_page_says(name, expected):
    wide = VariableSpec("emb/embeddings", (0, 16), "float32", True, table="{}")
    update = TableUpdate(leaf(lambda: keras.optimizers.SGD() if name == "plain SGD" else with_rate(name, 0.1)), wide)
    assert EmbeddingTable(16, "float32", initial, update.slots_of(16)).row_bytes == expected


@pytest.mark.parametrize(
    "make",
    [
        lambda: keras.optimizers.Adafactor(0.1),
        lambda: keras.optimizers.Adam(0.1, use_ema=True),
        lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2),
        lambda: Signed(0.1),
        lambda: WithNormOfAll(0.1),
    ],
    ids=["Adafactor", "use_ema", "accumulation", "a user's own that says nothing", "one that says what is not so"],
)
def test_optimizer_that_needs_whole_tables_is_refused_with_the_table_named(make):
    with pytest.raises(ModelFileError, match=r"can't train the embedding table 'emb/embeddings'.*elementwise = True"):
        TableUpdate(leaf(make), SPEC)


def test_error_in_a_users_optimizer_is_told_with_its_traceback():
    class Broken(ElementwiseSigned):
        elementwise = True

        def update_step(self, gradient, variable, learning_rate):
            raise ValueError("my mistake")

    update = TableUpdate(leaf(lambda: Broken(0.1)), SPEC)
    table = make_table(update)
    with pytest.raises(ModelFileError, match=r"Broken failed on rows.*my mistake") as caught:
        train(table, update, np.arange(2), np.zeros((2, DIM), np.float32), 1)
    assert "update_step" in caught.value.user_traceback
