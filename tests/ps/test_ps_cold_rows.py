"""Rows that don't fit in memory go to disk, and nobody who looks up, trains, saves or moves a table can tell."""

from __future__ import annotations

import contextlib
import os

import numpy as np
import pytest

from deep_cases import deep_but
from elasticcb.errors import ElasticCBError
from elasticcb.ps import cold_rows, embedding_table, servicer, table_snapshot
from elasticcb.ps.embedding_table import EmbeddingTable
from elasticcb.ps.table_limits import TableLimits
from elasticcb.settings.choices import RowsDtype, WhenFull
from elasticcb.settings.table import TableOptions
from elasticcb.sharding.table_state import JoinedTable, TableState, joined
from elasticcb.storage import cold_store
from elasticcb.storage.cold_store import ColdStore
from helpers_ps import train_rows

DIM = 3
IDS = 400


def initial(ids):
    return np.outer(ids % 1000, [1.0, 10.0, 100.0]).astype(np.float32)


def descend(rows, slots, gradients):
    """As SGD with momentum."""
    momentum = 0.9 * slots["momentum"] - gradients
    return rows + momentum, {"momentum": momentum}


def make_table(limits=None, **options):
    return EmbeddingTable(
        DIM,
        "float32",
        initial,
        {"momentum": np.ones(DIM)},
        limits,
        options=TableOptions(**options) if options else None,
    )


ROW_BYTES = make_table().row_bytes


@pytest.fixture
def full(store):
    """Makes limits of so many rows in memory."""
    return lambda rows: TableLimits(rows * ROW_BYTES, WhenFull.DISK, store)


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(table_snapshot, "CHUNK_BYTES", 1500)
    monkeypatch.setattr(cold_rows, "_AT_ONCE", 7)
    monkeypatch.setattr(embedding_table, "_MOVED_AT_ONCE", 5)


def some_ids(random, most=40):
    return random.permutation(IDS)[: random.integers(0, most)]


def in_pieces(state):
    return JoinedTable([state.select(places) for places in np.array_split(np.arange(len(state.ids)), 9)])


def assert_same(state, expected):
    """In any order; when rows were trained is known of those in memory only to be no earlier."""
    one, other = joined([state]), joined([expected])
    np.testing.assert_array_equal(one.ids, other.ids)
    np.testing.assert_array_equal(one.rows, other.rows)
    np.testing.assert_array_equal(one.slots["momentum"], other.slots["momentum"])
    np.testing.assert_array_equal(one.hits, other.hits)
    assert (one.used >= other.used).all()


class Both:
    """A table with rows on disk, and one that has all in memory."""

    def __init__(self, limits, **options):
        self.table, self.plain = make_table(limits, **options), make_table(**options)
        self.version = 0

    def train(self, ids, random):
        self.version += 1
        gradients = random.normal(size=(len(ids), DIM)).astype(np.float32)
        for table in (self.table, self.plain):
            table.lookup(ids, True)
            train_rows(table, ids, gradients, descend, self.version)

    def check(self, random):
        assert self.table.bytes <= self.table._limits.memory_bytes
        assert len(self.table) == len(self.plain)
        ids = some_ids(random)
        np.testing.assert_array_equal(self.table.lookup(ids, False), self.plain.lookup(ids, False))
        assert_same(self.table.select(ids), self.plain.select(ids))
        since = int(random.integers(0, self.version + 1))
        later = set(self.plain.ids(since).tolist())
        assert later <= set(self.table.ids(since).tolist()) <= set(self.plain.ids().tolist())
        assert {*self.plain.export(since).ids.tolist()} <= {*self.table.export(since).ids.tolist()}
        assert_same(self.table.export(), self.plain.export())


@pytest.mark.parametrize("seed", deep_but(range(20), 0, 1))
def test_table_with_rows_on_disk_is_the_same_as_one_in_memory(full, seed, small_pieces):
    random = np.random.default_rng(seed)
    both = Both(full(70), rows_dtype=list(RowsDtype)[seed % 2])
    held = []
    for step in range(60):
        both.train(some_ids(random), random)
        both.check(random)
        if step % 7 == 0:
            since = None if step % 2 else max(0, both.version - 5)
            held.append((both.table.hold(contextlib.nullcontext(), since), both.plain.export(since)))
            held.append((both.table.snapshot(), both.plain.snapshot()))
        if step % 11 == 5 and held:
            (snapshot, expected), (whole, state) = held.pop(), held.pop()
            ids = np.arange(IDS + 20)
            np.testing.assert_array_equal(snapshot.lookup(ids), expected.lookup(ids))
            snapshot.release()
            read = joined(list(whole.pieces()))
            assert len(whole) == len(read.ids)
            found = np.isin(read.ids, state.ids)  # and those that were brought back since
            assert_same(read.select(found), state)
            whole.release()
    assert len(both.table._cold) > 100
    assert both.table.flow.removed == 0


def test_rows_are_loaded_and_put_beyond_the_memory(full, small_pieces):
    random = np.random.default_rng(3)
    both = Both(full(50))
    for _ in range(30):
        both.train(some_ids(random), random)
    state = both.plain.export()
    changes = (
        lambda table: table.load(state, 40),
        lambda table: table.load(in_pieces(state), 40),
    )
    for change in changes:
        for table in (both.table, both.plain):
            change(table)
        both.check(random)
    bare = type(state)(np.arange(0, IDS, 2), np.zeros((IDS // 2, DIM), np.float32))
    for table in (both.table, both.plain):
        table.load(in_pieces(bare), 50)  # whose slots and counts stay
    both.version = 50
    both.check(random)


def test_rows_stream_in_parts_that_make_up_all_of_them(full, small_pieces):
    both = Both(full(50))
    for start in range(0, 300, 30):
        both.train(np.arange(start, start + 30), np.random.default_rng(0))
    ids, rows = [], []
    while len(ids) < len(both.table):
        part, values = both.table.rows(len(ids), 20)
        assert both.table.rows(len(ids), 20)[0].tolist() == part.tolist()
        ids += part.tolist()
        rows += [*values]
    np.testing.assert_array_equal(rows, both.plain.lookup(np.array(ids), False))
    assert sorted(ids) == list(range(300))
    assert both.table.rows(120, 5)[0].tolist() == ids[120:125]


def test_rows_on_disk_are_counted_with_those_in_memory(full, monkeypatch):
    monkeypatch.setattr(servicer, "PIECE_ROWS", 7)
    both = Both(full(50))
    for start in range(0, 300, 25):
        both.train(np.arange(start, start + 25), np.random.default_rng(0))
    counted, plain = (
        servicer.count_table(table, both.version, 3, contextlib.nullcontext()) for table in (both.table, both.plain)
    )
    assert counted.rows == plain.rows == 300
    assert counted.row_bytes == plain.row_bytes
    np.testing.assert_array_equal(counted.hits.counts, plain.hits.counts)
    assert counted.bytes <= 50 * ROW_BYTES < plain.bytes


def test_rows_of_several_tables_stay_what_they_are_while_they_drive_each_other_out(full):
    limits, random = full(20), np.random.default_rng(0)
    both, other = Both(limits), Both(limits)
    for start in (0, 15, 30, 0, 15, 30):
        ids = np.arange(start, start + 15)
        gradients = random.normal(size=(15, DIM)).astype(np.float32)
        tables = both.table, other.table, both.plain, other.plain
        for table in tables:
            found = table.find(ids, True)
            table.lookup(ids, True, found)
        changes = [table.prepare(ids, gradients) for table in tables]
        for table, change in zip(tables, changes, strict=True):
            table.commit(change, *descend(change.rows, change.slots, change.gradients), start + 1)
    for each in (both, other):
        assert_same(each.table.export(), each.plain.export())


def test_rows_on_disk_grow_old_as_those_in_memory_do(full):
    table = make_table(full(20), max_age=40)
    for version in range(1, 101):
        ids = np.arange(10 * version, 10 * version + 10)
        table.lookup(ids, True)
        train_rows(table, ids, np.zeros((10, DIM), np.float32), descend, version)
    assert 380 <= len(table) <= 480
    assert set(range(600, 1010)) <= set(table.ids().tolist())
    np.testing.assert_array_equal(table.lookup(np.array([15]), False), initial(np.array([15])))


def test_table_of_given_rows_goes_to_disk_and_comes_back(full):
    table = EmbeddingTable(DIM, "float32", None, {"momentum": np.zeros(DIM)}, full(20))
    ids = np.arange(100)
    table.load(TableState(ids, initial(ids)), 0)
    assert table.lookup(ids[::-7], True).tolist() == initial(ids[::-7]).tolist()
    assert table.lookup(ids, False).tolist() == initial(ids).tolist()
    with pytest.raises(ElasticCBError, match="has no row for id 100"):
        table.lookup(np.array([100]), True)


def test_max_rows_are_those_in_memory(store):
    table = make_table(TableLimits(when_full=WhenFull.DISK, store=store), max_rows=9)
    for version in range(1, 10):
        ids = np.arange(4 * version, 4 * version + 4)
        table.lookup(ids, True)
        train_rows(table, ids, np.zeros((4, DIM), np.float32), descend, version)
    assert len(table) == 36
    assert len(table.used) <= 9
    with pytest.raises(ElasticCBError, match=r"were evicted\. Raise max_rows, or use smaller batches"):
        table.lookup(np.arange(10), True)
    assert len(table) == 36


def test_batch_that_does_not_fit_in_memory_is_an_error_and_loses_nothing(full):
    both = Both(full(20))
    for start in range(0, 90, 15):
        both.train(np.arange(start, start + 15), np.random.default_rng(start))
    with pytest.raises(ElasticCBError, match="All rows that could be evicted were evicted"):
        both.table.lookup(np.arange(50), True)
    np.testing.assert_array_equal(both.table.lookup(np.arange(90), False), both.plain.lookup(np.arange(90), False))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_rows_of_other_dtypes_are_kept_as_they_are(store, dtype):
    if dtype == "bfloat16":
        dtype = pytest.importorskip("ml_dtypes").bfloat16
    limits = TableLimits(2000, WhenFull.DISK, store)
    table = EmbeddingTable(2, dtype, lambda ids: np.ones((len(ids), 2)), {"momentum": np.zeros(2)}, limits)
    for start in range(0, 100, 10):
        ids = np.arange(start, start + 10)
        table.lookup(ids, True)
        train_rows(table, ids, np.full((10, 2), 0.25, dtype), descend, 1)
    assert len(table._cold) > 50
    assert table.export().rows.dtype == table.lookup(np.arange(100), False).dtype == dtype
    np.testing.assert_array_equal(table.lookup(np.arange(100), False).astype(float), np.full((100, 2), 0.75))


def test_files_go_with_their_server_and_those_of_a_killed_one_with_the_next(full, store, tmp_path):
    dead, young = tmp_path / "recovery" / "elasticcb-dead", tmp_path / "recovery" / "elasticcb-young"
    for folder in (dead, young):
        folder.mkdir(parents=True)
        (folder / ".lock").touch()
    os.utime(dead, (1, 1))
    make_table(full(5)).lookup(np.arange(4), True)
    table = make_table(full(5))
    for start in (0, 4):
        table.lookup(np.arange(start, start + 4), True)
    (own,) = set((tmp_path / "recovery").iterdir()) - {dead, young}
    os.utime(own, (1, 1))
    ColdStore(tmp_path / "recovery")
    assert set((tmp_path / "recovery").iterdir()) == {own, young}
    snapshot = table.snapshot()
    store.close()
    assert set((tmp_path / "recovery").iterdir()) == {young}
    with pytest.raises(ElasticCBError, match="it is closed"):
        table.lookup(np.arange(8), False)
    snapshot.release()


def test_disk_that_can_not_be_written_is_an_error_that_says_what_to_do(tmp_path):
    (tmp_path / "file").touch()
    limits = TableLimits(5 * ROW_BYTES, WhenFull.DISK, ColdStore(tmp_path / "file"))
    table = make_table(limits)
    table.lookup(np.arange(4), True)
    with pytest.raises(ElasticCBError, match=r"can't be written to .*file.*Free space.*allow more memory"):
        table.lookup(np.arange(4, 8), True)
    assert table.ids().tolist() == [0, 1, 2, 3]


def test_missing_library_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(cold_store, "_LIBRARY", "no_such_library")
    with pytest.raises(ElasticCBError, match=r"no_such_library.*pip install 'elasticcb\[disk\]'"):
        ColdStore(tmp_path)
