"""Links between machines: connections besides gRPC for frames and their arrays.

With `Attach`, a call with the job's token, a client requests a port of the server and a key that is valid for one
connection. It connects, with TLS if the job uses TLS, and presents the key. Where that is not possible, because only
the gRPC port is reachable, frames are sent over gRPC.
"""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from elasticcb.errors import ConnectionLostError, WireError
from elasticcb.rpc.link import ClientLink, Message, ServerLinks
from elasticcb.rpc.tensors import Frame, decode_header, encode_header
from elasticcb.security.tls import TLS

logger = logging.getLogger(__name__)

ASKED = b"stream"  # message of `Attach`
_KEY_BYTES = 32
_TAKEN = b"+"  # the server's answer to a valid key
_CONNECT_SECONDS = 3.0
_HANDSHAKE_SECONDS = 10.0
_KEY_SECONDS = 60.0  # validity of a key
_MOST_STRANGERS = 64  # maximum connections that have not presented a key
_AGAIN_SECONDS = 60.0  # before a client that could not connect tries again; doubled each time
# For connections to a dead machine, as in gRPC's keepalive.
_QUIET_SECONDS, _PROBE_SECONDS, _SILENT_SECONDS = 20, 10, 30


class ClientStream:
    """The client's side of one connection; one call at a time.

    Args:
        attach: sends a message to the server's `Attach`; raises `ConnectionLostError` if it may work later, and another
            error if the server refuses.

    Attributes:
        link: link to the server; None: frames are sent over gRPC.
    """

    def __init__(
        self, host: str, tls: TLS | None, attach: Callable[[bytes], bytes], is_alive: Callable[[], bool]
    ) -> None:
        self.lock = threading.Lock()
        self.link: ClientLink | None = None
        self._host, self._tls = host.strip("[]"), tls
        self._attach, self._is_alive = attach, is_alive
        self._ask_at, self._pause = 0.0, _AGAIN_SECONDS
        self._closed = False

    def encode(self, frame: Frame[Any], often: bool) -> Message | None:
        """The message to send by the link; None if there is no link."""
        return None if self._present() is None else Message(*encode_header(frame))

    def decode(self, answer: Message, header_type: type[Any], often: bool) -> Frame[Any]:
        """The received answer."""
        return decode_header(answer.data, header_type, answer.read)

    def _present(self) -> ClientLink | None:
        if self.link is None and time.monotonic() >= self._ask_at and not self._closed:
            try:
                self.link = self._open(json.loads(self._attach(ASKED)))
                self._pause = _AGAIN_SECONDS
            except ConnectionLostError:
                pass  # the next call waits for the server
            except Exception as error:
                self._ask_at, self._pause = time.monotonic() + self._pause, 2 * self._pause
                logger.info(
                    "Tensors are sent over gRPC, which is slower: could not open a direct connection to %s: %s",
                    self._host,
                    error,
                )
            if self._closed:
                self.forget()
        return self.link

    def _open(self, offered: Any) -> ClientLink:
        connected = socket.create_connection((self._host, int(offered["port"])), _CONNECT_SECONDS)
        try:
            _prepare(connected)
            connected.settimeout(_HANDSHAKE_SECONDS)
            if self._tls is not None:
                connected = self._tls.connected(connected, self._host)
            connected.sendall(bytes.fromhex(offered["key"]))
            if connected.recv(1) != _TAKEN:
                raise OSError("the server closed it")
        except BaseException:
            connected.close()
            raise
        return ClientLink(connected, self._is_alive)

    def forget(self) -> None:
        """Closes the link: a call over it failed, or may still run."""
        link, self.link = self.link, None
        if link is not None:
            link.close()

    def shrink(self) -> None:
        """Frees memory, after frames larger than those to come."""
        with self.lock:
            self.forget()

    def close(self) -> None:
        """Aborts a running call, also in another thread."""
        self._closed = True
        self.forget()


class StreamListener:
    """The server's side: accepts connections of clients that have a key."""

    def __init__(self, links: ServerLinks) -> None:
        self._links = links
        self._host = ""
        self._tls: TLS | None = None
        self._socket: socket.socket | None = None  # created at the first request
        self._thread: threading.Thread | None = None
        self._keys: dict[bytes, float] = {}  # expiry time of each key
        self._strangers = 0
        self._lock = threading.Lock()
        self._stopped = False

    def listen_at(self, host: str, tls: TLS | None) -> None:
        """Sets the interface to listen on ("": none), and the TLS identity of this process."""
        self._host, self._tls = host.strip("[]"), tls

    def offer(self) -> bytes:
        """The answer of `Attach` to a client. Raises `WireError` when there can be no connection."""
        key, now = secrets.token_bytes(_KEY_BYTES), time.monotonic()
        with self._lock:
            if self._socket is None:
                self._listen()
            assert self._socket is not None
            port = self._socket.getsockname()[1]
            self._keys = {known: until for known, until in self._keys.items() if until > now}
            self._keys[key] = now + _KEY_SECONDS
        return json.dumps({"port": port, "key": key.hex()}).encode()

    def _listen(self) -> None:
        if not self._host or self._stopped:
            raise WireError("This server has no other ports.")
        try:
            self._socket = _listening(self._host)
        except OSError as error:
            raise WireError(f"This server could not listen on another port of {self._host}: {error}.") from error
        self._thread = threading.Thread(target=self._accept, args=(self._socket,), name="streams", daemon=True)
        self._thread.start()

    def _accept(self, listening: socket.socket) -> None:
        while not self._stopped:
            try:
                connected, _ = listening.accept()
            except OSError as error:
                if not self._stopped:
                    logger.warning("Could not accept a connection for tensors: %s", error)
                    time.sleep(0.1)  # too many open files may be closed by then
                continue
            with self._lock:
                self._strangers += 1
                too_many = self._strangers > _MOST_STRANGERS
            if too_many:
                self._one_less()
                connected.close()
            else:
                self._links.serve(connected, welcome=self._welcome)

    def _one_less(self) -> None:
        with self._lock:
            self._strangers -= 1

    def _welcome(self, connected: socket.socket) -> socket.socket:
        try:
            _prepare(connected)
            connected.settimeout(_HANDSHAKE_SECONDS)
            if self._tls is not None:
                connected = self._tls.accepted(connected)
            shown = b""
            while len(shown) < _KEY_BYTES:
                more = connected.recv(_KEY_BYTES - len(shown))
                if not more:
                    raise OSError("it presented no key")
                shown += more
            with self._lock:
                until = self._keys.pop(shown, 0.0)  # 256 random bits, so timing reveals nothing useful
            if time.monotonic() > until:
                raise OSError("it presented an invalid key")
            connected.sendall(_TAKEN)
            connected.settimeout(None)
            return connected
        except BaseException:
            connected.close()
            raise
        finally:
            self._one_less()

    def stop(self, grace_seconds: float) -> None:
        """Accepts no more connections."""
        self._stopped = True
        with self._lock, contextlib.suppress(OSError):
            if self._socket is not None:
                self._socket.shutdown(socket.SHUT_RDWR)  # ends `accept`
                self._socket.close()
        if self._thread is not None:
            self._thread.join(grace_seconds)


def _listening(host: str) -> socket.socket:
    if host in ("0.0.0.0", "::") and socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=128)
    family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
    return socket.create_server((host, 0), family=family, backlog=128)


def _prepare(connected: socket.socket) -> None:
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", _QUIET_SECONDS),
        ("TCP_KEEPINTVL", _PROBE_SECONDS),
        ("TCP_KEEPCNT", 1),
        ("TCP_USER_TIMEOUT", 1000 * _SILENT_SECONDS),
    ):
        if hasattr(socket, name):  # not available on all systems
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
