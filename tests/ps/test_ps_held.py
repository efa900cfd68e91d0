"""What is saved or exported is of one version, however training goes on meanwhile."""

from __future__ import annotations

import copy

import numpy as np
import pytest

from elasticcb.checkpoint.shard_file import TensorFile
from elasticcb.errors import ElasticCBError
from elasticcb.proto import elasticcb_pb2 as pb
from elasticcb.ps import table_snapshot
from elasticcb.rpc import tensors
from elasticcb.rpc.tensors import Frame
from elasticcb.sharding.table_state import joined, whole
from helpers_ps import assert_same, exported, read_part

TABLE = 3


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(table_snapshot, "CHUNK_BYTES", 300)  # a few rows


def assert_same_parts(one, other):
    assert (one.version, one.optimizers.optimizers) == (other.version, other.optimizers.optimizers)
    pairs = [(getattr(one, held), getattr(other, held)) for held in ("weights",)]
    pairs += [
        (getattr(one.optimizers, held), getattr(other.optimizers, held)) for held in ("slots", "extras", "shared")
    ]
    for arrays, expected in pairs:
        assert arrays.keys() == expected.keys()
        for key in arrays:
            np.testing.assert_array_equal(arrays[key], expected[key], strict=True)
    assert one.tables.keys() == other.tables.keys()
    for number in one.tables:
        table, expected = whole(one.tables[number]), whole(other.tables[number])
        np.testing.assert_array_equal(table.ids, expected.ids)
        np.testing.assert_array_equal(table.rows, expected.rows)
        np.testing.assert_array_equal(table.hits, expected.hits)
        np.testing.assert_array_equal(table.used, expected.used)
        assert table.slots.keys() == expected.slots.keys() != set()
        for name, slot in table.slots.items():
            np.testing.assert_array_equal(slot, expected.slots[name])


class Training:
    """Pushes at each piece that is written: to rows that were written already, that are not yet, and new ones."""

    def __init__(self, servers, monkeypatch):
        self.servers, self.step, self.pieces = servers, 100, 0
        put = TensorFile.put

        def put_and_push(file, name, first, array):
            self.pieces += name.endswith("/ids")
            self.push()
            put(file, name, first, array)

        monkeypatch.setattr(TensorFile, "put", put_and_push)

    def push(self):
        self.step += 1
        self.servers.push(self.step, (self.step % 60, 60 + self.step % 7, self.step))


def trained(losing):
    servers = losing()
    for step in range(20):
        servers.push(step, tuple(range(step, 60, 7)))
    return servers


def test_checkpoint_is_of_the_version_at_its_beginning(losing, monkeypatch, tmp_path):
    servers = trained(losing)
    expected = copy.deepcopy(exported(servers.model(0).parameters))
    training = Training(servers, monkeypatch)
    save = servers.servers[0]._servicer.handlers["Save"]
    saved = save(Frame(pb.SaveRequest(path=str(tmp_path / "file")), {})).header
    found = read_part(tmp_path / saved.file)
    assert_same_parts(found, expected)
    assert training.pieces > 5
    assert servers.model(0).parameters.version > expected.version
    assert not servers.model(0).parameters.tables[TABLE]._rows.snapshots


def test_a_file_of_changes_is_of_the_version_at_its_beginning(losing, monkeypatch, tmp_path):
    servers = trained(losing)
    servers.write()
    for step in range(20, 25):
        servers.push(step, tuple(range(step, 60, 7)))
    expected = copy.deepcopy(exported(servers.model(0).parameters, 20))
    training = Training(servers, monkeypatch)
    servers.write()
    assert training.pieces > 2
    found = read_part(sorted((tmp_path / "job" / "recovery").glob("ps-*"))[-1])
    assert_same_parts(found, expected)


def test_checkpoint_that_can_not_be_written_holds_nothing_any_more(losing, monkeypatch, tmp_path):
    servers = trained(losing)
    save = servers.servers[0]._servicer.handlers["Save"]
    with pytest.raises(Exception, match="can't be written"):
        save(Frame(pb.SaveRequest(path=str(tmp_path / "no folder" / "file")), {}))
    assert not servers.model(0).parameters.tables[TABLE]._rows.snapshots


def read_with(monkeypatch, before):
    """Has `before` called at each piece of a table that is read."""
    read = table_snapshot.HeldTable.read

    def other(table, start):
        before()
        return read(table, start)

    monkeypatch.setattr(table_snapshot.HeldTable, "read", other)


def test_export_is_of_the_version_at_its_beginning(losing, monkeypatch):
    servers = losing(num_ps=2)
    for step in range(20):
        servers.push(step, tuple(range(step, 60, 7)))
    parts = [copy.deepcopy(exported(servers.model(index).parameters)) for index in range(2)]
    step = iter(range(100, 1000))
    read_with(monkeypatch, lambda: servers.push(next(step), (3, 7, 11, 60)))
    state = servers.master.export()
    assert next(step) > 105
    assert state.version == parts[0].version
    whole = joined([part.tables[TABLE] for part in parts])
    np.testing.assert_array_equal(state.ids[TABLE], whole.ids)
    np.testing.assert_array_equal(state.weights[TABLE], whole.rows)
    for name, slot in whole.slots.items():
        np.testing.assert_array_equal(state.optimizer.slots[TABLE, name], slot)
    for part, slices in zip(parts, servers.master.servers.partition, strict=True):
        for own in slices:
            assert own.elements == servers.master.servers.specs[own.variable].elements  # else the arrays are to be cut
            np.testing.assert_array_equal(state.weights[own.variable], part.weights[own.variable])
        for key, slot in part.optimizers.slots.items():
            np.testing.assert_array_equal(state.optimizer.slots[key], slot)
    for index in range(2):
        assert servers.model(index).exported is None
        assert not servers.model(index).parameters.tables[TABLE]._rows.snapshots


def test_export_that_is_over_gives_nothing_any_more(losing, monkeypatch):
    servers = trained(losing)
    methods = servers.servers[0]._servicer.handlers
    methods["Export"](Frame(pb.ExportRequest(id=5), {}))

    def end():  # between the look for the export and its reading
        methods["Export"](Frame(pb.ExportRequest(id=5, release=True), {}))
        servers.push(100, range(60))

    read_with(monkeypatch, end)
    with pytest.raises(ElasticCBError, match="is over"):
        methods["ReadTable"](Frame(pb.ReadTableRequest(variable=TABLE, export_id=5), {}))


def test_what_a_killed_master_had_held_is_released_by_the_next_one(losing):
    servers = losing(num_ps=2)
    servers.push(1)
    for index in range(2):
        servers.servers[index]._servicer.handlers["Export"](Frame(pb.ExportRequest(id=5), {}))
    snapshots = [servers.model(index).parameters.tables[TABLE]._rows.snapshots for index in range(2)]
    assert list(map(len, snapshots)) == [1, 1]
    servers.master.release_held()
    assert snapshots == [[], []]


def test_export_begins_again_when_a_server_is_replaced_meanwhile(losing, monkeypatch):
    servers = trained(losing)
    servers.write()
    expected = joined([servers.model(0).parameters.tables[TABLE].export()])
    reads, call = [], servers.master.servers.call

    def lose_once(server, method, header):
        reads.append(method == "ReadTable")
        if sum(reads) == 3 and method == "ReadTable":
            servers.replace(version=20)
        return call(server, method, header)

    servers.master.servers.call = lose_once
    state = servers.master.export()
    np.testing.assert_array_equal(state.ids[TABLE], expected.ids)
    np.testing.assert_array_equal(state.weights[TABLE], expected.rows)
    assert sum(reads) > 8


def test_weights_and_state_of_any_size_go_to_servers_and_back(losing, monkeypatch):
    monkeypatch.setattr(tensors, "_CHUNK_BYTES", 40)
    servers = trained(losing)
    state = servers.master.export()
    servers.push(50)
    assert servers.master.export().version == 21
    assert servers.master.load_state(state.weights, state.optimizer, state.ids) == 22
    again = servers.master.export()
    assert_same(state.weights, again.weights)
    assert state.optimizer.slots.keys() == again.optimizer.slots.keys()
    for key, slot in state.optimizer.slots.items():
        np.testing.assert_array_equal(slot, again.optimizer.slots[key])
    assert not servers.servers[0]._servicer.holder.model.exported
