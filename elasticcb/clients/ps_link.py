"""The connection to one parameter server."""

from __future__ import annotations

import secrets
from typing import Any

from elasticcb.process.interruptible import in_other_thread
from elasticcb.rpc.connection import Connection
from elasticcb.rpc.services import PS_METHODS
from elasticcb.rpc.tensors import Frame
from elasticcb.security.credentials import Access

# A server's first update may take minutes to compile, and other calls wait for it. A dead machine is detected by gRPC's
# keepalive.
_DEADLINE_SECONDS = 600.0


class Link:
    """The connection to one process that is a server."""

    def __init__(self, index: int, address: str, id: int, patience_seconds: float, access: Access) -> None:
        self.address, self.id = address, id
        self._connection = Connection(address, f"parameter server {index}", patience_seconds, access)

    def call(
        self,
        method: str,
        frame: Frame[Any],
        patience_seconds: float | None = None,
        deadline_seconds: float = _DEADLINE_SECONDS,
    ) -> Frame[Any]:
        """The server's answer. A frame that is sent again after an error is the same call, which is executed once."""
        called = PS_METHODS[method]
        if called.is_numbered and not frame.header.call:
            frame.header.call = secrets.randbits(62) + 1
        return in_other_thread(self._connection.call, called, frame, deadline_seconds, patience_seconds)

    def free_memory(self) -> None:
        self._connection.free_memory()

    def close(self) -> None:
        self._connection.close()
