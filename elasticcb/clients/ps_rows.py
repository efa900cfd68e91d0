"""Rows of embedding tables, requested from the servers that hold them and reassembled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from elasticcb.clients.ps_servers import ServerGroup
from elasticcb.rpc.tensors import Array
from elasticcb.sharding.array_names import WANTED, named

Ids = Mapping[int, Array]  # by embedding table, unique int64 [n]


class WantedRows:
    """The rows of `ids`, by server."""

    def __init__(self, ids: Ids, servers: ServerGroup) -> None:
        self._ids, self._servers = ids, servers.known
        # By server and table, the positions of the server's ids among all ids.
        self._places: list[dict[int, Any]] = [{} for _ in self._servers]
        for table, own in ids.items():
            owners = servers.shard_map.server_of(own) if len(self._servers) > 1 else None
            for index, places in enumerate(self._places):
                places[table] = slice(None) if owners is None else np.flatnonzero(owners == index)

    def of_server(self, index: int) -> dict[str, Array]:
        """The arrays of its request."""
        return named(WANTED, {table: own[self._places[index][table]] for table, own in self._ids.items()})

    def found(self) -> dict[int, Array]:
        """The rows of the last exchange, in the order of the ids."""
        if len(self._servers) == 1:
            return {table: self._servers[0].rows[table] for table in self._ids}
        found: dict[int, Array] = {}
        for table, own in self._ids.items():
            first = self._servers[0].rows[table]
            rows = found[table] = np.empty((len(own), *first.shape[1:]), first.dtype)
            for server, places in zip(self._servers, self._places, strict=True):
                rows[places[table]] = server.rows[table]
        return found
