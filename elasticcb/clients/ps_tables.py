"""Whole embedding tables, read from all parameter servers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from elasticcb.clients.ps_servers import ServerGroup, ServerReplacedError
from elasticcb.errors import ElasticCBError
from elasticcb.proto import elasticcb_pb2 as pb
from elasticcb.sharding.table_state import TableState, from_tensors, joined

_ROWS = 65_536  # per piece


def table_pieces(servers: ServerGroup, variable: int, rows: int = _ROWS, export_id: int = 0) -> Iterator[TableState]:
    """All rows of an embedding table with their ids, in pieces; it must not be trained meanwhile.

    With `export_id`, everything that the servers hold for that export; it may then be trained meanwhile.

    Raises `ServerReplacedError` when a server is replaced meanwhile, because its rows then have other positions.
    """
    for server in servers.known:
        link, start, total = server.link, 0, 1
        while start < total:
            request = pb.ReadTableRequest(variable=variable, start=start, count=rows, export_id=export_id)
            try:
                answer = servers.call(server, "ReadTable", request)
            except ElasticCBError:
                if server.link is link:
                    raise
            if server.link is not link:
                raise ServerReplacedError(
                    f"Parameter server {server.index} was replaced while the embedding table "
                    f"{servers.specs[variable].path!r} was being read. Read it again."
                )
            piece = from_tensors(answer.tensors)[variable]
            yield piece
            start, total = start + len(piece.ids), answer.header.total


def whole_table(servers: ServerGroup, variable: int) -> TableState:
    """The whole table at once; read again when a server is replaced."""
    while True:
        with contextlib.suppress(ServerReplacedError):
            return joined(list(table_pieces(servers, variable)))
