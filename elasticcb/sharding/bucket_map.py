"""Maps rows of embedding tables to parameter servers.

Ids are hashed into a fixed number of buckets; a map assigns buckets to servers. So the number of servers can change by
moving only some buckets: the fixed partitions of Dynamo (DeCandia et al., 2007, strategy 3), or the hash slots of Redis
Cluster. A ring with a hash per server (consistent hashing) would move as little, but balance servers less well, and
finding an id's server would need a search.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from elasticcb.errors import WireError
from elasticcb.rpc.tensors import Array

BUCKETS = 1024  # a power of two; a job's map takes 2 KiB
# Multiplicative hashing (Knuth, TAOCP 3, 6.4), by 2^64 divided by the plastic number: consecutive ids spread evenly.
# Not the golden ratio, which is the hash of a table's index: the ids of one server would cluster there.
_MULTIPLIER = np.uint64(0xC13FA9A902A6328F)
_SHIFT = np.uint64(64 - (BUCKETS - 1).bit_length())


def bucket_of(ids: Array) -> Array:
    """The bucket of each of `ids` (int64 [n]): int64 [n]."""
    hashed = ids.view(np.uint64) * _MULTIPLIER
    hashed >>= _SHIFT
    buckets: Array = hashed.view(np.int64)
    return buckets


@dataclass(frozen=True, eq=False)
class BucketMap:
    """Assigns buckets to servers.

    Attributes:
        owners: by bucket, the index of its server: uint16 [BUCKETS].
        version: increases with each map of a job.
    """

    servers: int
    owners: Array
    version: int = 0

    def server_of(self, ids: Array) -> Array:
        """Which server holds the rows of `ids` (int64 [n]): uint16 [n]."""
        owners: Array = self.owners.take(bucket_of(ids), mode="wrap")
        return owners

    def owns(self, server: int, ids: Array) -> Array:
        """Which of `ids` (int64 [n]) are a server's: bool [n]."""
        return self.server_of(ids) == server

    def resized(self, servers: int) -> BucketMap:
        """The next map, for another number of servers, at least 1. It is balanced within one bucket, and moves as few
        buckets as possible for that."""
        counts = np.bincount(self.owners, minlength=servers)
        # If shares differ, the servers that have most now get the larger shares.
        share = np.full(servers, BUCKETS // servers)
        share[np.argsort(-counts[:servers], kind="stable")[: BUCKETS % servers]] += 1
        owners, free = self.owners.copy(), []
        for server, count in enumerate(counts):
            kept = share[server] if server < servers else 0
            if count > kept:
                free.append(np.flatnonzero(self.owners == server)[kept:])
        missing = np.maximum(share - counts[:servers], 0)
        if free:
            owners[np.sort(np.concatenate(free))] = np.repeat(np.arange(servers), missing)
        return BucketMap(servers, owners, self.version + 1)

    def moved(self, other: BucketMap) -> int:
        """Number of buckets with another server in `other`."""
        return int(np.count_nonzero(self.owners != other.owners))

    def to_bytes(self) -> bytes:
        """The owners in wire format: uint16, little endian."""
        return self.owners.astype("<u2").tobytes()

    @classmethod
    def from_bytes(cls, servers: int, owners: bytes, version: int) -> BucketMap:
        """The inverse of `to_bytes`; no bytes mean the even map. Raises `WireError` for an invalid map."""
        if not owners:
            return cls(servers, even(servers).owners, version)
        found = np.frombuffer(owners, "<u2").astype(np.uint16) if len(owners) == 2 * BUCKETS else None
        if found is None or int(found.max()) >= servers:
            raise WireError(
                f"A map of buckets has {len(owners)} bytes"
                f"{'' if found is None else f', and has server {found.max()} of {servers}'}; expected "
                f"{2 * BUCKETS}: for each of {BUCKETS} buckets its server, as uint16."
            )
        return cls(servers, found, version)


def even(servers: int) -> BucketMap:
    """The initial map of a job: balanced within one bucket."""
    return BucketMap(servers, (np.arange(BUCKETS) % servers).astype(np.uint16))
