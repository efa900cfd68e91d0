"""Counts of several parts of a table make what one count of the whole would."""

from __future__ import annotations

import numpy as np
import pytest

from elasticcb.errors import WireError
from elasticcb.proto import elasticcb_pb2 as pb
from elasticcb.sharding.table_counts import QUANTILES, Spread, TableCounts, Top

generator = np.random.default_rng(0)
MANY = {
    "small": generator.zipf(1.5, 10_001) % 200,
    "skewed": np.minimum(generator.zipf(1.2, 10_001), 10**15).astype(np.int64),
    "large": generator.integers(0, 2**63 - 1, 1_000),
    "powers": np.array([2**power + more for power in range(62) for more in (-1, 0, 1)]),
    "zeros": np.zeros(7, np.int64),
    "one": np.array([2**63 - 1]),
}


def spread_of(numbers):
    spread = Spread()
    spread.count(np.asarray(numbers, np.int64))
    return spread


@pytest.mark.parametrize("name", MANY)
def test_quantiles_of_parts_that_are_added_up_are_less_than_one_percent_too_small(name):
    numbers = np.asarray(MANY[name], np.int64)
    whole = Spread()
    for part in np.array_split(numbers, 4):
        whole.add(Spread.from_message(spread_of(part).to_message()))
    found, exact = whole.quantiles(), np.sort(numbers)[[round(q * (len(numbers) - 1)) for q in QUANTILES]].tolist()
    assert (found[0], found[-1]) == (exact[0], exact[-1])
    for own, expected in zip(found, exact, strict=True):
        assert 0.99 * expected <= own <= expected
        if expected < 256:
            assert own == expected
    assert len(whole) == len(numbers)
    if name not in ("large", "powers"):  # whose sum no int64 holds
        assert whole.sum == sum(numbers.tolist())


def test_nothing_has_no_quantiles_and_does_not_change_others():
    spread = spread_of([3, 5])
    spread.add(Spread())
    assert (Spread().quantiles(), spread.least, spread.most) == ((), 3, 5)


def test_top_of_all_pieces_is_that_of_the_whole_and_of_equal_ids_the_smaller_comes_first():
    ids, hits = generator.permutation(5_000), generator.integers(0, 40, 5_000)
    top = Top(30)
    for part in np.array_split(np.arange(5_000), 13):
        top.show(ids[part], hits[part])
    expected = sorted(zip((-hits).tolist(), ids.tolist(), strict=True))[:30]
    assert list(zip((-top.hits).tolist(), top.ids.tolist(), strict=True)) == expected
    none = Top(0)
    none.show(ids, hits)
    assert len(none.ids) == 0


def test_counts_arrive_as_they_were():
    lately = {"seconds": 1.5, "made_lately": 6, "removed_lately": 7}
    counts = TableCounts(Top(2), 3, 48, 96, ("m", "v"), bytes=500, waiting=4, removed=5, **lately)
    counts.count(np.array([1, 2, 3]), np.array([7, 9, 8]), np.array([90, 101, 50]), version=100)
    message = pb.TableCounts.FromString(counts.to_message(4).SerializeToString())
    assert message.variable == 4
    arrived = TableCounts.from_message(message)
    assert arrived.top.ids.tolist() == [2, 3]
    assert arrived.ages.quantiles() == counts.ages.quantiles()
    assert (arrived.ages.least, arrived.ages.most, arrived.hits.sum) == (0, 50, 24)
    plain = ("rows", "row_bytes", "slot_bytes", "slots", "bytes", "waiting", "removed", *lately)
    assert [getattr(arrived, name) for name in plain] == [getattr(counts, name) for name in plain]


@pytest.mark.parametrize(
    "spread", [{"ranges": [-1], "counts": [1]}, {"ranges": [10**6], "counts": [1]}, {"ranges": [1]}]
)
def test_ranges_that_there_are_not_are_refused(spread):
    with pytest.raises(WireError, match="same release"):
        Spread.from_message(pb.Spread(**spread))
