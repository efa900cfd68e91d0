from __future__ import annotations

import contextlib

import numpy as np
import pytest

from deep_cases import deep_but
from elasticcb.errors import ElasticCBError
from elasticcb.ps import table_snapshot
from elasticcb.ps.embedding_table import EmbeddingTable
from elasticcb.ps.table_rows import rounded
from elasticcb.rpc.tensors import dtype_of
from elasticcb.settings import RowsDtype
from elasticcb.settings.table import TableOptions
from elasticcb.sharding.table_state import TableState, joined
from helpers_ps import train_rows

DIM = 3


def initial(ids):
    """A row that tells its id."""
    return np.outer(ids % 1000, [1.0, 10.0, 100.0]).astype(np.float32)


def descend(rows, slots, gradients):
    """As SGD with momentum; with the sum of first elements."""
    momentum = 0.9 * slots["momentum"] - gradients
    return rows + momentum, {"momentum": momentum, "sum": slots["sum"] + gradients[..., :1]}


def slots_of(dim):
    return {"momentum": np.zeros(dim), "sum": np.ones(1)}


def as_held(rows, rows_dtype):
    return rows.astype(dtype_of(rows_dtype)).astype(np.float32)


def make_table(**limits):
    return EmbeddingTable(DIM, "float32", initial, slots_of(DIM), **limits)


def some_ids(random, below=500):
    ids = np.unique(random.integers(0, below, random.integers(0, 60)))
    random.shuffle(ids)
    return ids


class Model:
    """The same table as dicts."""

    def __init__(self, rows_dtype="float32"):
        self.rows_dtype = rows_dtype
        self.rows, self.slots, self.hits, self.used = {}, {}, {}, {}
        self.version = 0

    def copy(self):
        other = Model(self.rows_dtype)
        for name in ("rows", "slots", "hits", "used"):
            setattr(other, name, dict(getattr(self, name)))
        return other

    def initial(self, each):
        return as_held(initial(np.array([each])), self.rows_dtype)[0]

    def make(self, each):
        if each not in self.rows:
            self.rows[each] = self.initial(each)
            self.slots[each] = {name: row.astype(np.float32) for name, row in slots_of(DIM).items()}
            self.hits[each], self.used[each] = 0, self.version

    def lookup(self, ids, create):
        for each in ids.tolist() if create else []:
            self.make(each)
            self.hits[each] += 1
        found = [self.rows.get(int(each), self.initial(each)) for each in ids]
        return np.array(found, np.float32).reshape(len(ids), DIM)

    def update(self, ids, gradients, version):
        for each, gradient in zip(ids.tolist(), gradients, strict=True):
            self.make(each)
            new, self.slots[each] = descend(self.rows[each], self.slots[each], gradient)
            if self.rows_dtype == "bfloat16":
                new = rounded(new[None], np.array([each]), version)[0].astype(np.float32)
            self.rows[each], self.used[each] = new, version
        self.version = version

    def check(self, state):
        assert sorted(state.ids.tolist()) == sorted(self.rows)
        for place, each in enumerate(state.ids.tolist()):
            np.testing.assert_array_equal(state.rows[place], self.rows[each])
            for name, slot in self.slots[each].items():
                np.testing.assert_array_equal(state.slots[name][place], slot)
            assert (state.hits[place], state.used[place]) == (self.hits[each], self.used[each])


class Reading:
    """A held table that is read piece by piece, and what it has to be in the end."""

    def __init__(self, table, model, since):
        self.held, self.expected, self.pieces = table.hold(contextlib.nullcontext(), since), model.copy(), []
        if since is not None:
            for each, used in model.used.items():
                if used <= since:
                    for held in (self.expected.rows, self.expected.slots, self.expected.hits, self.expected.used):
                        del held[each]

    def read_on(self):
        start = sum(len(piece.ids) for piece in self.pieces)
        if start >= len(self.held):
            return False
        self.pieces.append(self.held.read(start))
        return True

    def finish(self):
        while self.read_on():
            pass
        self.held.release()
        if self.pieces or len(self.held):
            self.expected.check(joined(self.pieces))


WEIGHTS = [0.25, 0.05, 0.3, 0.04, 0.04, 0.04, 0.04, 0.04, 0.2]
EVENTS = ["lookup", "peek", "update", "snapshot", "release", "evict", "reload", "hold", "read"]


@pytest.mark.parametrize("seed", deep_but(range(6), 0))
@pytest.mark.parametrize("rows_dtype", ["float32", "bfloat16"])
def test_table_does_what_dicts_of_rows_do(seed, rows_dtype, monkeypatch):
    monkeypatch.setattr(table_snapshot, "CHUNK_BYTES", 1500)  # 20 rows
    random = np.random.default_rng(seed)
    table, model, version = make_table(options=TableOptions(rows_dtype=RowsDtype(rows_dtype))), Model(rows_dtype), 0
    snapshots, readings = [], []
    for step in range(200):
        ids = some_ids(random)
        what = random.choice(EVENTS, p=WEIGHTS)
        if what in ("lookup", "peek"):
            create = what == "lookup"
            np.testing.assert_array_equal(table.lookup(ids, create), model.lookup(ids, create))
        elif what == "update":
            version += 1
            gradients = random.standard_normal((len(ids), DIM)).astype(np.float32)
            train_rows(table, ids, gradients, descend, version)
            model.update(ids, gradients, version)
        elif what == "snapshot":
            snapshots.append((table.snapshot(), model.copy()))
        elif what == "release" and snapshots:
            snapshots.pop(random.integers(len(snapshots)))[0].release()
        elif what == "evict":
            places = random.permutation(len(table.used))[:20]
            for each in table.export().ids[places].tolist():
                for held in (model.rows, model.slots, model.hits, model.used):
                    del held[each]
            table.evict(places)
        elif what == "hold":
            readings.append(Reading(table, model, random.choice([None, version - 2])))
        elif what == "read" and readings:
            if not readings[0].read_on():
                readings.pop(0).finish()
        elif what == "reload":
            state = table.export()
            table.load(state.select(random.permutation(len(state.ids))), version)
            model.version = version
        if step % 10 == 9:
            model.check(table.export())
        for snapshot, then in snapshots:
            np.testing.assert_array_equal(snapshot.lookup(ids), then.lookup(ids, False))
    for reading in readings:
        reading.finish()


def test_piece_may_be_read_again_until_the_next_one_is(monkeypatch):
    monkeypatch.setattr(table_snapshot, "CHUNK_BYTES", 1500)
    table = make_table()
    table.lookup(np.arange(100), True)
    before = table.export()
    held = table.hold(contextlib.nullcontext())
    starts = [0]
    for version in (1, 2, 3, 4):
        piece = held.read(starts[-1])
        train_rows(table, np.arange(100), np.ones((100, DIM), np.float32), descend, version)
        table.evict(np.array([0, 99 - version]))
        table.lookup(np.arange(100), True)
        again = held.read(starts[-1])
        for one in (piece, again):
            places = slice(starts[-1], starts[-1] + len(one.ids))
            for name in ("ids", "rows", "hits", "used"):
                np.testing.assert_array_equal(getattr(one, name), getattr(before, name)[places])
            np.testing.assert_array_equal(one.slots["momentum"], before.slots["momentum"][places])
        starts.append(starts[-1] + len(piece.ids))
    assert len(starts) == 5
    held.release()
    train_rows(table, np.arange(100), np.ones((100, DIM), np.float32), descend, 5)  # is kept for nobody


def test_what_lookups_and_exports_give_away_does_not_change_with_training():
    table = make_table()
    ids = np.arange(10)
    looked_up, exported = table.lookup(ids, True), table.export()
    train_rows(table, ids, np.ones((10, DIM), np.float32), descend, 1)
    np.testing.assert_array_equal(looked_up, initial(ids))
    np.testing.assert_array_equal(exported.rows, initial(exported.ids))


def test_snapshot_keeps_only_rows_that_have_changed():
    table = make_table()
    table.lookup(np.arange(100), True)
    snapshot = table.snapshot()
    for version in (1, 2, 3):
        train_rows(table, np.arange(7), np.ones((7, DIM), np.float32), descend, version)
    assert len(snapshot._kept) == 7
    np.testing.assert_array_equal(snapshot.lookup(np.arange(200)), initial(np.arange(200)))
    snapshot.release()
    snapshot.release()


def test_update_that_fails_changes_nothing():
    table = make_table()
    table.lookup(np.arange(10), True)
    before = table.export()

    def fail(rows, slots, gradients):
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        train_rows(table, np.arange(10), np.ones((10, DIM), np.float32), fail, 1)
    for name in ("ids", "rows", "hits", "used"):
        np.testing.assert_array_equal(getattr(table.export(), name), getattr(before, name))


def test_slots_that_a_state_lacks_begin_with_their_initial_row():
    table = EmbeddingTable(2, "float32", None, {"accumulator": np.full(2, 0.1, np.float32)})
    table.load(TableState(np.array([5, 3]), np.zeros((2, 2), np.float32)), 0)
    np.testing.assert_array_equal(table.export().slots["accumulator"], np.full((2, 2), 0.1, np.float32))


def test_id_without_a_row_in_a_table_of_given_rows_is_named():
    table = EmbeddingTable(2, "float32", None, {}, name="emb/embeddings")
    table.load(TableState(np.arange(3), np.zeros((3, 2), np.float32)), 0)
    with pytest.raises(ElasticCBError, match="emb/embeddings has no row for id 3"):
        table.lookup(np.arange(5), True)


def test_state_of_another_shape_or_with_other_slots_is_refused():
    table = make_table()
    with pytest.raises(ElasticCBError, match=r"rows, float32\[2, 4\].*rows of 3"):
        table.load(TableState(np.arange(2), np.zeros((2, 4), np.float32)), 0)
    with pytest.raises(ElasticCBError, match=r"sum, float64\[2, 3\]: it has .*slots momentum \[3\], sum \[1\]"):
        table.load(TableState(np.arange(2), np.zeros((2, 3)), {"sum": np.zeros((2, 3))}), 0)
    with pytest.raises(ElasticCBError, match=r"the slot velocity.*momentum"):
        table.load(TableState(np.arange(2), np.zeros((2, 3)), {"velocity": np.zeros((2, 3))}), 0)


def test_slots_and_counts_that_a_state_lacks_stay_for_ids_that_stay():
    table = make_table()
    table.lookup(np.arange(4), True)
    train_rows(table, np.arange(4), np.ones((4, DIM), np.float32), descend, 3)
    before = table.export()
    table.load(TableState(np.array([9, 2]), np.zeros((2, DIM), np.float32)), 5)
    after = table.export()
    new, kept = after.select(after.ids == 9), after.select(after.ids == 2)
    np.testing.assert_array_equal(kept.rows, np.zeros((1, DIM)))
    for name, slot in before.slots.items():
        np.testing.assert_array_equal(kept.slots[name], slot[before.ids == 2])
        assert not np.array_equal(new.slots[name], kept.slots[name])
    assert (kept.hits.tolist(), kept.used.tolist()) == ([1], [3])
    assert (new.hits.tolist(), new.used.tolist()) == ([0], [5])


def test_updates_too_small_for_bfloat16_add_up():
    table = EmbeddingTable(
        50, "float32", lambda ids: np.ones((len(ids), 50)), {}, options=TableOptions(rows_dtype=RowsDtype.BFLOAT16)
    )
    ids, steps = np.arange(100), 400
    table.lookup(ids, True)
    for version in range(1, steps + 1):  # to the nearest, 1 + 2**-10 is 1
        train_rows(table, ids, np.zeros((100, 50)), lambda rows, slots, _: (rows + np.float32(2**-10), slots), version)
    rows = table.lookup(ids, False)
    assert rows.dtype == np.float32
    assert rows.mean() == pytest.approx(1 + steps * 2**-10, abs=1e-3)


def test_rows_of_bfloat16_become_those_of_float32_and_again_bfloat16_without_a_change():
    table, other = (make_table(options=TableOptions(rows_dtype=rows_dtype)) for rows_dtype in reversed(RowsDtype))
    ids = np.arange(100)
    table.lookup(ids, True)
    train_rows(table, ids, np.random.default_rng(0).standard_normal((100, DIM)).astype(np.float32), descend, 1)
    other.load(table.export(), 1)
    again = make_table(options=TableOptions(rows_dtype=RowsDtype.BFLOAT16))
    again.load(other.export(), 1)
    for each in (other, again):
        for name in ("ids", "rows", "used"):
            np.testing.assert_array_equal(getattr(each.export(), name), getattr(table.export(), name))
        np.testing.assert_array_equal(each.export().slots["momentum"], table.export().slots["momentum"])
    assert other.row_bytes - table.row_bytes == 2 * DIM
    assert (other.export().rows.dtype, again.export().rows.dtype) == (np.float32, np.float32)
