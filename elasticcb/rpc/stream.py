"""Links between machines: connections beside gRPC that frames and their arrays travel by.

By `Attach`, a call with the job's token, a client asks for a port of the server and a key that is good for one
connection. It connects, with TLS where the job has TLS, and shows the key. Where that can't be, since only the port of
gRPC is reached, frames travel by gRPC.
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
from elasticcb.rpc import frame_pieces
from elasticcb.rpc.link import ClientLink, Message, ServerLinks
from elasticcb.rpc.tensors import Frame, decode_header, encode_frame, encode_header, frame_decoder, has_arrays
from elasticcb.security.tls import TLS

logger = logging.getLogger(__name__)

ASKED = b"stream"  # as a message of `Attach`
_KEY_BYTES = 32
_TAKEN = b"+"  # what the server says to the right key
_CONNECT_SECONDS = 3.0
_HANDSHAKE_SECONDS = 10.0
_KEY_SECONDS = 60.0  # that a key is good for
_MOST_STRANGERS = 64  # connections that have not shown a key
_AGAIN_SECONDS = 60.0  # after which a client asks again that could not connect; twice as long each time
# Of a connection to a machine that is gone, as gRPC's keepalive has them.
_QUIET_SECONDS, _PROBE_SECONDS, _SILENT_SECONDS = 20, 10, 30


class ClientStream:
    """The client's side of one connection; one call at a time.

    Args:
        host: of the server.
        tls: of this process; None: without.
        attach: sends a message to the server's `Attach`; raises `ConnectionLostError` when that may be there later, and
            another error when it refuses.
        is_alive: asks the server whether it answers.

    Attributes:
        link: to the server; None: frames go by gRPC.
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

    def takes(self, size: int, often: bool) -> bool:
        """Whether a frame with so many bytes of arrays may travel as one."""
        return self._present() is not None or size <= frame_pieces.LARGEST_FRAME

    def encode(self, frame: Frame[Any]) -> Message:
        """What to send for a request."""
        return Message(encode_frame(frame)) if self._present() is None else Message(*encode_header(frame))

    def decode(self, answer: Message, header_type: Callable[[], Any]) -> Frame[Any]:
        """The answer that came."""
        if has_arrays(answer.data):
            return frame_decoder(header_type)(answer.data)
        return decode_header(answer.data, header_type, answer.read)

    def _present(self) -> ClientLink | None:
        if self.link is None and time.monotonic() >= self._ask_at and not self._closed:
            try:
                self.link = self._open(json.loads(self._attach(ASKED)))
                self._pause = _AGAIN_SECONDS
            except ConnectionLostError:
                pass  # the call that follows waits for the server
            except Exception as error:
                self._ask_at, self._pause = time.monotonic() + self._pause, 2 * self._pause
                logger.info("Tensors go by gRPC, slower: no other connection to %s: %s", self._host, error)
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
                raise OSError("the server ended it")
        except BaseException:
            connected.close()
            raise
        return ClientLink(connected, self._is_alive)

    def forget(self) -> None:
        """Ends the link: a call by it failed, or may still run."""
        link, self.link = self.link, None
        if link is not None:
            link.close()

    def shrink(self) -> None:
        """Frees memory, after frames that were larger than those to come."""
        with self.lock:
            self.forget()

    def close(self) -> None:
        """Ends a call under way, in another thread, too."""
        self._closed = True
        self.forget()


class StreamListener:
    """The server's side: takes the connections of clients that have a key.

    Args:
        links: which answer them.
    """

    def __init__(self, links: ServerLinks) -> None:
        self._links = links
        self._host = ""
        self._tls: TLS | None = None
        self._socket: socket.socket | None = None  # once somebody has asked
        self._thread: threading.Thread | None = None
        self._keys: dict[bytes, float] = {}  # until when they are good
        self._strangers = 0
        self._lock = threading.Lock()
        self._stopped = False

    def listen_at(self, host: str, tls: TLS | None) -> None:
        """Says on which interface it may listen, "": on none, and by what this process shows itself with TLS."""
        self._host, self._tls = host.strip("[]"), tls

    def offer(self) -> bytes:
        """The answer of `Attach` to a client that asks. Raises `WireError` where there can be no connection."""
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
            raise WireError(f"This server can't listen on another port of {self._host}: {error}.") from error
        self._thread = threading.Thread(target=self._accept, args=(self._socket,), name="streams", daemon=True)
        self._thread.start()

    def _accept(self, listening: socket.socket) -> None:
        while not self._stopped:
            try:
                connected, _ = listening.accept()
            except OSError as error:
                if not self._stopped:
                    logger.warning("A connection for tensors was not taken: %s", error)
                    time.sleep(0.1)  # too many open files may be fewer then
                continue
            with self._lock:
                self._strangers += 1
                too_many = self._strangers > _MOST_STRANGERS
            if too_many:
                self._one_less()
                connected.close()
            else:
                self._links.serve(connected, lambda: None, self._welcome)

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
                    raise OSError("it showed no key")
                shown += more
            with self._lock:
                until = self._keys.pop(shown, 0.0)  # 256 random bits: how long it takes tells nothing of use
            if time.monotonic() > until:
                raise OSError("it showed a key that is not good")
            connected.sendall(_TAKEN)
            connected.settimeout(None)
            return connected
        except BaseException:
            connected.close()
            raise
        finally:
            self._one_less()

    def stop(self, grace_seconds: float) -> None:
        """Ends all links, as `ServerLinks.stop`."""
        self._stopped = True
        with self._lock, contextlib.suppress(OSError):
            if self._socket is not None:
                self._socket.shutdown(socket.SHUT_RDWR)  # ends `accept`
                self._socket.close()
        if self._thread is not None:
            self._thread.join(grace_seconds)
        self._links.stop(grace_seconds)


class StreamReply:
    """Where the answer goes to a request that came by a stream; as `Reply` of shared memory."""

    borrowed = True

    def takes(self, size: int) -> bool:
        return True

    def encode(self, frame: Frame[Any]) -> Message:
        return Message(*encode_header(frame))


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
        if hasattr(socket, name):  # not on all systems
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
