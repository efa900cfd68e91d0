from __future__ import annotations

import numpy as np
import pytest

from elasticcb.ps.embedding_table import EmbeddingTable
from elasticcb.ps.id_index import IdIndex, RecentIds

RANGES = {"few": 5_000, "many": 1 << 40, "all": 2**63 - 1}


@pytest.mark.parametrize("highest", RANGES.values(), ids=RANGES)
def test_index_does_what_a_dict_does(highest):
    random = np.random.default_rng(1)
    index, model = IdIndex(), {}
    for _ in range(60):
        ids = np.unique(random.integers(0, highest, random.integers(0, 300)))
        random.shuffle(ids)
        places = index.find(ids)
        assert places.tolist() == [model.get(int(each), -1) for each in ids]

        new = ids[places < 0]
        model |= zip(new.tolist(), index.insert(new).tolist(), strict=True)

        if random.random() < 0.3:
            gone = random.permutation(len(index))[: random.integers(0, len(index) + 1)]
            taken, before = index.remove(gone)
            moves = dict(zip(before.tolist(), taken.tolist(), strict=True))
            model = {each: moves.get(place, place) for each, place in model.items() if place not in set(gone.tolist())}
        assert sorted(model.values()) == list(range(len(index)))
        assert {int(each): place for place, each in enumerate(index.ids)} == model


def test_ids_of_one_bucket_are_all_found():
    index = IdIndex()
    every = np.arange(1 << 20)
    starts = index._starts(every)
    same = every[starts == starts[0]]
    assert len(same) > 300
    assert index.insert(same).tolist() == list(range(len(same)))
    assert index.find(same).tolist() == list(range(len(same)))
    index.remove(np.arange(0, len(same), 2))
    assert (index.find(same[::2]) == -1).all()
    assert sorted(index.find(same[1::2]).tolist()) == list(range(len(same) // 2))


@pytest.mark.parametrize("then", ["ids that are not their places", "some are removed"])
def test_ids_that_are_their_own_places_are_found_before_and_after_others_come_or_some_go(then):
    index = IdIndex()
    for first, end in ((0, 3), (3, 5_000)):
        assert index.insert(np.arange(first, end)).tolist() == list(range(first, end))
    asked = np.array([4_999, 0, 5_000, 2**63 - 1, 7])
    assert index.find(asked).tolist() == [4_999, 0, -1, -1, 7]
    found = index.find(asked[:2])
    found[:] = 0  # it is the caller's own
    assert asked[0] == 4_999
    if then == "some are removed":
        index.remove(np.array([7, 4_999]))
        assert index.find(asked).tolist() == [-1, 0, -1, -1, -1]
        assert index.find(np.array([4_998])).tolist() == [7]
        assert index.insert(np.array([4_999])).tolist() == [4_998]
    else:
        assert index.insert(np.array([2**40, 5_000])).tolist() == [5_000, 5_001]
        assert index.find(asked).tolist() == [4_999, 0, 5_001, -1, 7]
    assert (index.find(index.ids) == np.arange(len(index))).all()


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


def test_a_push_updates_the_right_rows_after_others_were_removed():
    rows = table()
    rows.lookup(ids_of(1, 2, 3), create=True)
    rows.lookup(ids_of(2, 3), create=True)
    assert rows.knows(ids_of(2, 3))
    rows.evict(rows.places(ids_of(1)))  # row 3 moves into its place
    assert not rows.knows(ids_of(2, 3))
    change = rows.prepare(ids_of(2, 3), np.ones((2, 1), np.float32))
    assert change.rows[:, 0].tolist() == [2, 3]
