from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticcb.errors import WireError
from elasticcb.sharding.bucket_map import BUCKETS, BucketMap, bucket_of, even

sizes = st.integers(1, 40)


@settings(max_examples=200)
@given(st.lists(sizes, min_size=1, max_size=6))
def test_servers_stay_level_and_no_map_that_is_level_moves_fewer_buckets(steps):
    buckets = even(steps[0])
    for servers in steps[1:]:
        following = buckets.resized(servers)
        counts = np.bincount(following.owners, minlength=servers)
        assert len(counts) == servers
        assert counts.sum() == BUCKETS
        assert counts.max() - counts.min() <= 1
        # What each server can keep at most, with shares as level as they can be.
        before = np.bincount(buckets.owners, minlength=servers)[:servers]
        least, larger = divmod(BUCKETS, servers)
        kept = np.minimum(before, least).sum() + min(larger, np.count_nonzero(before > least))
        assert buckets.moved(following) == BUCKETS - kept
        assert following.version == buckets.version + 1
        buckets = following


@given(sizes)
def test_the_same_number_of_servers_moves_nothing(servers):
    buckets = even(servers)
    assert buckets.moved(buckets.resized(servers)) == 0


def test_more_servers_than_buckets_leave_some_without_any():
    buckets = even(1).resized(BUCKETS + 3)
    assert sorted(np.bincount(buckets.owners, minlength=BUCKETS + 3)) == [0, 0, 0] + [1] * BUCKETS


@pytest.mark.parametrize("stride", [1, 2, 7, 1000, 1024, 2**20])
def test_ids_of_any_stride_are_spread_over_the_servers(stride):
    ids = np.arange(30_000, dtype=np.int64) * stride
    counts = np.bincount(even(3).server_of(ids), minlength=3)
    assert counts.min() > 9_000


def test_the_bucket_of_an_id_never_changes():
    # Checkpoints and recovery files name buckets.
    ids = np.array([0, 1, 2, 3, 12_345, 2**40, 2**62], np.int64)
    assert bucket_of(ids).tolist() == [0, 772, 521, 270, 987, 664, 768]


@given(sizes, sizes)
def test_a_map_travels(first, second):
    buckets = even(first).resized(second)
    back = BucketMap.from_bytes(second, buckets.to_bytes(), 7)
    assert back.owners.tolist() == buckets.owners.tolist()
    assert (back.version, back.servers) == (7, second)


@pytest.mark.parametrize(("servers", "owners"), [(2, b"abc"), (2, even(3).to_bytes())])
def test_what_is_no_map_is_refused_in_words(servers, owners):
    with pytest.raises(WireError, match=r"A map of buckets has .* expected 2048"):
        BucketMap.from_bytes(servers, owners, 1)
