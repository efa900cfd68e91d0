"""Where the parameter servers of a job are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from elasticcb.sharding.partition import ShardMap


class ServerPlace(NamedTuple):
    """Address of a server, and the id that the master gave to its process."""

    address: str
    id: int


class Places(NamedTuple):
    """The server processes, by index, and which embedding rows they hold."""

    servers: Sequence[ServerPlace]
    shard_map: ShardMap
