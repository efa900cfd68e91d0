"""Links between two processes of one machine, by Unix sockets.

The client listens under a name that it gives to the server by gRPC; the server connects, and shows the key that came
with the name. The socket has no file, and ends with either process: whoever waits for an answer of a process that was
killed hears of it at once.
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


def connect(name: str, key: bytes) -> socket.socket:
    """The server's end of a link to the client that listens under a name. Raises `OSError` where there is none."""
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connected.settimeout(_HANDSHAKE_SECONDS)
        connected.connect(f"\0{name}")
        if not _of_this_user(connected):
            raise OSError("the listener is another user's")
        connected.sendall(key)
        connected.settimeout(None)
    except OSError:
        connected.close()
        raise
    return connected


def _of_this_user(link: socket.socket) -> bool:
    credentials = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(credentials)[1] == os.getuid())
