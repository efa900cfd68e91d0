"""Forwards decisions of the first parameter server to the others, in synchronous mode."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from elasticcb.errors import ConnectionLostError
from elasticcb.rpc.connection import Connection
from elasticcb.rpc.services import PS_METHODS
from elasticcb.rpc.tensors import Frame
from elasticcb.security.credentials import OPEN, Access

# An update may need compiling first; a dead machine is detected by gRPC's keepalive.
_DEADLINE_SECONDS = 600.0


class Peers:
    """The other servers.

    Args:
        addresses: "host:port" of servers 1, 2, …; empty if nothing is forwarded.
    """

    def __init__(self, addresses: Sequence[str], access: Access = OPEN, patience_seconds: float = 30.0) -> None:
        self._connections = [
            Connection(address, f"parameter server {index}", patience_seconds, access)
            for index, address in enumerate(addresses, 1)
        ]
        self._threads = ThreadPoolExecutor(len(addresses) or 1, thread_name_prefix="peers")

    def __bool__(self) -> bool:
        return bool(self._connections)

    def call(self, method: str, request: Any) -> None:
        """Makes the same call to all others in parallel, and returns when all have answered.

        Raises `ConnectionLostError` when one is unreachable, `ElasticCBError` when one refuses.
        """
        if not self._connections:
            return
        called = PS_METHODS[method]

        def call(connection: Connection) -> None:
            header = type(request).FromString(request.SerializeToString())  # a copy, because encoding modifies it
            connection.call(called, Frame(header, {}), _DEADLINE_SECONDS)

        try:
            answers = [self._threads.submit(call, each) for each in self._connections]
        except RuntimeError as closed:  # after `close`
            raise ConnectionLostError("The connections to the other parameter servers were closed.") from closed
        for error in filter(None, [answer.exception() for answer in answers]):
            raise error

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
        self._threads.shutdown(wait=False)
