"""How frames get to a server and back. Callers don't know which transport is used."""

from __future__ import annotations

import functools
import threading
from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import grpc

from elasticcb.rpc import frame_pieces
from elasticcb.rpc.call_errors import CallError
from elasticcb.rpc.frame_pieces import PIECES_MISSING, bytes_of, in_pieces
from elasticcb.rpc.link import Message
from elasticcb.rpc.services import Method
from elasticcb.rpc.shared_frames import ClientMemory
from elasticcb.rpc.stream import ClientStream
from elasticcb.rpc.tensors import Frame, decode_frame, encode_frame, has_arrays
from elasticcb.security import tls
from elasticcb.security.socket_folder import host_of, why_unsafe

# Weights are sent in messages of many MB, above gRPC's default limit of 4 MB.
OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_send_message_length", -1),
    # An error's text is metadata, for which gRPC's limit is 8 KB.
    ("grpc.max_metadata_size", 256 << 10),
    ("grpc.absolute_max_metadata_size", 512 << 10),
    ("grpc.so_reuseport", 0),
    # Long polls are silent for seconds; a dead machine must still be detected.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
    # Some networks drop packets to a dead machine: nothing refuses the connection.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    # A killed server may soon be back at the same address.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
]

# Codes with which the server itself ends a call.
_ANSWERS = {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION, PIECES_MISSING}

Metadata = tuple[tuple[str, str], ...]


def _open_channel(address: str, name: str, own: tls.Certificate | None) -> grpc.Channel:
    """Connects at first use.

    Args:
        name: name that the server's certificate must have; "": its address.
        own: identity of this process; None: no TLS.
    """
    options = [*OPTIONS, message_limit(-1)]
    if own is None:
        return grpc.insecure_channel(address, options=options)
    if name:
        options.append(("grpc.ssl_target_name_override", name))
    return grpc.secure_channel(address, grpc.ssl_channel_credentials(own.ca, own.key, own.cert), options=options)


def message_limit(size: int) -> tuple[str, Any]:
    """The option that limits the size of messages in bytes; -1: no limit."""
    return "grpc.max_receive_message_length", size


class Transport(ABC):
    """Sends frames of any size to the methods of one server."""

    def call(self, method: Method, frame: Frame[Any], timeout: float, metadata: Metadata = ()) -> Frame[Any]:
        """The answer to one attempt of a call. Raises `grpc.RpcError`."""
        send = functools.partial(self._send, timeout=timeout, metadata=metadata)
        whole, piece = functools.partial(send, method), functools.partial(send, method.piece)
        return in_pieces(frame, whole, piece, self._takes(bytes_of(frame), method))

    @abstractmethod
    def _send(self, method: Method, frame: Frame[Any], timeout: float, metadata: Metadata) -> Frame[Any]:
        """The answer to a frame that is small enough to be sent whole."""

    @abstractmethod
    def _takes(self, size: int, method: Method) -> bool:
        """Whether a frame with that many bytes of arrays may be sent whole."""


class _Line(NamedTuple):
    """A channel, the certificate that this process presents there, and functions that send bytes to methods."""

    channel: grpc.Channel
    certificate: tls.Certificate | None
    senders: dict[str, Any]


class GrpcTransport(Transport):
    """Sends whole frames, and plain messages, over gRPC to any machine."""

    def __init__(self, address: str, own: tls.TLS | None) -> None:
        self._address, self._tls = address, own
        self._folder = host_of(address)
        self._lock = threading.Lock()
        self._line = self._open()
        self._closed = False

    def _open(self) -> _Line:
        if self._tls is None:
            return _Line(_open_channel(self._address, "", None), None, {})
        certificate = self._tls.certificate
        return _Line(_open_channel(self._address, self._tls.name, certificate), certificate, {})

    @property
    def channel(self) -> grpc.Channel:
        """The channel to the server. It is replaced when this process gets another certificate; running calls finish on
        the old one."""
        return self._present().channel

    def _present(self) -> _Line:
        line = self._line
        if self._tls is None or line.certificate is self._tls.certificate:
            return line
        with self._lock:
            if not self._closed and self._line.certificate is not self._tls.certificate:
                self._line = self._open()  # gRPC closes the old channel when its last call has ended
            return self._line

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._line.channel.close()

    def call(self, method: Method, frame: Any, timeout: float, metadata: Metadata = ()) -> Any:
        if method.framed:
            return super().call(method, frame, timeout, metadata)
        answer = self.raw(method.path)(frame.SerializeToString(), timeout=timeout, metadata=metadata)
        return method.response.FromString(answer)

    def raw(self, path: str) -> Any:
        """A function that sends bytes to a method. Raises `CallError` when another user may have its address now."""
        if self._folder and (unsafe := why_unsafe(self._folder)):
            raise CallError(grpc.StatusCode.UNAVAILABLE, unsafe)
        line = self._present()
        if path not in line.senders:
            line.senders[path] = line.channel.unary_unary(path, None, None)
        return line.senders[path]

    def _send(self, method: Method, frame: Frame[Any], timeout: float, metadata: Metadata) -> Frame[Any]:
        answer = self.raw(method.path)(encode_frame(frame), timeout=timeout, metadata=metadata)
        return decode_frame(answer, method.response)

    def _takes(self, size: int, method: Method) -> bool:
        return size <= frame_pieces.LARGEST_FRAME


class LinkedTransport(Transport):
    """Sends frames over a link to a server, with its shared memory or stream; over gRPC if that is not possible. Calls
    are serialized.

    Attributes:
        side: this process's side: shared memory with a server on this machine, or a stream to another machine.
    """

    def __init__(self, grpc_transport: GrpcTransport, side: ClientMemory | ClientStream) -> None:
        self._grpc = grpc_transport
        self.side = side

    def call(self, method: Method, frame: Frame[Any], timeout: float, metadata: Metadata = ()) -> Frame[Any]:
        with self.side.lock:
            return super().call(method, frame, timeout, metadata)

    def _send(self, method: Method, frame: Frame[Any], timeout: float, metadata: Metadata) -> Frame[Any]:
        side, send = self.side, self._grpc.raw(method.path)
        try:
            message = side.encode(frame)
            if side.link is None or has_arrays(message.data):
                answer = Message(send(message.data, timeout=timeout, metadata=metadata))
            else:
                answer = side.link.call(method.name, message, timeout)
        except BaseException as error:  # after an interrupt, too, the server may still answer
            if not _is_an_answer(error):
                side.forget()
            if not isinstance(error, grpc.RpcError) or error.code() is not grpc.StatusCode.NOT_FOUND:
                raise
            answer = Message(send(encode_frame(frame), timeout=timeout, metadata=metadata))
        return side.decode(answer, method.response)

    def _takes(self, size: int, method: Method) -> bool:
        return self.side.takes(size, method.often)


def _is_an_answer(error: BaseException) -> bool:
    """Whether a call failed by the server's answer, and so is no longer running."""
    return isinstance(error, CallError) and error.code() in _ANSWERS
