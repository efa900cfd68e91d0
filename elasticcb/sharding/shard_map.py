"""Maps rows of embedding tables to parameter servers, by a hash of their ids."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from elasticcb.rpc.tensors import Array

# Multiplicative hashing (Knuth, TAOCP 3, 6.4), by 2^64 divided by the plastic number: consecutive ids spread evenly.
# Not the golden ratio, which is the hash of a table's index: the ids of one server would cluster there.
_MULTIPLIER = np.uint64(0xC13FA9A902A6328F)
_HALF = np.uint64(32)


@dataclass(frozen=True)
class ShardMap:
    """Which of a number of servers has which rows.

    Attributes:
        version: increases when the number of servers of a job changes.
    """

    servers: int
    version: int = 0

    def server_of(self, ids: Array) -> Array:
        """Which server holds the rows of `ids` (int64 [n]): int64 [n]."""
        hashed = ids.view(np.uint64) * _MULTIPLIER
        hashed >>= _HALF
        hashed *= np.uint64(self.servers)  # in place of a division (Lemire, Fast random integer generation, 2019)
        hashed >>= _HALF
        servers: Array = hashed.view(np.int64)
        return servers

    def owns(self, server: int, ids: Array) -> Array:
        """Which of `ids` (int64 [n]) are a server's: bool [n]."""
        return self.server_of(ids) == server

    def resized(self, servers: int) -> ShardMap:
        """The next map, for another number of servers."""
        return ShardMap(servers, self.version + 1)
