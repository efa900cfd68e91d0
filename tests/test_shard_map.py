from __future__ import annotations

import numpy as np
import pytest

from elasticcb.sharding.partition import ShardMap


@pytest.mark.parametrize("servers", [1, 3, 256])
@pytest.mark.parametrize("stride", [1, 2, 7, 1000, 1024, 2**20])
def test_ids_of_any_stride_are_spread_over_the_servers(stride, servers):
    ids = np.arange(10_000 * servers, dtype=np.int64) * stride - 77
    counts = np.bincount(ShardMap(servers).server_of(ids), minlength=servers)
    assert len(counts) == servers
    assert counts.min() > 9_000


def test_the_server_of_an_id_never_changes():
    # Files of checkpoints and recovery files depend on it.
    ids = np.array([0, 1, 2, 3, 12_345, 2**40, 2**62, -1], np.int64)
    assert ShardMap(1000).server_of(ids).tolist() == [0, 754, 509, 264, 964, 649, 750, 245]
