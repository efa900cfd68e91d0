"""What people are told of the tables of servers that train."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from elasticcb.checkpoint.table_report import id_of, tables_of
from elasticcb.errors import WireError
from elasticcb.proto import elasticcb_pb2 as pb
from elasticcb.ps import servicer
from elasticcb.ps.embedding_table import EmbeddingTable, RowFlow
from elasticcb.rpc.tensors import Frame, to_message
from elasticcb.settings.table import TableOptions
from elasticcb.sharding.partition import ShardMap
from helpers_ps import train_rows
from helpers_ps_lost import ROUNDED, SPECS

TABLE = 3


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(servicer, "PIECE_ROWS", 7)


def zeros(ids):
    return np.zeros((len(ids), 3), np.float32)


def trained_table(**options):
    """Of 20 ids, of which the first were trained longer ago, and looked up less often."""
    table = EmbeddingTable(3, np.float32, zeros, {"m": np.zeros(3)}, options=TableOptions(**options))
    for version in range(1, 21):
        ids = np.arange(version - 1, 20)
        table.lookup(ids, create=True)
        train_rows(table, ids[:1], zeros(ids[:1]), lambda rows, slots, gradients: (rows, slots), version)
    return table


def answer_of(servers, top=3, id=None):
    """What the master would answer."""
    answer = pb.TablesResponse(memory_bytes=1000, variables=[spec.to_message() for spec in servers.specs])
    handlers = [server._servicer.handlers for server in servers.servers]
    if id is None:
        answer.counts.extend(each["CountTables"](Frame(pb.CountTablesRequest(top=top), {})).header for each in handlers)
        return answer
    answer.server = int(ShardMap(len(handlers)).server_of(np.array([id]))[0])
    found = handlers[answer.server]["FindRow"](Frame(pb.FindRowRequest(id=id), {}))
    answer.found.CopyFrom(found.header)
    answer.found.tensors.extend(to_message(array, name) for name, array in found.tensors.items())
    return answer


def test_a_table_is_counted_in_pieces_as_it_is():
    table = trained_table()
    counts = servicer.count_table(table, 20, 4, threading.Lock())
    assert (counts.rows, counts.row_bytes, counts.slot_bytes) == (20, 240, 240)
    assert (list(counts.slots), counts.bytes, counts.waiting) == (["m"], 20 * table.row_bytes, 0)
    assert counts.hits.quantiles() == (1, 6, 11, 15, 20, 20)
    assert counts.ages.quantiles() == (0, 5, 10, 14, 19, 19)
    assert (counts.top.ids.tolist(), counts.top.hits.tolist()) == ([19, 18, 17, 16], [20, 19, 18, 17])
    assert (counts.made_lately, counts.removed_lately) == (20, 0)


def test_rows_that_went_and_ids_that_wait_are_counted():
    table = trained_table(max_age=5, min_count=3)
    table.lookup(np.array([100, 101]), create=True)
    counts = servicer.count_table(table, 20, 0, threading.Lock())
    assert (counts.waiting, counts.removed) == (len(table.candidates), table.flow.removed)
    assert counts.waiting >= 2
    assert counts.removed > 0
    assert counts.rows == len(table) == counts.made_lately - counts.removed_lately
    assert table.candidates.lookups(100) == 1
    assert table.candidates.lookups(77) == 0


def test_rows_may_go_between_two_pieces():
    table = trained_table()

    class Lock:
        def __enter__(self):
            if len(table) > 4:
                table.evict(np.arange(3))

        def __exit__(self, *error):
            pass

    counts = servicer.count_table(table, 20, 20, Lock())
    assert counts.rows == len(table)
    assert len(set(counts.top.ids.tolist())) == len(counts.hits) <= 20


def test_growth_is_that_of_the_last_minute():
    flow = RowFlow()
    assert flow.lately(0.0) == (0.0, 0, 0)
    flow.tick(0.0)
    for second in range(1, 201):
        flow.made += 2
        flow.removed += second > 150
        flow.tick(second)
    seconds, made, removed = flow.lately(200.0)
    assert 60 <= seconds <= 65
    assert (made, removed) == (2 * seconds, 50)
    assert flow.lately(300.0)[0] == seconds + 100  # nothing was trained meanwhile


@pytest.mark.parametrize(("specs", "dtype", "row_bytes"), [(SPECS, "float32", 12), (ROUNDED, "bfloat16", 6)])
def test_two_servers_make_one_report(losing, specs, dtype, row_bytes):
    servers = losing(num_ps=2, specs=specs)
    for step in range(5):
        servers.push(step, tuple(range(step, 40)))
    found = tables_of("jobs/x", answer_of(servers), 3)
    (table,) = found.tables
    assert (found.folder, found.memory_bytes, table.path, table.rows) == ("jobs/x", 1000, "emb/embeddings", 40)
    assert sum(table.rows_of_servers) == 40
    assert min(table.rows_of_servers) > 5
    assert table.lookups == 40 + 39 + 38 + 37 + 36
    assert table.top == ((4, 5), (5, 5), (6, 5))
    assert table.hits == (1, 5, 5, 5, 5, 5)
    assert table.ages[0] == 0
    assert (table.dtype, table.row_bytes, table.slot_bytes) == (dtype, 40 * row_bytes, 2 * 40 * 12)
    assert sum(found.held_bytes) == table.live.bytes == 40 * (row_bytes + 2 * 12 + 48)
    assert table.live.made_per_minute > 40 / 60
    assert table.live.removed_per_minute == 0


def test_the_row_of_an_id_is_told_with_its_slots_and_counts(losing):
    servers = losing(num_ps=2)
    for step in range(3):
        servers.push(step, (1, 2, 5, 8))
    for id in (1, 2, 5, 8):
        (found,) = id_of("jobs/x", answer_of(servers, id=id), id).tables
        expected = servers.model(found.server).parameters.tables[TABLE].select(np.array([id]))
        assert found.row == tuple(expected.rows[0].tolist())
        assert (found.hits, found.used) == (3, 3)
        assert found.norm == pytest.approx(np.linalg.norm(expected.rows), rel=1e-6)
        assert found.slot_norms == {
            name: pytest.approx(np.linalg.norm(slot), rel=1e-6) for name, slot in expected.slots.items()
        }
    (none,) = id_of("jobs/x", answer_of(servers, id=77), 77).tables
    assert (none.row, none.hits, none.used, none.slot_norms) == (None, 0, None, {})
    assert none.server == ShardMap(2).server_of(np.array([77]))[0]
    assert len(servers.model(0).parameters.tables[TABLE]) + len(servers.model(1).parameters.tables[TABLE]) == 4


@pytest.mark.parametrize(
    ("method", "asked"),
    [("CountTables", pb.CountTablesRequest(top=-1)), ("CountTables", pb.CountTablesRequest(top=10**6)),
     ("FindRow", pb.FindRowRequest(id=-1))],
)  # fmt: skip
def test_what_can_not_be_asked_is_refused(losing, method, asked):
    with pytest.raises(WireError, match=r"expected 0 t?o"):
        losing().servers[0]._servicer.handlers[method](Frame(asked, {}))
