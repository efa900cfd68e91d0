"""Rows of a lookup are found again at the push after it, without a search."""

from __future__ import annotations

import numpy as np

from elasticcb.ps import id_index
from elasticcb.ps.embedding_table import EmbeddingTable
from elasticcb.ps.id_index import RecentIds


def ids_of(*numbers):
    return np.array(numbers, np.int64)


def table(**options):
    return EmbeddingTable(1, "float32", lambda ids: ids[:, None].astype(np.float32), {}, **options)


def test_ids_are_found_in_the_order_in_which_they_were_noted():
    recent = RecentIds()
    recent.note(ids_of(3, 1, 2), ids_of(0, 1, 2))
    assert recent.find(ids_of(3, 1, 2)).tolist() == [0, 1, 2]
    assert recent.find(ids_of(3, 2, 1)) is None
    assert recent.find(ids_of(3, 4, 2)) is None  # its key is the same


def test_what_is_noted_does_not_change_with_the_memory_that_it_came_in():
    recent, ids = RecentIds(), ids_of(7, 8)
    recent.note(ids, ids_of(0, 1))
    ids[:] = 9
    assert recent.find(ids_of(7, 8)) is not None
    assert recent.find(ids) is None


def test_the_oldest_are_forgotten_where_there_are_too_many(monkeypatch):
    monkeypatch.setattr(id_index, "_MOST_IDS", 5)
    recent = RecentIds()
    for first in (10, 20, 30):
        recent.note(ids_of(first, first + 1), ids_of(0, 1))
    assert recent.find(ids_of(10, 11)) is None
    assert recent.find(ids_of(20, 21)) is not None
    recent.note(ids_of(20, 21), ids_of(4, 5))  # the same once more
    assert recent.find(ids_of(20, 21)).tolist() == [4, 5]
    assert recent.find(ids_of(30, 31)) is not None
    recent.note(np.arange(6), np.arange(6))  # more than are kept at all
    assert recent.find(np.arange(6)) is None


def test_a_push_updates_the_right_rows_after_others_were_removed():
    rows = table()
    rows.lookup(ids_of(1, 2, 3), create=True)
    rows.lookup(ids_of(2, 3), create=True)
    assert rows.knows(ids_of(2, 3))
    rows.evict(rows.places(ids_of(1)))  # row 3 moves into its place
    assert not rows.knows(ids_of(2, 3))
    change = rows.prepare(ids_of(2, 3), np.ones((2, 1), np.float32))
    assert change.rows[:, 0].tolist() == [2, 3]


def test_a_lookup_without_training_is_not_noted():
    rows = table()
    rows.lookup(ids_of(1, 2), create=False)
    assert not rows.knows(ids_of(1, 2))
