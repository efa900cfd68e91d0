from __future__ import annotations

import numpy as np
import pytest

from elasticcb.ps.id_index import IdIndex

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


def test_no_ids_are_no_trouble():
    index, none = IdIndex(), np.empty(0, np.int64)
    assert index.find(none).shape == index.insert(none).shape == (0,)
    assert [part.tolist() for part in index.remove(none)] == [[], []]


def test_ids_of_a_read_only_array_are_found():
    index = IdIndex()
    ids = np.frombuffer(np.arange(9).tobytes(), np.int64)
    index.insert(ids)
    assert index.find(ids).tolist() == list(range(9))


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
