"""Tables in files are read in pieces, and are the same as those that were written."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from elasticcb.checkpoint import shard_file
from elasticcb.checkpoint.shard_file import Part, SavedTable, write_part
from elasticcb.errors import CheckpointError
from elasticcb.sharding.partition import ShardMap
from elasticcb.sharding.table_state import TableState, overlaid, whole

DIM = 3
ALL = (0, ShardMap(1))  # a server that has all rows


def rows_of(random, ids):
    rows = random.standard_normal((len(ids), DIM)).astype(np.float32)
    slots = {"momentum": -rows, "sum": rows[:, :1]}
    return TableState(np.array(ids, np.int64), rows, slots, random.integers(9, size=len(ids)), np.array(ids) % 7)


def written(folder, states):
    for number, state in enumerate(states):
        write_part(
            folder / f"{number}.safetensors", Part(1, tables={4: state, 2: rows_of(np.random.default_rng(), [1])})
        )
    return [folder / f"{number}.safetensors" for number in range(len(states))]


def assert_same(state, expected):
    for name in ("ids", "rows", "hits", "used"):
        np.testing.assert_array_equal(getattr(state, name), getattr(expected, name))
    assert state.slots.keys() == expected.slots.keys()
    for name, slot in state.slots.items():
        np.testing.assert_array_equal(slot, expected.slots[name])


@pytest.mark.parametrize("piece_bytes", [1, 200, 4 << 20])
@pytest.mark.parametrize("sizes", [[40], [0], [50, 20, 1], [30, 0, 60, 60], [0, 5]])
def test_of_rows_in_several_files_the_last_is_read(tmp_path, monkeypatch, piece_bytes, sizes):
    monkeypatch.setattr(shard_file, "PIECE_BYTES", piece_bytes)
    random = np.random.default_rng(sum(sizes))
    states = [rows_of(random, random.permutation(100)[:size]) for size in sizes]
    table, expected = SavedTable(4, written(tmp_path, states), ALL), overlaid(states)
    assert len(table) == len(expected)
    assert_same(whole(table), expected)
    pieces = list(table.pieces())
    for column in range(2):  # in the same order
        ages = np.concatenate([age[column] for age in table.ages()])
        np.testing.assert_array_equal(ages, np.concatenate([(piece.ids, piece.used)[column] for piece in pieces]))


def test_no_more_than_some_pieces_are_in_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(shard_file, "PIECE_BYTES", 10_000)
    ids = np.arange(20_000)
    files = written(tmp_path, [rows_of(np.random.default_rng(2), ids)])
    tracemalloc.start()
    try:
        assert sum(len(piece.ids) for piece in SavedTable(4, files, ALL).pieces()) == len(ids)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 100_000 < files[0].stat().st_size / 8


def test_file_that_is_gone_is_an_error_that_names_it(tmp_path):
    with pytest.raises(CheckpointError, match=r"gone\.safetensors can't be read"):
        len(SavedTable(4, [tmp_path / "gone.safetensors"], ALL))
