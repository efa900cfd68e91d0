"""How frames get to a server and back. Callers don't know which transport is used."""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import grpc

from elasticcb.rpc.call_errors import CallError
from elasticcb.rpc.services import Method
from elasticcb.rpc.shared_frames import ClientMemory
from elasticcb.rpc.stream import ClientStream
from elasticcb.rpc.tensors import Frame, decode_frame, encode_frame, in_chunks
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
_ANSWERS = {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION}

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


class _Line(NamedTuple):
    """A channel, the certificate that this process presents there, and functions that send bytes to methods."""

    channel: grpc.Channel
    certificate: tls.Certificate | None
    senders: dict[str, Any]


class GrpcTransport:
    """Sends frames, and plain messages, over gRPC to any machine."""

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

    def call(self, method: Method, message: Any, timeout: float, metadata: Metadata = ()) -> Any:
        """The answer to one attempt of a call. Raises `grpc.RpcError`."""
        send = self.raw(method.path, method.framed)
        if method.framed:
            chunks = send(in_chunks(encode_frame(message)), timeout=timeout, metadata=metadata)
            return decode_frame(b"".join(chunks), method.response)
        return method.response.FromString(send(message.SerializeToString(), timeout=timeout, metadata=metadata))

    def raw(self, path: str, framed: bool = False) -> Any:
        """A function that sends bytes to a method, for a frame in chunks. Raises `CallError` when another user may have
        its address now."""
        if self._folder and (unsafe := why_unsafe(self._folder)):
            raise CallError(grpc.StatusCode.UNAVAILABLE, unsafe)
        line = self._present()
        if path not in line.senders:
            make = line.channel.stream_stream if framed else line.channel.unary_unary
            line.senders[path] = make(path, None, None)
        return line.senders[path]


class LinkedTransport:
    """Sends frames over a link to a server; over gRPC if there is none. Calls are serialized.

    Attributes:
        side: this process's side: with a server on this machine, or on another machine.
    """

    def __init__(self, grpc_transport: GrpcTransport, side: ClientMemory | ClientStream) -> None:
        self._grpc = grpc_transport
        self.side = side

    def call(self, method: Method, frame: Frame[Any], timeout: float, metadata: Metadata = ()) -> Frame[Any]:
        """The answer to one attempt of a call. Raises `grpc.RpcError`."""
        side = self.side
        with side.lock:
            try:
                message = side.encode(frame, method.often)
                if message is None or side.link is None:
                    answer: Frame[Any] = self._grpc.call(method, frame, timeout, metadata)
                    return answer
                return side.decode(side.link.call(method.name, message, timeout), method.response, method.often)
            except BaseException as error:  # after an interrupt, too, the server may still answer
                if not _is_an_answer(error):
                    side.forget()
                raise


def _is_an_answer(error: BaseException) -> bool:
    """Whether a call failed by the server's answer, and so is no longer running."""
    return isinstance(error, CallError) and error.code() in _ANSWERS
