"""Calls between two processes of one machine over a Unix socket: a tenth of what a call of gRPC costs.

A link belongs to one client and carries one call at a time. The client listens under a name that it gives to the
server by gRPC; the server connects, and shows the key that came with the name. The socket has no file, and ends with
either process: whoever waits for an answer of a process that was killed hears of it at once.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

import grpc
import numpy as np

from elasticcb.rpc.call_errors import CallError, call_error_of_defect

logger = logging.getLogger(__name__)

_REQUEST = struct.Struct("<QB")  # bytes of what follows the method's name, bytes of the name
_ANSWER = struct.Struct("<QB")  # bytes of what follows, whether it is an error
_CHUNK = 64 << 10  # bytes
_HANDSHAKE_SECONDS = 5.0
_QUIET_SECONDS = 20.0  # of waiting for an answer, after which the server is asked whether it is alive
_CREDENTIALS = struct.Struct("3i")  # process, user and group at the other end


class Listener:
    """Waits for the one server that a client has told `name` and `key`. Raises `OSError` where there are no sockets."""

    def __init__(self) -> None:
        self.name = f"elasticcb-{secrets.token_hex(16)}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.bind(f"\0{self.name}")  # no file
            self._socket.listen(16)  # strangers may come first
        except OSError:
            self._socket.close()
            raise

    def accept(self, key: bytes, is_alive: Callable[[], bool]) -> ClientLink:
        """The link to the server, which has connected already. Raises `OSError` when it has not."""
        deadline = time.monotonic() + _HANDSHAKE_SECONDS
        while True:  # any process of this machine may have connected
            self._socket.settimeout(max(deadline - time.monotonic(), 0.001))
            connected, _ = self._socket.accept()
            connected.settimeout(1.0)
            with contextlib.suppress(OSError):
                if _of_this_user(connected) and hmac.compare_digest(connected.recv(len(key), socket.MSG_WAITALL), key):
                    return ClientLink(connected, is_alive)
            connected.close()

    def close(self) -> None:
        self._socket.close()


class ClientLink:
    """The client's end. Of no use any more after a call that raised anything but the server's own error.

    Args:
        is_alive: asks the server, in another way, whether it still answers.
    """

    def __init__(self, connected: socket.socket, is_alive: Callable[[], bool]) -> None:
        self._socket = connected
        self._is_alive = is_alive
        self._closed = False

    def call(self, method: str, data: bytes, timeout: float) -> bytes:
        """The answer. Raises `CallError`: the server's, or UNAVAILABLE, DEADLINE_EXCEEDED or CANCELLED."""
        deadline = time.monotonic() + timeout
        name = method.encode()
        try:
            self._socket.settimeout(timeout)
            self._socket.sendall(_REQUEST.pack(len(data), len(name)) + name + data)
            received = self._first_bytes(deadline)
            size, failed = _ANSWER.unpack_from(received)
            answer = _rest(self._socket, received, _ANSWER.size + size)[_ANSWER.size :]
        except TimeoutError:
            raise CallError(grpc.StatusCode.DEADLINE_EXCEEDED, f"no answer for {timeout:g} s") from None
        except (OSError, struct.error) as error:
            if self._closed:
                raise CallError(grpc.StatusCode.CANCELLED, "the connection was closed") from None
            raise CallError(grpc.StatusCode.UNAVAILABLE, f"its socket was closed ({error})") from None
        if failed:
            raise _decode_error(answer)
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
                    raise OSError("it does not answer any more") from None

    def close(self) -> None:
        """Ends a call that another thread waits in, too."""
        self._closed = True
        _close(self._socket)


class ServerLinks:
    """The server's ends of all links, each with a thread.

    Args:
        respond: by (method, data) the answer, or raises `CallError`.
    """

    def __init__(self, respond: Callable[[str, bytes], bytes]) -> None:
        self._respond = respond
        self._threads: dict[threading.Thread, socket.socket] = {}
        self._lock = threading.Lock()
        self._stopped = False

    def connect(self, name: str, key: bytes, ended: Callable[[], Any]) -> bool:
        """Connects to the listener of a client, and answers its calls until it ends, then calls `ended`.

        Returns whether that was possible.
        """
        link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            link.settimeout(_HANDSHAKE_SECONDS)
            link.connect(f"\0{name}")
            if not _of_this_user(link):
                raise OSError("the listener is another user's")
            link.sendall(key)
            link.settimeout(None)
        except OSError as error:
            logger.debug("No socket to a client of this machine: %s", error)
            link.close()
            return False
        thread = threading.Thread(target=self._serve, args=(link, ended), name="link", daemon=True)
        with self._lock:
            if self._stopped:
                link.close()
                return False
            self._threads[thread] = link
            thread.start()  # before `stop` may wait for it
        return True

    def _serve(self, link: socket.socket, ended: Callable[[], Any]) -> None:
        try:
            while True:
                received = link.recv(_CHUNK)
                if not received:
                    return
                size, length = _REQUEST.unpack_from(received)
                start = _REQUEST.size + length
                received = _rest(link, received, start + size)
                link.sendall(self._answer(received[_REQUEST.size : start].decode(), received[start:]))
        except (OSError, struct.error, UnicodeDecodeError) as error:
            logger.debug("A client of this machine is gone: %s", error)
        finally:
            with self._lock:
                self._threads.pop(threading.current_thread(), None)
            _close(link)
            ended()

    def _answer(self, method: str, data: bytes) -> bytes:
        failed = False
        try:
            answer = self._respond(method, data)
        except CallError as error:
            answer, failed = _encode_error(error), True
        except Exception as error:  # a defect; as gRPC tells of it
            logger.exception("A call of %s failed", method)
            answer, failed = _encode_error(call_error_of_defect(error)), True
        return _ANSWER.pack(len(answer), failed) + answer

    def stop(self, grace_seconds: float) -> None:
        """Ends all links; calls under way may still be answered for `grace_seconds`."""
        with self._lock:
            self._stopped = True
            threads = dict(self._threads)
        for link in threads.values():
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RD)
        deadline = time.monotonic() + grace_seconds
        for thread, link in threads.items():
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                with contextlib.suppress(OSError):  # it closes the socket itself
                    link.shutdown(socket.SHUT_RDWR)


def _rest(link: socket.socket, received: bytes, size: int) -> bytes:
    """The whole message of `size` bytes that begins with what was received."""
    position = len(received)
    if position == size:
        return received
    if position > size:
        raise OSError(f"{position} bytes came instead of {size}")
    try:
        buffer = np.empty(size, np.uint8)  # touched as the bytes come, however many were announced
    except (ValueError, MemoryError):
        raise OSError(f"{size} bytes were announced") from None
    view = buffer.data
    view[:position] = received
    while position < size:
        count = link.recv_into(view[position:])
        if not count:
            raise OSError(f"{position} of {size} bytes came")
        position += count
    return buffer.tobytes()


def _of_this_user(link: socket.socket) -> bool:
    credentials = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(credentials)[1] == os.getuid())


def _close(link: socket.socket) -> None:
    with contextlib.suppress(OSError):
        link.shutdown(socket.SHUT_RDWR)
    link.close()


def _encode_error(error: CallError) -> bytes:
    metadata = {key: value if isinstance(value, str) else value.decode(errors="ignore")
                for key, value in error.metadata.items()}  # fmt: skip
    return json.dumps([error.code().name, error.text, metadata]).encode()


def _decode_error(data: bytes) -> CallError:
    code, text, metadata = json.loads(data)
    metadata = {key: value.encode() if key.endswith("-bin") else value for key, value in metadata.items()}
    return CallError(grpc.StatusCode[code], text, metadata)
