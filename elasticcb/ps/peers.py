"""How the first parameter server passes a synchronous update on to the others."""

from __future__ import annotations

from collections.abc import Sequence

import grpc

from elasticcb.proto import elasticcb_pb2 as pb
from elasticcb.ps.update_policy import PushName
from elasticcb.rpc import Connection
from elasticcb.tensors import Frame

SERVICE = "elasticcb.ParameterServer"


class Peers:
    """The other servers.

    Args:
        addresses: "host:port" of servers 1, 2, …; empty where nothing is passed on.
    """

    def __init__(self, addresses: Sequence[str]) -> None:
        self._connections = [
            Connection(address, f"parameter server {index}") for index, address in enumerate(addresses, 1)
        ]
        self._calls = [connection.frame_call(SERVICE, "Apply", pb.ApplyResponse) for connection in self._connections]

    def apply(self, pushes: Sequence[PushName], version: int, learning_rate: float | None) -> None:
        """Lets all others apply the mean of `pushes`, which takes the model to `version`.

        Raises `ConnectionLostError` when one is out of reach, `ElasticCBError` when one refuses.
        """
        requests = [
            Frame(
                pb.ApplyRequest(
                    pushes=[pb.PushName(worker_id=name.worker, sequence=name.sequence) for name in pushes],
                    version=version,
                    learning_rate=learning_rate or 0.0,
                    has_learning_rate=learning_rate is not None,
                ),
                {},
            )
            for _ in self._connections
        ]
        started = [
            connection.start_call(call, request)
            for connection, call, request in zip(self._connections, self._calls, requests, strict=True)
        ]
        for connection, call, request, future in zip(self._connections, self._calls, requests, started, strict=True):
            try:
                future.result()
            except grpc.RpcError:
                # Once more, with patience and errors in words; a server that has applied it says so.
                connection.call(call, request)

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
