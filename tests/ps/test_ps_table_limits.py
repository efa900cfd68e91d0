from __future__ import annotations

import numpy as np
import pytest

from elasticcb.errors import ElasticCBError
from elasticcb.ps import table_limits
from elasticcb.ps.embedding_table import EmbeddingTable
from elasticcb.ps.table_limits import TableLimits
from elasticcb.ps.tables import Tables
from elasticcb.settings.choices import WhenFull
from elasticcb.settings.table import TableOptions
from elasticcb.sharding.partition import ShardMap, VariableSpec
from elasticcb.sharding.table_state import JoinedTable, TableSpec, TableState
from helpers_ps import train_rows

DIM = 2
ROW_BYTES = EmbeddingTable(DIM, "float32", None, {}).row_bytes


def make_table(limits=None, initial_values=lambda ids: np.zeros((len(ids), DIM), np.float32), **kwargs):
    return EmbeddingTable(DIM, "float32", initial_values, {}, limits, **kwargs)


def count_up(rows, slots, gradients):
    return rows + 1, {}


def train(table, ids, version):
    ids = np.array(ids)
    table.lookup(ids, True)
    train_rows(table, ids, np.zeros((len(ids), DIM), np.float32), count_up, version)


def ids_of(table):
    return sorted(table.export().ids.tolist())


def values_of(table, ids):
    return table.lookup(np.array(ids), False)[:, 0].tolist()


def test_full_table_raises_an_error_that_names_the_flags():
    table = make_table(TableLimits(memory_bytes=10 * ROW_BYTES))
    train(table, range(10), 1)
    with pytest.raises(ElasticCBError, match=r"--embedding_memory_bytes.*--embedding_when_full"):
        table.lookup(np.array([3, 10]), True)
    assert ids_of(table) == list(range(10))
    assert values_of(table, [10]) == [0]


def test_full_table_evicts_the_rows_that_were_not_trained_for_the_longest_time():
    table = make_table(TableLimits(memory_bytes=10 * ROW_BYTES, when_full=WhenFull.EVICT))
    train(table, range(5), 1)
    train(table, range(5, 10), 2)
    train(table, [0, 1, 2], 3)
    train(table, [20, 21], 4)
    assert ids_of(table) == [0, 1, 2, 5, 6, 7, 8, 9, 20, 21]
    assert values_of(table, [0, 3, 20]) == [2, 0, 1]
    assert table.flow.removed == 2


def test_rows_of_the_same_batch_are_not_evicted_for_each_other():
    table = make_table(TableLimits(memory_bytes=10 * ROW_BYTES, when_full=WhenFull.EVICT))
    train(table, range(10), 1)
    train(table, [0, *range(30, 39)], 2)
    assert ids_of(table) == [0, *range(30, 39)]
    assert values_of(table, [0, 38]) == [2, 1]


def test_full_table_that_may_not_grow_leaves_new_ids_their_initial_values():
    table = make_table(TableLimits(memory_bytes=10 * ROW_BYTES, when_full=WhenFull.INITIAL))
    train(table, range(8), 1)
    train(table, [0, *range(20, 25)], 2)
    assert ids_of(table) == [*range(8), 20, 21]
    assert values_of(table, [0, 20, 22]) == [2, 1, 0]


def test_cap_is_that_of_all_tables_together():
    limits = TableLimits(memory_bytes=10 * ROW_BYTES, when_full=WhenFull.EVICT)
    old, new = make_table(limits), make_table(limits)
    train(old, range(6), 1)
    train(new, range(4), 2)
    train(new, range(4, 7), 3)
    assert (ids_of(old), ids_of(new)) == ([3, 4, 5], list(range(7)))
    assert limits.bytes == 10 * ROW_BYTES


def test_rows_that_were_given_are_never_evicted():
    limits = TableLimits(memory_bytes=10 * ROW_BYTES, when_full=WhenFull.EVICT)
    ages = TableOptions(max_age=2)
    given, other = make_table(limits, None, options=ages), make_table(limits, options=ages)
    given.load(TableState(np.arange(6), np.zeros((6, DIM), np.float32)), 0)
    for version in range(1, 20):
        train(other, [version], version)
        train(given, [3], version)
    assert ids_of(given) == list(range(6))
    with pytest.raises(ElasticCBError, match="are full"):
        given.load(TableState(np.arange(11), np.zeros((11, DIM), np.float32)), 0)


def test_rows_that_are_to_go_go_piece_by_piece_unless_they_are_trained_meanwhile(monkeypatch):
    monkeypatch.setattr(table_limits, "_EVICTED_AT_ONCE", 20)
    table = make_table(TableLimits(memory_bytes=1600 * ROW_BYTES, when_full=WhenFull.EVICT))
    for version in range(16):
        train(table, range(version * 100, version * 100 + 100), version)
    train(table, [9999], 16)  # of the hundred oldest, which are chosen
    assert ids_of(table)[0] == 20
    train(table, range(20, 30), 17)
    train(table, range(2000, 2020), 18)  # 19 had room
    assert ids_of(table)[:11] == [*range(20, 30), 50]
    train(table, range(3000, 3060), 19)  # more than are still chosen of these
    assert set(range(20, 30)) <= set(ids_of(table))
    assert min(set(ids_of(table)) - set(range(20, 30))) in range(90, 121)
    assert len(table) <= 1600


def test_rows_that_were_chosen_to_go_and_trained_since_do_not_keep_others_from_their_room(monkeypatch):
    monkeypatch.setattr(table_limits, "_EVICTED_AT_ONCE", 1)
    limits = TableLimits(memory_bytes=1600 * ROW_BYTES, when_full=WhenFull.EVICT)
    table = make_table(limits)
    train(table, range(1600), 1)
    train(table, [9999], 2)
    train(table, range(1, 1600), 3)  # all that were chosen
    train(table, range(5000, 5050), 4)
    assert set(range(5000, 5050)) <= set(ids_of(table))
    assert len(table) == 1600


def test_id_gets_a_row_from_its_third_time_on():
    table = make_table(options=TableOptions(min_count=3))
    for version in range(1, 6):
        train(table, [7, version + 100], version)
        table.lookup(np.array([50]), False)  # an evaluation does not count
    assert ids_of(table) == [7]
    assert values_of(table, [7]) == [3]
    assert len(table.candidates) == 5


def test_rows_and_candidates_that_are_too_old_go():
    table = make_table(options=TableOptions(min_count=2, max_age=10))
    for version in (1, 2):
        train(table, [1, 2, version + 100], version)
    for version in range(3, 16):
        train(table, [2], version)
    assert ids_of(table) == [2]
    assert len(table.candidates) == 0
    assert values_of(table, [1]) == [0]


@pytest.mark.parametrize("when_full", [WhenFull.EVICT, WhenFull.INITIAL])
@pytest.mark.parametrize("room", [0, 1, 7, 60])
def test_checkpoint_that_comes_in_pieces_gives_the_newest_of_all(when_full, room):
    random = np.random.default_rng(room)
    ids, rows, used = random.permutation(60), np.ones((60, DIM), np.float32), random.integers(9, size=60)
    whole = TableState(ids, rows, used=used)
    source = JoinedTable([whole.select(part) for part in np.array_split(np.arange(60), 13)])
    table = make_table(TableLimits(memory_bytes=max(1, room * ROW_BYTES), when_full=when_full))
    table.load(source, 100)
    assert ids_of(table) == sorted(ids[np.argsort(-used, kind="stable")[:room]])


@pytest.mark.parametrize("when_full", list(WhenFull))
def test_candidates_make_room_for_rows(when_full):
    limits = TableLimits(memory_bytes=10 * ROW_BYTES, when_full=when_full)
    table = make_table(limits, options=TableOptions(min_count=2))
    for version, start in enumerate(range(0, 100, 5), 1):
        train(table, [*range(3), 3 + start], version)
    assert ids_of(table) == [0, 1, 2]
    for version in (30, 31):
        train(table, range(200, 207), version)
    assert ids_of(table) == [0, 1, 2, *range(200, 207)]
    assert limits.bytes <= limits.memory_bytes


@pytest.mark.parametrize("when_full", list(WhenFull))
def test_counts_of_ids_without_a_row_stay_below_the_cap_where_no_row_is_ever_made(when_full):
    limits = TableLimits(memory_bytes=10 * ROW_BYTES, when_full=when_full)
    table = make_table(limits, options=TableOptions(min_count=2))
    for start in range(0, 1000, 100):
        table.lookup(np.arange(start, start + 100), True)
        assert limits.bytes <= limits.memory_bytes


def test_ids_that_come_rarely_get_their_rows_although_others_go_all_the_time():
    limits = TableLimits(memory_bytes=400 * ROW_BYTES, when_full=WhenFull.EVICT)
    table = make_table(limits, options=TableOptions(min_count=3))
    others = iter(range(1000, 10**9))
    for version in range(1, 300):
        rare = version % 10  # each of ten comes in every tenth batch
        once = [next(others) for _ in range(20)]  # and never again
        train(table, [rare, *once], version)
        if version % 2:  # these become rows, and the table is full
            for _ in range(2):
                table.lookup(np.array(once), True)
    assert table.flow.removed > 1000
    assert set(range(10)) <= set(ids_of(table))


def test_row_of_which_nobody_knows_when_it_was_trained_counts_as_trained_now():
    table = make_table(options=TableOptions(max_age=10))
    table.load(TableState(np.arange(20), np.ones((20, DIM), np.float32)), 1000)
    for version in range(1001, 1010):
        train(table, [0], version)
    assert ids_of(table) == list(range(20))
    table.load(TableState(np.arange(21), np.ones((21, DIM), np.float32)), 1010)  # row 20 is new, 0 was trained last
    for version in range(1011, 1016):
        train(table, [1], version)
    assert ids_of(table) == [0, 1, 20]


def test_rows_age_from_zero_on_where_versions_do():
    table = make_table(options=TableOptions(max_age=10))
    table.load(TableState(np.arange(3), np.ones((3, DIM), np.float32), used=np.array([900, 990, 1000])), 0)
    for version in range(1, 15):
        train(table, [1], version)
    assert ids_of(table) == [1]


@pytest.mark.parametrize("memory_bytes", [0, 100 * ROW_BYTES])
def test_full_table_of_max_rows_does_what_a_full_server_does(memory_bytes):
    limits = TableLimits(memory_bytes, WhenFull.EVICT)
    capped, other = make_table(limits, options=TableOptions(max_rows=9)), make_table(limits)
    for version, start in enumerate(range(0, 40, 4), 1):
        train(capped, [0, *range(start, start + 4)] if start else range(4), version)
        train(other, range(start, start + 4), version)
    assert ids_of(capped) == [0, *range(32, 40)]
    assert values_of(capped, [0, 31, 32]) == [10, 0, 1]
    assert ids_of(other) == list(range(40))
    limits.when_full = WhenFull.INITIAL
    train(capped, [0, 50], 11)
    assert values_of(capped, [0, 50]) == [11, 0]
    limits.when_full = WhenFull.ERROR
    with pytest.raises(ElasticCBError, match=r"full.* max_rows is 9.*max_rows"):
        train(capped, [0, 50], 12)


def test_batch_of_more_ids_than_max_rows_is_an_error():
    table = make_table(TableLimits(when_full=WhenFull.EVICT), options=TableOptions(max_rows=3))
    train(table, [7, 8], 1)
    with pytest.raises(ElasticCBError, match=r"were evicted\. Raise max_rows, or use smaller batches"):
        train(table, range(4), 2)


def test_rows_of_a_batch_stay_where_its_table_and_the_server_are_full():
    limits = TableLimits(10 * ROW_BYTES, WhenFull.EVICT)
    capped, other = make_table(limits, options=TableOptions(max_rows=6)), make_table(limits)
    train(capped, range(6), 1)
    train(other, range(4), 3)
    limits.memory_bytes = 9 * ROW_BYTES
    train(capped, [4, 5, 6, 7], 2)  # of 6 rows 2 go for the table, 1 for the server
    assert ids_of(capped) == [3, 4, 5, 6, 7]
    assert values_of(capped, [4, 5, 6]) == [2, 2, 1]
    assert ids_of(other) == [0, 1, 2, 3]


@pytest.mark.parametrize("when_full", list(WhenFull))
def test_checkpoint_of_more_than_max_rows_is_taken_as_that_of_too_many_bytes(when_full):
    table = make_table(TableLimits(when_full=when_full), options=TableOptions(max_rows=3))
    state = TableState(np.arange(5), np.ones((5, DIM), np.float32), used=np.array([5, 1, 4, 2, 3]))
    if when_full is WhenFull.ERROR:
        with pytest.raises(ElasticCBError, match="max_rows"):
            table.load(state, 5)
    else:
        table.load(state, 5)
        assert ids_of(table) == [0, 2, 4]


@pytest.mark.parametrize("servers", [1, 2, 3, 7])
def test_servers_share_max_rows_by_their_buckets(servers):
    text = TableSpec(None, '"zeros"', options=TableOptions(max_rows=100)).to_json()
    specs = [VariableSpec("users/embeddings", (0, DIM), "float32", True, table=text)]
    for shard_map in (ShardMap(servers), ShardMap(servers + 1).resized(servers)):
        shares = [Tables(specs, index, shard_map, None, TableLimits())[0].max_rows for index in range(servers)]
        assert sum(shares) == 100
        assert max(shares) - min(shares) <= 1
