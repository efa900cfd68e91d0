"""Calls over a socket besides gRPC: a tenth of the cost of a gRPC call, and arrays without a copy.

A link belongs to one client and carries one call at a time. Whoever opens it (elasticcb/rpc/shared_frames.py on one
machine, elasticcb/rpc/stream.py between machines) has verified that both ends belong to the job.
"""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import grpc
import numpy as np

from elasticcb.rpc.call_errors import CallError
from elasticcb.rpc.tensors import ALIGNMENT, Array, aligned

_MOST = 4  # maximum number of kept buffers
_SMALL = 64 << 10  # bytes; smaller buffers are cheaper to allocate than to keep


class Buffers:
    """Allocates memory, and reuses it once no array in it is in use: pages that were touched before are several times
    as fast as new ones. Not thread-safe."""

    def __init__(self) -> None:
        self._kept: list[tuple[Array, Callable[[], Any]]] = []  # with a function that returns what is using it

    def take(self, size: int) -> Array:
        """uint8 `[size]`, aligned for TensorFlow. In use as long as it, or its `data`, is referenced.

        Raises `ValueError` or `MemoryError` for an impossible size.
        """
        if size <= _SMALL:
            return aligned((size,), np.uint8)
        free = [index for index, (_, lent) in enumerate(self._kept) if lent() is None]
        fitting = [index for index in free if self._kept[index][0].size >= size]
        if fitting:
            index = fitting[0]
        elif free or len(self._kept) < _MOST:
            index = free[0] if free else len(self._kept)
            # Some headroom: the number of embedding rows differs from batch to batch.
            made = aligned((size + size // 4,), np.uint8)
            self._kept[index : index + 1] = [(made, lambda: None)]
        else:
            return aligned((size,), np.uint8)
        memory = self._kept[index][0]
        given: Array = memory[:size]
        self._kept[index] = memory, weakref.ref(given)
        return given


logger = logging.getLogger(__name__)

# Bytes of the frame, and of the arrays after it; for a request the length of the method's name, which precedes the
# frame; for an answer whether it is an error.
_PREFIX = struct.Struct("<QQB")
_CHUNK = 64 << 10  # bytes
_QUIET_SECONDS = 20.0  # waiting time after which the client checks whether the server is alive


class Message(NamedTuple):
    """A message on a link.

    Attributes:
        data: a frame without its arrays.
        arrays: the arrays that follow, each at a multiple of `ALIGNMENT`: those to send, or the received bytes.
    """

    data: bytes
    arrays: Sequence[Array] = ()

    def read(self, offset: int, size: int) -> memoryview:
        """Bytes of the received arrays. A view of it keeps all of them alive."""
        view: memoryview = self.arrays[0].data if self.arrays else memoryview(b"")
        return view[offset : offset + size]


class ClientLink:
    """The client's end. Unusable after a call that raised anything but the server's own error."""

    def __init__(self, connected: socket.socket, is_alive: Callable[[], bool]) -> None:
        self._socket = connected
        self._is_alive = is_alive
        self._buffers = Buffers()
        self._closed = False

    def call(self, method: str, message: Message, timeout: float) -> Message:
        """The answer. Raises `CallError`: the server's, or UNAVAILABLE, DEADLINE_EXCEEDED or CANCELLED."""
        deadline = time.monotonic() + timeout
        try:
            self._socket.settimeout(timeout)
            _send(self._socket, message, method.encode())
            first = self._first_bytes(deadline)
            size, _, failed = _PREFIX.unpack_from(first)
            answer = _received(self._socket, first, size, self._buffers)
        except TimeoutError:
            raise CallError(grpc.StatusCode.DEADLINE_EXCEEDED, f"no answer within {timeout:g} s") from None
        except (OSError, struct.error) as error:
            if self._closed:
                raise CallError(grpc.StatusCode.CANCELLED, "the connection was closed") from None
            raise CallError(grpc.StatusCode.UNAVAILABLE, f"its socket was closed ({error})") from None
        if failed:
            raise _decode_error(answer.data)
        return answer

    def _first_bytes(self, deadline: float) -> bytes:
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            self._socket.settimeout(min(left, _QUIET_SECONDS))
            try:
                return self._socket.recv(_CHUNK)
            except TimeoutError:
                if not self._is_alive():
                    raise OSError("it no longer answers") from None

    def close(self) -> None:
        """Aborts a running call, also in another thread."""
        self._closed = True
        close(self._socket)


class LinkMemory(Protocol):
    """Memory that a client shares with a server (elasticcb/rpc/shared_frames.py)."""

    def close(self) -> None: ...


class ServerLinks:
    """The server's ends of all links, each with a thread.

    Args:
        respond: returns the answer to (method, request, memory of the link), or raises `CallError`. Arrays of a request
            are valid only during the call.
    """

    def __init__(self, respond: Callable[[str, Message, Any], Message]) -> None:
        self._respond = respond
        self._threads: dict[threading.Thread, socket.socket] = {}
        self._lock = threading.Lock()
        self._stopped = False

    def serve(
        self,
        connected: socket.socket,
        memory: LinkMemory | None = None,
        welcome: Callable[[socket.socket], socket.socket] = lambda connected: connected,
    ) -> None:
        """Answers a client's calls until it disconnects, or this process stops.

        Args:
            memory: is closed with the link.
            welcome: authenticates the client and returns the socket to use; raises `OSError` on failure.
        """
        thread = threading.Thread(target=self._run, args=(connected, memory, welcome), name="link", daemon=True)
        with self._lock:
            self._threads[thread] = connected
            thread.start()  # before `stop` may wait for it

    def _run(self, link: socket.socket, memory: LinkMemory | None, welcome: Any) -> None:
        thread = threading.current_thread()
        try:
            link = welcome(link)
            with self._lock:
                self._threads[thread] = link
                if self._stopped:
                    return
            self._answer_all(link, memory)
        except (OSError, struct.error, UnicodeDecodeError) as error:
            logger.debug("A client disconnected: %s", error)
        finally:
            with self._lock:
                self._threads.pop(thread, None)
            close(link)
            if memory is not None:
                memory.close()

    def _answer_all(self, link: socket.socket, memory: LinkMemory | None) -> None:
        buffers = Buffers()
        while first := link.recv(_CHUNK):
            size, _, length = _PREFIX.unpack_from(first)
            data, arrays = _received(link, first, length + size, buffers)
            answer, failed = self._answer(data[:length].decode(), Message(data[length:], arrays), memory)
            del data, arrays  # so that the buffer can be reused
            _send(link, answer, failed=failed)

    def _answer(self, method: str, request: Message, memory: LinkMemory | None) -> tuple[Message, bool]:
        """The answer, and whether it is an error."""
        try:
            return self._respond(method, request, memory), False
        except CallError as error:
            return Message(_encode_error(error)), True

    def stop(self, grace_seconds: float) -> None:
        """Closes all links; running calls may still be answered for `grace_seconds`."""
        with self._lock:
            self._stopped = True
            threads = dict(self._threads)
        for link in threads.values():
            _shut_down(link, socket.SHUT_RD)
        deadline = time.monotonic() + grace_seconds
        for thread, link in threads.items():
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                _shut_down(link, socket.SHUT_RDWR)  # the link's thread closes the socket


def _send(link: socket.socket, message: Message, name: bytes = b"", failed: bool = False) -> None:
    """Sends small arrays with the preceding bytes, in one packet if they fit; large ones directly from their memory."""
    parts: list[Any] = [b"", name, message.data]
    position = waiting = 0
    for array in message.arrays:
        content, padding = array.reshape(-1).view(np.uint8).data, bytes(-position % ALIGNMENT)
        position += len(padding) + len(content)
        parts += [padding, content]
    parts[0] = _PREFIX.pack(len(message.data), position, len(name) or failed)
    begun = 0
    for index, part in enumerate(parts):
        if len(part) > _CHUNK:
            link.sendall(b"".join(parts[begun:index]))
            link.sendall(part)
            begun, waiting = index + 1, 0
            continue
        waiting += len(part)
        if waiting > _CHUNK:
            link.sendall(b"".join(parts[begun : index + 1]))
            begun, waiting = index + 1, 0
    if waiting:
        link.sendall(b"".join(parts[begun:]))


def _received(link: socket.socket, first: bytes, size: int, buffers: Buffers) -> Message:
    """The message that starts with the bytes received first.

    Args:
        size: number of bytes of it before the arrays, without the prefix.
    """
    _, following, _ = _PREFIX.unpack_from(first)
    end = _PREFIX.size + size
    if len(first) > end + following:
        raise OSError(f"received {len(first)} bytes instead of {end + following}")
    try:
        # np.empty and `Buffers` allocate pages only as bytes are received, however many were announced.
        data = first[:end] if len(first) >= end else _filled(link, np.empty(end, np.uint8), first).tobytes()
        arrays = [_filled(link, buffers.take(following), first[end:])] if following else []
    except (ValueError, MemoryError, OverflowError):
        raise OSError(f"{size:,} and {following:,} bytes were announced") from None
    return Message(data[_PREFIX.size :], arrays)


def _filled(link: socket.socket, buffer: Array, begun: bytes) -> Array:
    """The buffer, with the part of its content already received and the rest."""
    view, position = buffer.data, len(begun)
    view[:position] = begun
    while position < len(view):
        count = link.recv_into(view[position:])
        if not count:
            raise OSError(f"received {position} of {len(view)} bytes")
        position += count
    return buffer


def close(link: socket.socket) -> None:
    """Closes it for both sides, and for other threads that wait on it."""
    _shut_down(link, socket.SHUT_RDWR)
    link.close()


def _shut_down(link: socket.socket, how: int) -> None:
    with contextlib.suppress(OSError):
        # Not the method of a TLS socket, after which data would be sent unencrypted.
        socket.socket.shutdown(link, how)


def _encode_error(error: CallError) -> bytes:
    metadata = {key: value if isinstance(value, str) else value.decode(errors="ignore")
                for key, value in error.metadata.items()}  # fmt: skip
    return json.dumps([error.code().name, error.text, metadata]).encode()


def _decode_error(data: bytes) -> CallError:
    code, text, metadata = json.loads(data)
    metadata = {key: value.encode() if key.endswith("-bin") else value for key, value in metadata.items()}
    return CallError(grpc.StatusCode[code], text, metadata)
