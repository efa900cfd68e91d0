"""gRPC as this project uses it: servers on free ports, clients with deadlines and retries, frames."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import random
import time
from collections.abc import Callable, Collection
from typing import Any

import grpc
import numpy as np

from elasticcb import errors
from elasticcb.errors import ConnectionLostError, ElasticCBError, TLSError, WireError
from elasticcb.proto import elasticcb_pb2 as pb
from elasticcb.rpc import frame_pieces
from elasticcb.rpc.admission import (
    BUSY_KEY,
    PROTOCOL,
    PROTOCOL_KEY,
    TOKEN_KEY,
    CallThreads,
    Gate,
    Refusal,
    RefusedCalls,
)
from elasticcb.rpc.frame_pieces import PIECES_MISSING, Pieces, UnknownPiecesError, bytes_of, in_pieces
from elasticcb.rpc.shared_frames import ClientMemory, ServerMemory, UnknownSegmentError
from elasticcb.rpc.tensors import Frame, InPieces, encode_frame, frame_decoder, has_arrays
from elasticcb.rpc.unix_socket import CallError, ServerLinks
from elasticcb.security import tls
from elasticcb.security.credentials import OPEN, Access

logger = logging.getLogger(__name__)

_LONGEST_ERROR = 10_000  # characters; one may take 12 bytes in the header that carries the text

# Weights travel in messages of many MB; gRPC's own limit of 4 MB would refuse them.
_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_send_message_length", -1),
    # An error's text is metadata, of which gRPC takes 8 KB.
    ("grpc.max_metadata_size", 256 << 10),
    ("grpc.absolute_max_metadata_size", 512 << 10),
    ("grpc.so_reuseport", 0),
    # Long polls are quiet for seconds; a dead machine must be noticed all the same.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
    # A server that was killed may be back at the same address soon.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
]

# A call that failed with one of these may be sent again: it did not reach the handler, or the handler
# recognizes a repeated call.
_TRANSIENT = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}


# With these codes the server itself ends a call.
_ANSWERS = {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION, PIECES_MISSING}

_CONTROL_THREADS = 8  # for calls that wait for nothing

_ATTACH = "Attach"  # method of every service of frames, by which a client shows its shared memory
_PIECE = "Piece"  # another, by which arrays go that are too large for their frames
_ATTACH_SECONDS = 10.0
_ALIVE_SECONDS = 30.0  # for a server to say that it is alive

# By which an error that a handler raises is the same error at the caller's: its class, and the user's traceback.
ERROR_KEY, _TRACEBACK_KEY = "elasticcb-error", "elasticcb-traceback-bin"
_ERRORS = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, ElasticCBError) and kind is not WireError
}

# Not the module's own generator, whose seed belongs to the user's model.
_jitter = random.Random()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_jitter.seed)


class Server:
    """A gRPC server on a free port. It answers calls that carry its `PROTOCOL`.

    Args:
        host: interface to listen on.
        port: 0 takes any free one.
        threads: how many calls it answers at once; a long poll takes one all the while. Calls that wait for nothing
            have others.
        access: what a call must carry to be answered, and by which the server shows itself.
        largest_message: bytes of a message, above which it is refused; -1: what gRPC can carry.

    Attributes:
        refused: counts the calls that it refuses.

    Raises `ConnectionLostError` when the port is taken.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        threads: int = 16,
        access: Access = OPEN,
        largest_message: int = -1,
    ) -> None:
        self._pool = CallThreads(threads)
        self.refused = RefusedCalls()
        self._control_pool = CallThreads(_CONTROL_THREADS)
        self._control: set[str] = set()  # methods that it answers: "/SERVICE/METHOD"
        gate = Gate(access.token, self._pool, self.refused, self._control_pool, self._control)
        options = [*_OPTIONS, _largest(largest_message)]
        self.grpc_server = grpc.server(self._pool, interceptors=[gate], options=options)
        try:
            if access.tls is None:
                self.port = self.grpc_server.add_insecure_port(f"{host}:{port}")
            else:
                own = [(access.tls.key, access.tls.cert)]
                credentials = grpc.ssl_server_credentials(own, access.tls.ca, require_client_auth=True)
                self.port = self.grpc_server.add_secure_port(f"{host}:{port}", credentials)
        except RuntimeError as error:
            raise ConnectionLostError(
                f"Can't listen on {host}:{port}: another process holds the port, or {host} is no address of this "
                "machine. Choose another port, or 0 for any that is free."
            ) from error
        self.address = f"{host}:{self.port}"
        self._frame_services: list[FrameService] = []

    def add(self, service: FrameService) -> None:
        """Serves it from `start` until `stop`."""
        service.refused = self.refused
        self._control.update(service.control)
        self.grpc_server.add_generic_rpc_handlers((service,))
        self._frame_services.append(service)

    def start(self) -> None:
        self.grpc_server.start()

    def stop(self, grace_seconds: float = 1.0) -> None:
        """Ends calls under way after `grace_seconds`, then returns."""
        stopped = self.grpc_server.stop(grace_seconds)
        for service in self._frame_services:
            service.stop(grace_seconds)
        stopped.wait(grace_seconds + 5.0)
        for pool in (self._pool, self._control_pool):
            pool.shutdown(wait=False, cancel_futures=True)


class FrameService(grpc.GenericRpcHandler):
    """A service whose messages are frames, by gRPC and by the links of clients on this machine.

    Args:
        service: the service's full name, "elasticcb.ParameterServer".
        methods: by method name, the request's header type and a function from the request frame to
            the response frame. An `ElasticCBError` that it raises is raised at the caller's.
        transient: methods that keep no array of a request beyond the call, so that none has to be copied out of
            shared memory.
        control: methods that wait for nothing. However many others run, they are answered, and so is `Attach`.
    """

    def __init__(
        self,
        service: str,
        methods: dict[str, tuple[type, Callable[..., Frame[Any]]]],
        transient: Collection[str] = (),
        control: Collection[str] = (),
    ) -> None:
        self.control = [f"/{service}/{name}" for name in (*control, _ATTACH, _PIECE)]
        self._pieces = Pieces()
        self._methods = {**methods, _PIECE: (pb.PieceRequest, self._pieces.answer)}
        self._transient = {*transient, _PIECE}
        self.refused = RefusedCalls()  # the server's, once it has the service
        self._links = ServerLinks(self._answer_link)
        self._memory = ServerMemory(self._links)
        handlers = {name: self._handler(name) for name in [*self._methods, _ATTACH]}
        self._handlers = grpc.method_handlers_generic_handler(service, handlers)

    def service(self, handler_call_details: Any) -> Any:
        return self._handlers.service(handler_call_details)

    def stop(self, grace_seconds: float) -> None:
        """Ends the links."""
        self._links.stop(grace_seconds)

    def _handler(self, name: str) -> Any:
        def answer(data: bytes, context: grpc.ServicerContext) -> bytes:
            try:
                return self._attach(data) if name == _ATTACH else self._answer(name, data)
            except CallError as error:
                context.set_trailing_metadata(error.trailing_metadata())
                context.abort(error.code(), error.details())
            raise AssertionError("abort raises")

        return grpc.unary_unary_rpc_method_handler(answer)

    def _answer_link(self, name: str, data: bytes) -> bytes:
        try:
            return self._answer(name, data)
        except CallError as error:  # else the gate would see it
            if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
                self.refused.add(Refusal.MALFORMED, "a process of this machine")
            raise

    def _answer(self, name: str, data: bytes) -> bytes:
        header_type, function = self._methods[name]
        self._pieces.forget_silent()
        try:
            frame, reply = self._memory.decode(data, header_type)
            if reply.segment is not None and name not in self._transient:
                frame = Frame(frame.header, {key: _copied(array) for key, array in frame.tensors.items()})
            response = function(self._pieces.taken(frame))
            return reply.encode(response if reply.takes(bytes_of(response)) else self._pieces.offered(response))
        except UnknownSegmentError as error:
            raise CallError(grpc.StatusCode.NOT_FOUND, str(error)) from None
        except UnknownPiecesError as error:
            raise CallError(PIECES_MISSING, str(error)) from None
        except ElasticCBError as error:
            if error.user_traceback:
                logger.error("%s\n%s", error, error.user_traceback)
            refused = isinstance(error, WireError)
            code = grpc.StatusCode.INVALID_ARGUMENT if refused else grpc.StatusCode.FAILED_PRECONDITION
            trace = error.user_traceback.encode()[-_LONGEST_ERROR:]
            metadata: dict[str, str | bytes] = {ERROR_KEY: type(error).__name__, _TRACEBACK_KEY: trace}
            raise CallError(code, str(error)[:_LONGEST_ERROR], metadata) from error

    def _attach(self, message: bytes) -> bytes:
        if not message:  # a client asks whether this server is alive
            return b""
        try:
            return self._memory.attach(message)
        except WireError as error:
            raise CallError(grpc.StatusCode.FAILED_PRECONDITION, str(error)) from None


class Connection:
    """A channel to one server, whose calls have deadlines and are repeated on transient failures.

    Calls that go around `call` have to carry `metadata`.

    Args:
        address: "host:port".
        name: what the server is, for messages: "the master", "parameter server 1".
        patience_seconds: how long to go on trying before `ConnectionLostError`.
        access: to the job.
    """

    def __init__(self, address: str, name: str, patience_seconds: float = 30.0, access: Access = OPEN) -> None:
        self.address = address
        self._name = name
        self._patience = patience_seconds
        self.metadata: tuple[tuple[str, str], ...] = ((PROTOCOL_KEY, str(PROTOCOL)),)
        if access.token:
            self.metadata += ((TOKEN_KEY, access.token),)
        self._tls = access.tls
        self.channel = _channel(address, access.tls)
        self._answered = False  # whether the server has ever answered
        self._memories: dict[str, ClientMemory] = {}  # by service

    def shared_frame_call(
        self, service: str, method: str, response_type: type, often: bool = True
    ) -> Callable[..., Frame[Any]]:
        """As `frame_call`, with the arrays in shared memory when the server is on this machine. Calls of one
        connection wait for each other.

        Args:
            often: frames of the same size travel again and again, so that memory for a large one pays.
        """
        memory = self._memory_of(service)
        send = {name: self.channel.unary_unary(f"/{service}/{name}", None, None) for name in (method, _PIECE)}

        def call_once(name: str, frame: Frame[Any], kind: type, timeout: float, metadata: Any) -> Frame[Any]:
            try:
                data = memory.encode(frame)
                if memory.link is None or has_arrays(data):
                    answer = send[name](data, timeout=timeout, metadata=metadata)
                else:
                    answer = memory.link.call(name, data, timeout)
            except BaseException as error:  # after an interrupt, too, the server may still answer into it
                if not _is_an_answer(error):
                    memory.forget()
                if not isinstance(error, grpc.RpcError) or error.code() is not grpc.StatusCode.NOT_FOUND:
                    raise
                answer = send[name](encode_frame(frame), timeout=timeout, metadata=metadata)
            return memory.decode(answer, kind)

        def call(frame: Frame[Any], timeout: float, metadata: Any = ()) -> Frame[Any]:
            def piece(frame: Frame[Any]) -> Frame[Any]:
                return call_once(_PIECE, frame, pb.PieceResponse, timeout, metadata)

            def whole(frame: Frame[Any]) -> Frame[Any]:
                return call_once(method, frame, response_type, timeout, metadata)

            with memory.lock:
                return in_pieces(frame, whole, piece, memory.takes(bytes_of(frame), often))

        return call

    def _memory_of(self, service: str) -> ClientMemory:
        if service not in self._memories:
            attach = self.channel.unary_unary(f"/{service}/{_ATTACH}", None, None)

            def show(message: bytes) -> bytes:
                try:
                    answer: bytes = attach(message, timeout=_ATTACH_SECONDS, metadata=self.metadata)
                    return answer
                except grpc.RpcError as error:
                    self.raise_unless_transient(error)
                    raise ConnectionLostError(f"{self._name} at {self.address} does not answer.") from None

            self._memories[service] = ClientMemory(show, functools.partial(self.is_alive, service, _ALIVE_SECONDS))
        return self._memories[service]

    def is_alive(self, service: str, seconds: float) -> bool:
        """Whether the server of a service of frames answers within `seconds`."""
        with contextlib.suppress(grpc.RpcError):
            self.channel.unary_unary(f"/{service}/{_ATTACH}", None, None)(b"", timeout=seconds, metadata=self.metadata)
            return True
        return False

    def frame_call(self, service: str, method: str, response_type: type) -> Any:
        """What calls a method whose messages are frames, of any size."""
        send = self.frame_sender(service, method, response_type)
        send_piece = self.frame_sender(service, _PIECE, pb.PieceResponse)

        def call(frame: Frame[Any], timeout: float | None = None, metadata: Any = ()) -> Frame[Any]:
            whole, piece = (functools.partial(each, timeout=timeout, metadata=metadata) for each in (send, send_piece))
            return in_pieces(frame, whole, piece, bytes_of(frame) <= frame_pieces.LARGEST_FRAME)

        return call

    def frame_sender(self, service: str, method: str, response_type: type) -> Any:
        """gRPC's multi-callable of a method, for frames that are small enough to go whole."""
        return self.channel.unary_unary(
            f"/{service}/{method}",
            request_serializer=encode_frame,
            response_deserializer=frame_decoder(response_type),
        )

    def call(
        self,
        method: Callable[..., Any],
        request: Any,
        deadline_seconds: float = 60.0,
        patience_seconds: float | None = None,
    ) -> Any:
        """Calls `method` until it answers.

        Raises:
            ConnectionLostError: the server was out of reach for longer than the patience.
            TLSError: it and this process can't agree on TLS.
            WireError: the server refused the message.
            ElasticCBError: the server could not do what was asked; class, message and traceback are the server's.
        """
        patience = self._patience if patience_seconds is None else patience_seconds
        begun = time.monotonic()
        pause = 0.05
        while True:
            try:
                answer = method(request, timeout=deadline_seconds, metadata=self.metadata)
                self._answered = True
                return answer
            except grpc.RpcError as error:
                self.raise_unless_transient(error)
                self._raise_if_tls_is_why(error)
                waited = time.monotonic() - begun
                if waited + pause > patience:
                    raise ConnectionLostError(
                        f"{self._name} at {self.address} has not answered for {waited:.0f} s "
                        f"({error.code().name}: {error.details() or 'no details'})."
                    ) from None
                logger.debug("%s at %s: %s, trying again", self._name, self.address, error.code().name)
                time.sleep(pause * _jitter.uniform(0.5, 1.0))
                pause = min(2 * pause, 1.0)

    def _raise_if_tls_is_why(self, error: Any) -> None:
        if error.code() is grpc.StatusCode.UNAVAILABLE and not self._answered:
            reason = tls.diagnose(self.address, self._tls)
            if reason:
                raise TLSError(f"No connection to {self._name} at {self.address}: {reason}.") from None

    def raise_unless_transient(self, error: Any) -> None:
        """Raises what a failed call means, as `call` does, unless the same call may succeed later."""
        code, details = error.code(), error.details() or "no details"
        given = dict(error.trailing_metadata() or ())
        if code in _TRANSIENT or BUSY_KEY in given:
            return
        if code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED):
            raise WireError(f"{self._name} at {self.address} refused a message: {details}") from None
        if code is grpc.StatusCode.FAILED_PRECONDITION:
            kind = _ERRORS.get(given.get(ERROR_KEY, ""), ElasticCBError)
            raise kind(details, given.get(_TRACEBACK_KEY, b"").decode(errors="ignore")) from None
        raise ConnectionLostError(f"A call to {self._name} at {self.address} failed: {code.name}: {details}") from None

    def free_memory(self) -> None:
        """Frees memory that is shared with the server, after large frames."""
        for memory in self._memories.values():
            memory.shrink()

    def close(self) -> None:
        self.channel.close()
        for memory in self._memories.values():
            memory.forget()


def _copied(array: Any) -> Any:
    return array if isinstance(array, InPieces) else np.array(array)


def _channel(address: str, own: tls.TLS | None) -> grpc.Channel:
    options = [*_OPTIONS, _largest(-1)]
    if own is None:
        return grpc.insecure_channel(address, options=options)
    if own.files.tls_name:
        options.append(("grpc.ssl_target_name_override", own.files.tls_name))
    return grpc.secure_channel(address, grpc.ssl_channel_credentials(own.ca, own.key, own.cert), options=options)


def _largest(message: int) -> tuple[str, Any]:
    """The option by which messages of more bytes are refused; -1: none."""
    return "grpc.max_receive_message_length", message


def _is_an_answer(error: BaseException) -> bool:
    """Whether a call failed because the server said so, and so runs no more."""
    return isinstance(error, CallError) and error.code() in _ANSWERS
