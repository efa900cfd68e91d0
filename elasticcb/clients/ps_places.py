"""Where the parameter servers of a job are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from elasticcb.sharding.bucket_map import BucketMap


class ServerPlace(NamedTuple):
    """Where the server in a place is, and which process that is."""

    address: str
    id: int


class Places(NamedTuple):
    """Which processes are the servers, by index, and which rows of embedding tables they hold."""

    servers: Sequence[ServerPlace]
    buckets: BucketMap
