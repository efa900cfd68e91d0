"""Tables that are looked up and updated together have the rows of tables on their own."""

from __future__ import annotations

import json
from dataclasses import replace

import keras
import numpy as np
import pytest

from elasticcb.errors import ModelFileError
from elasticcb.layers.initial_values import InitialValues
from elasticcb.optimizers import RowWiseAdagrad
from elasticcb.ps.parameters import Parameters
from elasticcb.ps.table_limits import TableLimits
from elasticcb.settings.choices import WhenFull
from elasticcb.sharding.partition import VariableSpec
from elasticcb.sharding.push import Push, Rows
from elasticcb.sharding.table_state import TableSpec

UNIFORM, NORMAL = keras.initializers.RandomUniform(-0.5, 0.5), keras.initializers.RandomNormal()
INITIALIZERS = [UNIFORM, UNIFORM, NORMAL, UNIFORM, UNIFORM, NORMAL]
DIMS = [4, 4, 4, 2, 4, 4]


def spec(place, dim=4, initializer=UNIFORM, **kwargs):
    text = json.dumps(keras.saving.serialize_keras_object(initializer))
    table = TableSpec(input_dim=100 + place, initializer=text, seed=place).to_json()
    return VariableSpec(f"embedding_{place}/embeddings", (100 + place, dim), "float32", True, table=table, **kwargs)


SPECS = [spec(place, dim, initializer) for place, (dim, initializer) in enumerate(zip(DIMS, INITIALIZERS, strict=True))]
SPECS[4] = replace(SPECS[4], no_weight_decay=True)


def adagrad(count):
    return [keras.optimizers.Adagrad(0.1)]


def adamw(count):
    return [keras.optimizers.AdamW(0.1, weight_decay=0.5)]


def initial(place, ids):
    return InitialValues(INITIALIZERS[place], place, 100 + place, DIMS[place])(ids).numpy()


def push(parameters, ids, gradients=None):
    rows = parameters.tables.lookup(ids, True)
    given = gradients or {place: np.ones_like(values) for place, values in rows.items()}
    shared = {"shared/iterations": np.int64(parameters.version)}
    parameters.merge([Push(1, rows={place: Rows(ids[place], given[place]) for place in ids}, optimizers=shared)])


def random_ids(random, step):
    ids = {place: random.permutation(100)[: 3 + 5 * place].astype(np.int64) for place in range(len(SPECS))}
    if step == 2:
        ids[1] = np.empty(0, np.int64)
    if step == 3:
        del ids[0]
    return ids


def rowwise(count):
    return [RowWiseAdagrad(0.1)]


@pytest.mark.parametrize("make", [adamw, rowwise])
def test_tables_of_one_kind_have_the_rows_of_tables_on_their_own(make):
    together, apart = Parameters(SPECS, [], make, {}), [Parameters(SPECS, [], make, {}) for _ in SPECS]
    random = np.random.default_rng(0)
    for step in range(5):
        ids = random_ids(random, step)
        before = together.tables.lookup(ids, True)
        gradients = {place: random.normal(size=rows.shape).astype(np.float32) for place, rows in before.items()}
        push(together, ids, gradients)
        for place in ids:
            push(apart[place], {place: ids[place]}, {place: gradients[place]})
            # Not to the bit: the last one depends on where in a vector of the processor a row is computed.
            after = [each.tables.lookup({place: ids[place]}, False)[place] for each in (together, apart[place])]
            np.testing.assert_allclose(*after, rtol=1e-6, atol=1e-7)
            np.testing.assert_array_equal(*(each.tables[place].export().used for each in (together, apart[place])))
        for place in range(len(SPECS)):
            if place not in ids:  # Adam corrects its averages by the steps of the model
                push(apart[place], {place: np.empty(0, np.int64)})


@pytest.mark.parametrize("create", [False, True])
def test_initial_rows_depend_on_nothing_but_seed_and_id(create):
    parameters = Parameters(SPECS, [], adagrad, {})
    for count in (1, 7, 64):
        ids = {place: np.arange(count + place) for place in range(len(SPECS))}
        for place, rows in parameters.tables.lookup(ids, create).items():
            np.testing.assert_array_equal(rows, initial(place, ids[place]))


def test_snapshot_outlives_an_update_of_several_tables():
    parameters = Parameters(SPECS, [], adagrad, {})
    ids = {place: np.arange(8 + place) for place in range(len(SPECS))}
    push(parameters, ids)
    before = parameters.tables.lookup(ids, False)
    snapshot = parameters.tables.snapshot()
    push(parameters, {place: np.arange(50) for place in ids})
    found = parameters.tables.lookup({place: np.arange(60) for place in ids}, False, snapshot)
    for place, rows in found.items():
        expected = np.concatenate([before[place], initial(place, np.arange(60))[len(before[place]) :]])
        np.testing.assert_array_equal(rows, expected)


def test_rows_that_another_table_drives_out_meanwhile_are_made_again():
    specs = SPECS[:2]
    limits = TableLimits(when_full=WhenFull.EVICT)
    parameters = Parameters(specs, [], adagrad, {}, limits=limits)
    limits.memory_bytes = 40 * parameters.tables[0].row_bytes
    push(parameters, {0: np.arange(10), 1: np.arange(20)})
    push(parameters, {0: np.arange(10)})
    both = {0: np.arange(10, 30), 1: np.arange(20)}
    rows = parameters.tables.lookup(both, True)
    assert parameters.tables[1].flow.removed
    np.testing.assert_array_equal(rows[0], initial(0, both[0]))
    np.testing.assert_array_equal(rows[1], parameters.tables.lookup(both, False)[1])
    assert 0 < np.sum((rows[1] == initial(1, both[1])).all(axis=1)) < 20


class Failing(keras.optimizers.SGD):
    elementwise = True

    def update_step(self, gradient, variable, learning_rate):
        raise RuntimeError("broken")


def test_no_table_changes_when_the_optimizer_of_one_fails():
    specs = [*SPECS[:2], spec(2, optimizer=1), spec(3, optimizer=1)]
    parameters = Parameters(specs, [], lambda count: [*adagrad(1), Failing(0.1)], {})
    push(parameters, {place: np.arange(5) for place in (0, 1)})
    before = parameters.tables.lookup({place: np.arange(9) for place in range(4)}, True)
    with pytest.raises(ModelFileError, match="broken"):
        push(parameters, {place: np.arange(9) for place in range(4)})
    after = parameters.tables.lookup({place: np.arange(9) for place in range(4)}, False)
    for place, rows in before.items():
        np.testing.assert_array_equal(rows, after[place])
    assert parameters.version == 1
    push(parameters, {place: np.arange(9) for place in (0, 1)})
    assert (parameters.tables.lookup({1: np.arange(9)}, False)[1] != before[1]).all()
