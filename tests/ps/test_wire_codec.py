"""Arrays in fewer bits for the way."""

import ml_dtypes
import numpy as np
import pytest

from elasticcb.settings import WireDtype
from elasticcb.sharding.array_names import WEIGHTS, of_kind
from elasticcb.sharding.partition import VariableSpec
from elasticcb.sharding.push import narrowed, widened
from helpers_ps_lost import IDS, Servers

SPECS = (
    VariableSpec("table/embeddings", (0, 16), "float32", True),
    VariableSpec("dense/kernel", (4, 2), "bfloat16", True),
    VariableSpec("cube", (9, 4, 5), "float32", True),
)
ROWS = "rows/0/values"


def rows_of(count=3000, dim=16, seed=0):
    generator = np.random.default_rng(seed)
    rows = generator.normal(size=(count, dim)) * 10.0 ** generator.integers(-6, 6, (count, 1))
    return rows.astype(np.float32)


def there_and_back(frame, wire_dtype):
    return widened(narrowed(frame, wire_dtype), SPECS)


def test_what_is_sent_as_it_is_stays_the_same_memory():
    frame = {ROWS: rows_of()}
    assert there_and_back(frame, WireDtype.SAME)[ROWS] is frame[ROWS]


@pytest.mark.parametrize("name", [ROWS, "table/0", "moved/float32"])
def test_bfloat16_is_rounded_to_the_nearest(name):
    given = rows_of()
    sent = narrowed({name: given}, WireDtype.BFLOAT16)
    assert list(sent) == [name]
    assert sent[name].nbytes == given.nbytes // 2
    back = widened(sent, SPECS)[name]
    assert back.dtype == np.float32
    np.testing.assert_array_equal(back, given.astype(ml_dtypes.bfloat16).astype(np.float32))


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_is_not_finite_at_the_other_end(wrong):
    given = rows_of(5)
    given[3, 7] = wrong
    back = there_and_back({ROWS: given}, WireDtype.BFLOAT16)[ROWS]
    assert np.isfinite(back).all(axis=1).tolist() == [True, True, True, False, True]


def test_what_is_empty_or_of_another_dtype_or_kind_is_left_alone():
    frame = {
        "rows/2/values": rows_of(6, 20).reshape(6, 4, 5),
        "rows/0/values": np.empty((0, 16), np.float32),
        "rows/0/ids": np.arange(3),
        "rows/1/values": np.ones((3, 2), ml_dtypes.bfloat16),
        "state/float32": np.ones(3, np.float32),
        "slots/0/momentum": np.ones((3, 4), np.float32),
        "table/0": np.ones((3, 2), np.float32),
        "gradients/float64": np.ones(3),
        "weights/bfloat16": np.ones(3, ml_dtypes.bfloat16),
    }
    sent = narrowed(frame, WireDtype.BFLOAT16)
    narrow = {name for name in frame if sent[name].dtype != frame[name].dtype}
    assert narrow == {"rows/2/values", "rows/0/values", "table/0"}
    back = widened(sent, SPECS)
    assert {name: (array.dtype, array.shape) for name, array in back.items()} == {
        name: (array.dtype, array.shape) for name, array in frame.items()
    }


@pytest.mark.parametrize("name", ["table/9", "rows/x/values", "rows", "table/x", "rows/", "gradients", ""])
def test_names_of_nothing_stay_for_the_reader_to_refuse(name):
    array = np.ones((3, 4), ml_dtypes.bfloat16)
    assert widened({name: array}, SPECS)[name] is array


# ---------------------------------------------------------------- between a worker and its servers


@pytest.fixture
def servers(tmp_path):
    made = []

    def make(**settings):
        made.append(Servers(tmp_path, **settings))
        return made[-1]

    yield make
    for each in made:
        each.close()


def weights(blocks):
    return np.concatenate([array for server in blocks for array in of_kind(WEIGHTS, server).values()])


def test_training_sees_rounded_rows_and_all_else_sees_those_of_the_servers(servers):
    some = servers(num_ps=2, wire_dtype="bfloat16")
    some.push(1)
    np.testing.assert_array_equal(weights(some.worker.pull()), weights(some.master.pull()))
    rows = some.master.lookup({3: IDS})[3]
    for_training = some.worker.lookup({3: IDS}, create=True)[3]
    assert (for_training != rows).any()
    assert (np.abs(for_training - rows) <= 0.51 * 1.008 / 127 * np.abs(rows).max(axis=1, keepdims=True)).all()
    np.testing.assert_array_equal(some.worker.lookup({3: IDS})[3], rows)
    some.master.snapshot(1)
    np.testing.assert_array_equal(some.worker.lookup({3: IDS}, evaluation_round=1)[3], rows)


def test_rounded_pushes_train_almost_the_same_model(servers):
    held = {}
    for wire_dtype in ("same", "bfloat16"):
        some = servers(wire_dtype=wire_dtype)
        for step in range(5):
            some.push(step)
        held[wire_dtype] = some.held()
    assert any((one != other).any() for one, other in zip(held["bfloat16"], held["same"], strict=True))
    for one, other in zip(held["bfloat16"], held["same"], strict=True):
        np.testing.assert_allclose(one, other, atol=0.02)


def test_a_worker_that_is_alone_knows_what_servers_made_of_its_rounded_movement(servers):
    some = servers(num_ps=2, wire_dtype="bfloat16")
    some.worker.pull()
    for step in range(3):
        some.push(step)
        np.testing.assert_array_equal(weights(some.worker.blocks), weights(some.master.pull()))
