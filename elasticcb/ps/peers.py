"""How the first parameter server speaks for all in synchronous mode: what it decides, it passes on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grpc

from elasticcb.proto import elasticcb_pb2 as pb
from elasticcb.rpc.calls import Connection
from elasticcb.rpc.tensors import Frame
from elasticcb.security.credentials import OPEN, Access

SERVICE = "elasticcb.ParameterServer"

_RESPONSES = {
    "Apply": pb.ApplyResponse,
    "Snapshot": pb.SnapshotResponse,
    "Save": pb.SaveResponse,
    "Export": pb.ExportResponse,
    "LoadState": pb.LoadStateResponse,
}
# An update may have to be compiled first; that a machine is gone is found out by gRPC's keepalive.
_DEADLINE_SECONDS = 600.0


class Peers:
    """The other servers.

    Args:
        addresses: "host:port" of servers 1, 2, …; empty where nothing is passed on.
        access: to the job.
    """

    def __init__(self, addresses: Sequence[str], access: Access = OPEN, patience_seconds: float = 30.0) -> None:
        self._connections = [
            Connection(address, f"parameter server {index}", patience_seconds, access)
            for index, address in enumerate(addresses, 1)
        ]

    def __bool__(self) -> bool:
        return bool(self._connections)

    def call(self, method: str, request: Any) -> None:
        """Makes the same call to all others at once, and returns when all have answered.

        Raises `ConnectionLostError` when one is out of reach, `ElasticCBError` when one refuses.
        """
        frame = Frame(request, {})
        calls = [connection.frame_sender(SERVICE, method, _RESPONSES[method]) for connection in self._connections]
        started = [
            call.future(frame, timeout=_DEADLINE_SECONDS, metadata=connection.metadata)
            for connection, call in zip(self._connections, calls, strict=True)
        ]
        for connection, call, future in zip(self._connections, calls, started, strict=True):
            try:
                future.result()
            except grpc.RpcError as error:
                connection.raise_unless_transient(error)
                # Once more, with patience and errors in words; a server that has done it says so.
                connection.call(call, frame, _DEADLINE_SECONDS)

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
