"""Links between two processes of one machine, over Unix sockets.

The client listens under a name that it sends to the server over gRPC; the server connects, and presents the key that
came with the name. The socket has no file and closes when either process exits, so a caller that waits for a killed
process is notified at once.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable

from elasticcb.rpc.link import ClientLink

_HANDSHAKE_SECONDS = 5.0
_CREDENTIALS = struct.Struct("3i")  # process, user and group of the peer


class Listener:
    """Waits for the one server to which a client has sent `name` and `key`. Raises `OSError` if sockets are
    unsupported."""

    def __init__(self) -> None:
        self.name = f"elasticcb-{secrets.token_hex(16)}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.bind(f"\0{self.name}")  # no file
            self._socket.listen(16)  # strangers may connect first
        except OSError:
            self._socket.close()
            raise

    def accept(self, key: bytes, is_alive: Callable[[], bool]) -> ClientLink:
        """The link to the server, which has already connected. Raises `OSError` if it has not."""
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


def connect(name: str, key: bytes) -> socket.socket:
    """The server's end of a link to the client listening under a name. Raises `OSError` if there is none."""
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connected.settimeout(_HANDSHAKE_SECONDS)
        connected.connect(f"\0{name}")
        if not _of_this_user(connected):
            raise OSError("the listener belongs to another user")
        connected.sendall(key)
        connected.settimeout(None)
    except OSError:
        connected.close()
        raise
    return connected


def _of_this_user(link: socket.socket) -> bool:
    credentials = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(credentials)[1] == os.getuid())
