"""Connections to servers, with deadlines and retries."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import random
import threading
import time
from typing import Any

import grpc

from elasticcb.errors import ConnectionLostError, TLSError
from elasticcb.rpc.admission import PROTOCOL, PROTOCOL_KEY, TERM_KEY, TOKEN_KEY
from elasticcb.rpc.call_errors import raise_unless_transient
from elasticcb.rpc.services import Method
from elasticcb.rpc.shared_frames import ClientMemory
from elasticcb.rpc.stream import ClientStream
from elasticcb.rpc.transport import GrpcTransport, LinkedTransport, Metadata
from elasticcb.security import tls
from elasticcb.security.credentials import OPEN, Access
from elasticcb.security.socket_folder import host_of

logger = logging.getLogger(__name__)

_ATTACH_SECONDS = 10.0
_ALIVE_SECONDS = 30.0  # for a server to answer the check

# Not the random module's own generator, whose seed belongs to the user's model.
_jitter = random.Random()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_jitter.seed)


class Connection:
    """A connection to one server; calls have deadlines and are repeated on transient failures.

    Calls made without `call` must carry `metadata`.

    Args:
        name: name of the server in messages: "the master", "parameter server 1".
        patience_seconds: how long to retry before `ConnectionLostError`.
    """

    def __init__(self, address: str, name: str, patience_seconds: float = 30.0, access: Access = OPEN) -> None:
        self.address = address
        self._name = name
        self._patience = patience_seconds
        self.metadata: Metadata = ((PROTOCOL_KEY, str(PROTOCOL)),)
        if access.token:
            self.metadata += ((TOKEN_KEY, access.token),)
        if access.term is not None:
            self.metadata += ((TERM_KEY, "{}:{}".format(*access.term)),)
        self._tls = access.tls
        self._answered = False  # whether the server has ever answered
        self._closed = False
        self._grpc = GrpcTransport(address, access.tls)
        self._linked: LinkedTransport | None = None  # created at first use
        self._making = threading.Lock()

    @property
    def channel(self) -> grpc.Channel:
        """The current channel to the server."""
        return self._grpc.channel

    def transport_of(self, method: Method) -> GrpcTransport | LinkedTransport:
        """The transport for the messages of a method."""
        if not method.shared:
            return self._grpc
        attach = functools.partial(self._attach, method.attach_path)
        is_alive = functools.partial(self.is_alive, method, _ALIVE_SECONDS)
        with self._making:
            if self._linked is None:
                self._linked = LinkedTransport(self._grpc, ClientMemory(attach, is_alive))
            side = self._linked.side
            if isinstance(side, ClientMemory) and not side.usable and not host_of(self.address):
                host = self.address.rpartition(":")[0]
                self._linked = LinkedTransport(self._grpc, ClientStream(host, self._tls, attach, is_alive))
            return self._linked

    def _attach(self, path: str, message: bytes) -> bytes:
        try:
            answer: bytes = self._grpc.raw(path)(message, timeout=_ATTACH_SECONDS, metadata=self.metadata)
            return answer
        except grpc.RpcError as error:
            raise_unless_transient(error, self._server)
            raise ConnectionLostError(f"{self._server} does not answer.") from None

    def is_alive(self, method: Method, seconds: float) -> bool:
        """Whether the server of a method's service answers within `seconds`."""
        with contextlib.suppress(grpc.RpcError):
            self._grpc.raw(method.attach_path)(b"", timeout=seconds, metadata=self.metadata)
            return True
        return False

    @property
    def _server(self) -> str:
        return f"{self._name} at {self.address}"

    def call(
        self,
        method: Method,
        request: Any,
        deadline_seconds: float = 60.0,
        patience_seconds: float | None = None,
    ) -> Any:
        """Calls `method` until it answers.

        Raises:
            ConnectionLostError: the server was unreachable for longer than the patience.
            TLSError: it and this process can't agree on TLS.
            WireError: the server refused the message.
            HandlerError: the server has a bug.
            ElasticCBError: the server could not do what was requested; class, message and traceback are the server's.
        """
        transport = self.transport_of(method)
        patience = self._patience if patience_seconds is None else patience_seconds
        begun = time.monotonic()
        pause = 0.05
        while True:
            try:
                answer = transport.call(method, request, deadline_seconds, self.metadata)
                self._answered = True
                return answer
            except ValueError as error:  # gRPC's error for a closed channel
                if not self._closed:
                    raise
                raise ConnectionLostError(f"The connection to {self._server} was closed.") from error
            except grpc.RpcError as error:
                raise_unless_transient(error, self._server)
                self._raise_if_tls_is_why(error)
                code, details = error.code().name, error.details() or "no details"
                waited = time.monotonic() - begun
                if waited + pause > patience:
                    raise ConnectionLostError(
                        f"{self._server} has not answered for {waited:.0f} s ({code}: {details})."
                    ) from None
                logger.debug("%s: %s, trying again", self._server, code)
                time.sleep(pause * _jitter.uniform(0.5, 1.0))
                pause = min(2 * pause, 1.0)

    def _raise_if_tls_is_why(self, error: Any) -> None:
        if error.code() is grpc.StatusCode.UNAVAILABLE and not self._answered:
            reason = tls.diagnose(self.address, self._tls)
            if reason:
                raise TLSError(f"No connection to {self._server}: {reason}.") from None

    def free_memory(self) -> None:
        """Frees frame buffers, after large frames."""
        if self._linked is not None:
            self._linked.side.shrink()

    def close(self) -> None:
        """Aborts running calls, also in other threads: they raise `ConnectionLostError`."""
        self._closed = True
        self._grpc.close()
        if self._linked is not None:
            self._linked.side.close()
