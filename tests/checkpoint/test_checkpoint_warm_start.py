"""What a job takes from the checkpoint of another model."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from elasticcb.checkpoint.shard_file import Part, write_part
from elasticcb.checkpoint.versions import begin_version, finish_version, server_file
from elasticcb.checkpoint.warm_start import warm_start
from elasticcb.errors import CheckpointError
from elasticcb.optimizers.state import ModelState, OptimizerState
from elasticcb.sharding.partition import ShardMap, VariableSpec, partition
from elasticcb.sharding.table_state import TableSpec, TableState

ANY = TableSpec(None).to_json()
SLOTS = {(index, name) for index in range(9) for name in "ms"}


def spec(path: str, *shape: int, table: str = "", dtype: str = "float32") -> VariableSpec:
    return VariableSpec(path, shape, dtype, True, table=table)


def array(*shape: int) -> np.ndarray:
    return np.arange(1, 1 + np.prod(shape), dtype="float32").reshape(shape)


SAVED = (
    spec("user/rows", 0, 2, table=ANY),
    spec("hidden/kernel", 4, 3),
    spec("hidden/bias", 3),
    spec("item/rows", 10, 2, table=TableSpec(10).to_json()),
)
IDS, ITEMS = np.array([7, 2, 900], np.int64), np.array([7, 2, 9], np.int64)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of two servers with two tables. The slot `m` is ten times the weights, `s` has one number a row."""
    unfinished, files, parts, shard_map = begin_version(tmp_path, 50), [], partition(SAVED, 2, False), ShardMap(2)
    ids = {0: IDS, 3: ITEMS}
    slots = {"m": 10 * array(3, 2), "s": array(3, 1)}
    tables = {i: TableState(ids[i], array(3, 2), slots, used=np.full(3, 40)) for i in ids}
    for index, slices in enumerate(parts):
        weights = {part.variable: array(*SAVED[part.variable].shape) for part in slices}
        slots = {(variable, "m"): 10 * weight for variable, weight in weights.items()}
        slots |= {(variable, "s"): array(len(weight), 1) for variable, weight in weights.items()}
        part = Part(50, weights, OptimizerState(slots, {}, {"iterations": np.array(50)}, ("Adam",)))
        part.ages = {0: np.array([[30, 1_000], [45, 2_000]])}
        part.tables = {number: table.part(index, shard_map) for number, table in tables.items()}
        files.append(write_part(unfinished / server_file(index, 2), part))
    return finish_version(unfinished, version=50, specs=SAVED, parts=parts, files=files)


def taken(folder: Path, specs: tuple[VariableSpec, ...], init_map: str = "", optimizer: str = "Adam") -> ModelState:
    """A fresh model of zeros, after the start."""
    weights = [np.zeros(each.shape, each.dtype) for each in specs]
    state = ModelState(weights, OptimizerState(optimizers=(optimizer,)))
    warm_start(folder, specs, init_map).apply(state, SLOTS)
    return state


def test_variables_of_the_same_names_are_taken_with_rows_and_slots_wherever_they_stand(folder):
    specs = (SAVED[2], spec("city/rows", 0, 2, table=ANY), SAVED[0])
    state = taken(folder, specs)
    np.testing.assert_array_equal(state.weights[0], array(3))
    np.testing.assert_array_equal(state.ids[2], np.sort(IDS))
    np.testing.assert_array_equal(state.weights[2], array(3, 2)[[1, 0, 2]])
    np.testing.assert_array_equal(state.optimizer.slots[2, "m"], 10 * array(3, 2)[[1, 0, 2]])
    np.testing.assert_array_equal(state.optimizer.slots[2, "s"], array(3, 1)[[1, 0, 2]])
    np.testing.assert_array_equal(state.optimizer.slots[0, "m"], 10 * array(3))
    assert not len(state.weights[1])
    assert not state.optimizer.shared  # steps count from 0
    np.testing.assert_array_equal(state.used[2], [-10, -10, -10])  # rows are as old as before
    np.testing.assert_array_equal(state.ages[2], [[-20, 1_000], [-5, 2_000]])
    summary = warm_start(folder, specs, "").summary()
    assert re.match(f"Loaded 2 of 3 .*{folder}.*initialized: city/rows.*: hidden/kernel, item/rows", summary)


def test_slots_of_another_optimizer_start_fresh(folder):
    state = taken(folder, SAVED, optimizer="SGD")
    assert state.weights[1].any()
    assert not state.optimizer.slots


def test_names_of_variables_and_layers_are_mapped_and_the_longest_counts(folder):
    specs = (spec("customer/rows", 0, 2, table=ANY), spec("top/kernel", 9, 3), spec("top/bias", 3))
    state = taken(folder, specs, "customer=user, top=hidden, top/kernel=")
    np.testing.assert_array_equal(state.ids[0], np.sort(IDS))
    assert not state.weights[1].any()
    np.testing.assert_array_equal(state.weights[2], array(3))


def test_one_layer_may_be_the_start_of_several(folder):
    specs = (SAVED[2], spec("left/bias", 3), spec("right/bias", 3), spec("right/rows", 0, 2, table=ANY))
    state = taken(folder, specs, "left=hidden,right/bias=hidden/bias,right/rows=user/rows")
    for index in range(3):
        np.testing.assert_array_equal(state.weights[index], array(3))
    np.testing.assert_array_equal(state.ids[3], np.sort(IDS))


@pytest.mark.parametrize("init_map", ["top=hidden", "sequential_2/top=hidden"])
def test_the_number_that_keras_gives_a_model_does_not_count(folder, init_map):
    specs = (spec("sequential_2/top/bias", 3), spec("sequential_2/hidden/kernel", 4, 3))
    np.testing.assert_array_equal(taken(folder, specs, init_map).weights[0], array(3))
    np.testing.assert_array_equal(taken(folder, specs, init_map).weights[1], array(4, 3))


def test_an_embedding_may_move_to_the_servers_and_back_and_have_more_ids(folder):
    to_table = spec("hidden/kernel", 6, 3, table=TableSpec(6).to_json())
    from_table = spec("item/rows", 12, 2)
    state = taken(folder, (to_table, from_table))
    np.testing.assert_array_equal(state.weights[0], np.concatenate([array(4, 3), np.zeros((2, 3))]))
    np.testing.assert_array_equal(state.ids[0], np.arange(6))
    assert state.weights[1].shape == (12, 2)
    np.testing.assert_array_equal(state.weights[1][ITEMS], array(3, 2))
    assert not [key for key in state.optimizer.slots if key[0] in (0, 1)]  # those of new ids are not known
    same = taken(folder, (spec("hidden/kernel", 4, 3, table=TableSpec(4).to_json()),))
    np.testing.assert_array_equal(same.optimizer.slots[0, "m"], 10 * array(4, 3))
    np.testing.assert_array_equal(same.optimizer.slots[0, "s"], array(4, 1))


@pytest.mark.parametrize(
    ("specs", "init_map", "expected"),
    [
        ((SAVED[2], spec("hidden/kernel", 6, 3)), "", r"float32\[6, 3\] .*float32\[4, 3\] .*map .hidden/kernel=."),
        (
            (SAVED[2], spec("user/rows", 0, 5, table=ANY)),
            "hidden/bias=",
            r'float32\[any, 5\] .* float32\[any, 2\].*init_map "hidden/bias=,user/rows="',
        ),
        ((spec("user/rows", 10, 2, table=TableSpec(10).to_json()),), "", r"float32\[10, 2\]"),
        ((spec("hidden/bias", 3, dtype="int32"),), "", r"int32\[3\] in the model, and float32\[3\]"),
        ((spec("a/kernel", 4, 3),), "", "no variable of the model. The model has a/kernel"),
        (SAVED, "usr=user", "The model has no variable or layer 'usr'. Is it 'user'?"),
        (SAVED, "user=usr", "The checkpoint .* has no variable or layer 'usr'. Is it 'user'?"),
        (SAVED, "hidden=user", "init_map: hidden=user: no variable of the checkpoint has the name"),
        (SAVED, "hidden/kernel=hidden", "init_map: hidden/kernel=hidden: no variable"),
        (SAVED, "zzz=user", "It has user/rows, hidden/kernel, hidden/bias"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_to_do(folder, specs, init_map, expected):
    with pytest.raises(CheckpointError, match=expected):
        warm_start(folder, specs, init_map)
