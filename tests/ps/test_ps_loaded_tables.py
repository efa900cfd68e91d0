"""Servers take their rows of embedding tables from the files of others, piece by piece."""

from __future__ import annotations

import numpy as np
import pytest
from ps_clients import load_slices

from elasticcb.checkpoint import shard_file
from elasticcb.checkpoint.shard_file import Part, write_part
from elasticcb.checkpoint.versions import begin_version, finish_version, server_file
from elasticcb.errors import CheckpointError, ElasticCBError
from elasticcb.ps.table_limits import TableLimits
from elasticcb.ps.tables import Tables
from elasticcb.settings.choices import WhenFull
from elasticcb.sharding.partition import ShardMap, VariableSpec, partition
from elasticcb.sharding.table_state import TableSpec, TableState, joined

SPECS = [VariableSpec("emb/embeddings", (0, 2), "float32", True, table=TableSpec(None, '"zeros"').to_json())]
IDS = 300


@pytest.fixture
def state(monkeypatch):
    monkeypatch.setattr(shard_file, "PIECE_BYTES", 500)
    random = np.random.default_rng(0)
    rows = random.standard_normal((IDS, 2)).astype(np.float32)
    return TableState(np.arange(IDS), rows, {"momentum": rows}, random.integers(9, size=IDS), random.permutation(IDS))


def checkpoint(folder, state, num_ps):
    unfinished, parts, shard_map = begin_version(folder, 500), partition(SPECS, num_ps, False), ShardMap(num_ps)
    files = [
        write_part(unfinished / server_file(index, num_ps), Part(500, tables={0: state.part(index, shard_map)}))
        for index in range(num_ps)
    ]
    return finish_version(unfinished, version=500, specs=SPECS, parts=parts, files=files)


def loaded(folder, num_ps, index, limits):
    part = load_slices(folder, SPECS, partition(SPECS, num_ps, False)[index], index, ShardMap(num_ps))
    tables = Tables(SPECS, index, ShardMap(num_ps), None, limits)
    tables.load(part.tables, part.version)
    return tables[0]


@pytest.mark.parametrize("before", [1, 2, 3])
@pytest.mark.parametrize("now", [1, 3])
def test_each_server_has_the_rows_of_its_ids(tmp_path, state, before, now):
    folder = checkpoint(tmp_path, state, before)
    tables = [loaded(folder, now, index, TableLimits()) for index in range(now)]
    for index, table in enumerate(tables):
        assert sorted(table.ids().tolist()) == state.part(index, ShardMap(now)).ids.tolist()
    whole = joined([table.export() for table in tables])
    for name in ("ids", "rows", "hits", "used"):
        np.testing.assert_array_equal(getattr(whole, name), getattr(state, name))


@pytest.mark.parametrize("now", [1, 2, 3])
def test_an_id_in_the_files_of_two_servers_is_refused(tmp_path, state, now, monkeypatch):
    twice = state.part(1, ShardMap(2)).ids[7]
    own = state.part(0, ShardMap(2)).ids.tolist()
    parts = [state.select(np.isin(state.ids, [*own, twice])), state.part(1, ShardMap(2))]
    monkeypatch.setattr(TableState, "part", lambda self, index, shard_map: parts[index])
    folder = checkpoint(tmp_path, state, 2)
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match=rf"server-00000-of-00002.* row of the id {twice}, .*file of server 1"):
        loaded(folder, now, 0, TableLimits())


@pytest.mark.parametrize("when_full", list(WhenFull))
@pytest.mark.parametrize("now", [1, 2])
def test_rows_that_were_trained_last_fill_the_memory(tmp_path, state, store, when_full, now):
    folder = checkpoint(tmp_path, state, 2)
    cap = 50 * loaded(folder, now, now - 1, TableLimits()).row_bytes
    limits = TableLimits(cap, when_full, store if when_full is WhenFull.DISK else None)
    if when_full is WhenFull.ERROR:
        with pytest.raises(ElasticCBError, match="are full"):
            loaded(folder, now, now - 1, limits)
        return
    table, own = loaded(folder, now, now - 1, limits), state.part(now - 1, ShardMap(now))
    in_memory = np.sort(own.used)[-50:]
    np.testing.assert_array_equal(np.sort(table.used), in_memory)
    expected = own if when_full is WhenFull.DISK else own.select(own.used >= in_memory[0])
    found = joined([table.export()])
    for name in ("ids", "rows", "hits", "used"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))
