"""Links on one machine: a Unix socket, and memory shared by client and server for the arrays.

With `Attach`, a client sends the path of a segment of memory, and the name of a socket to which the server connects. A
server on another machine can do neither. The arrays of a frame that does not fit into the segment, or of all frames if
there is no room for one, follow on the socket; the next segment is larger.

Arrays of an answer are views of the segment. It has two parts for answers, and the client names one in which no array
is in use; if both are in use, the arrays follow on the socket. From then on the client copies the arrays of an answer
if the other part is in use, so that one part stays free.

A segment is an in-memory file (/dev/shm) created by the client of a connection, with one part for its requests and two
for answers. It has no name: the server opens it through the client's file descriptor, and the memory is freed once both
have closed it, however they exit. It belongs to one link: a failed call, which may still be running, closes both.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
import mmap
import os
import re
import secrets
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from elasticcb.errors import ConnectionLostError, WireError
from elasticcb.rpc.link import ClientLink, Message, ServerLinks
from elasticcb.rpc.tensors import (
    ALIGNMENT,
    Array,
    Frame,
    aligned,
    decode_header,
    encode_header,
)

_FOLDER = "/dev/shm"
_PATH = re.compile(r"/proc/\d+/fd/\d+")

REQUEST = 0  # number of the part for requests
ANSWERS = (1, 2)
_PARTS = 3


class Segment:
    """Memory in parts: one for requests, two for answers.

    Attributes:
        path: path by which another process can open it while its creator lives.
    """

    def __init__(self, descriptor: int, size: int) -> None:
        self.path = f"/proc/{os.getpid()}/fd/{descriptor}"
        self.inode = os.fstat(descriptor).st_ino
        self.size = size
        self._close = weakref.finalize(self, os.close, descriptor)
        self._memory = mmap.mmap(descriptor, _PARTS * size)
        self._bytes = np.frombuffer(self._memory, np.uint8)
        self._view = memoryview(self._memory)

    @classmethod
    def create(cls, size: int) -> Segment:
        """A new segment, readable only by this user. Raises `OSError` for lack of space, or of such a file system."""
        size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        descriptor = os.open(_FOLDER, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
        try:
            # Otherwise unavailable pages would kill the process when they are first written.
            os.posix_fallocate(descriptor, 0, _PARTS * size)
            return cls(descriptor, size)
        except OSError:
            os.close(descriptor)
            raise

    @classmethod
    def attach(cls, path: str, inode: int, size: int) -> Segment:
        """A segment created by another process. Raises `WireError` when it does not exist or is invalid."""
        if not _PATH.fullmatch(path):
            raise WireError(f"{path!r} is not the path of a shared segment.")
        try:
            status, device = os.stat(path), os.stat(_FOLDER).st_dev
            # On another machine, or after its creator has exited, the same path is another file.
            is_it = (status.st_dev, status.st_ino, status.st_nlink, status.st_uid) == (device, inode, 0, os.getuid())
            if not is_it or status.st_size != _PARTS * size or size <= 0:
                raise WireError(
                    f"{path} is not the shared segment {inode} of {_PARTS * size} bytes of this user: found file "
                    f"{status.st_ino} of {status.st_size} bytes."
                )
            return cls(os.open(path, os.O_RDWR | os.O_CLOEXEC), size)
        except OSError as error:
            raise WireError(f"The segment {path} is not on this machine: {error.strerror}.") from error

    def write(self, arrays: Iterable[Array], part: int) -> None:
        """Copies arrays of `needed` bytes into a part, one after another."""
        position = part * self.size
        for array in arrays:
            # NumPy would release the interpreter's lock, and then wait for it longer than the copy takes.
            self._view[position : position + array.nbytes] = array.reshape(-1).view(np.uint8).data
            position += array.nbytes + -array.nbytes % ALIGNMENT

    def read(self, offset: int, size: int, part: int) -> Array:
        """Bytes of a part: a view, valid until the part is written again. Raises `WireError` beyond its end."""
        if offset + size > self.size:
            raise WireError(f"A tensor ends at byte {offset + size} of a shared segment of {self.size}.")
        begin = part * self.size + offset
        return self._bytes[begin : begin + size]

    def close(self) -> None:
        """Closes it; the memory is freed once nobody uses it, or a view of it."""
        self._close()


def is_supported() -> bool:
    """Whether this system has in-memory files whose pages can be reserved: only Linux."""
    return os.path.isdir(_FOLDER) and hasattr(os, "posix_fallocate") and hasattr(os, "O_TMPFILE")


def aligned_copy(array: Array) -> Array:
    """A copy that TensorFlow can use without copying again."""
    copy = aligned(array.shape, array.dtype)
    copy[...] = array
    return copy


def needed(arrays: Iterable[Any]) -> int:
    """Bytes that arrays take in a part."""
    return sum(array.nbytes + -array.nbytes % ALIGNMENT for array in arrays)


logger = logging.getLogger(__name__)

_SMALLEST = 64 << 10  # bytes of a part
_LARGEST = 1 << 30
_KEY_BYTES = 16
_NO_PART = 0  # for the answer: its arrays must follow on the socket
_HANDSHAKE_SECONDS = 5.0
_CREDENTIALS = struct.Struct("3i")  # process, user and group of the peer


class ClientMemory:
    """The client's side of one connection; one call at a time.

    Args:
        attach: sends a message to the server's `Attach`; raises `ConnectionLostError` if it may work later, and another
            error if the server refuses.

    Attributes:
        link: the link, if there is one.
        usable: False if the server is on another machine.
    """

    def __init__(self, attach: Callable[[bytes], bytes], is_alive: Callable[[], bool]) -> None:
        self.lock = threading.Lock()
        self.link: ClientLink | None = None
        self._attach = attach
        self._is_alive = is_alive
        self._segment: Segment | None = None
        self._part = _NO_PART  # for the next answer
        self._in_use: dict[int, list[weakref.ref[Array]]] = {}  # weak references to arrays in use, by part
        self._wanted = _SMALLEST  # size of a part that previous frames would have needed
        self._has_room = True  # for a segment in memory
        self._lacked_parts = False  # whether both parts for answers were ever in use
        self.usable = is_supported()
        self._closed = False

    def encode(self, frame: Frame[Any], often: bool) -> Message | None:
        """The message to send by the link; None if there is no link.

        Args:
            often: such frames are sent repeatedly, so that a segment for them pays off.
        """
        encoded, arrays = encode_header(frame)
        size = needed(arrays)
        self._want(size, often)
        if self._segment is not None and self._segment.size < self._wanted and self._has_room:
            self.forget()
        if self.link is None and self.usable:
            self._open()
        if self.link is None:
            return None
        if self._segment is None:
            return Message(encoded, arrays)
        self._part = next((part for part in ANSWERS if self._is_free(part)), _NO_PART)
        self._lacked_parts |= self._part == _NO_PART
        encoded += bytes([self._part])
        if size > self._segment.size:
            return Message(encoded, arrays)
        self._segment.write(arrays, REQUEST)
        return Message(encoded)

    def _want(self, size: int, often: bool) -> None:
        if often and size <= _LARGEST:
            self._wanted = max(self._wanted, size)

    def _is_free(self, part: int) -> bool:
        return all(array() is None for array in self._in_use.get(part, ()))

    def decode(self, answer: Message, header_type: type[Any], often: bool) -> Frame[Any]:
        """The received answer."""
        segment = self._segment
        if answer.arrays or segment is None:
            frame = decode_header(answer.data, header_type, answer.read)
            self._want(needed(frame.tensors.values()), often)
            return frame
        used: list[weakref.ref[Array]] = []
        # A caller that keeps arrays for long would block the parts for later answers. A copy costs less than the
        # socket.
        copies = self._lacked_parts and not any(self._is_free(part) for part in ANSWERS if part != self._part)

        def read(offset: int, size: int) -> memoryview:
            array = segment.read(offset, size, self._part)
            if copies:
                return aligned_copy(array).data
            used.append(weakref.ref(array))
            return array.data  # every view of it keeps it alive

        frame = decode_header(answer.data, header_type, read)
        if used:
            self._in_use[self._part] = used
        return frame

    def forget(self) -> None:
        """Closes the link with its segment: a call over it failed, or may still run."""
        if self.link is not None:
            self.link.close()
            self.link = None
        if self._segment is not None:
            self._segment.close()
            self._segment = None

    def close(self) -> None:
        """Closes the link; a call running in another thread frees the memory at its end."""
        self._closed = True
        link = self.link
        if link is not None:
            link.close()
        if self.lock.acquire(blocking=False):
            try:
                self.forget()
            finally:
                self.lock.release()

    def shrink(self) -> None:
        """Frees memory, after frames larger than those to come."""
        with self.lock:
            self.forget()
            self._wanted = _SMALLEST

    def _open(self) -> None:
        key = secrets.token_bytes(_KEY_BYTES)
        message: dict[str, Any] = {"key": key.hex()}
        segment = self._made_segment()
        if segment is not None:
            message |= {"path": segment.path, "inode": segment.inode, "size": segment.size}
        try:
            with contextlib.closing(Listener()) as listener:
                self._attach(json.dumps({**message, "socket": listener.name}).encode())
                self.link = listener.accept(key, self._is_alive)
            self._segment, self._in_use = segment, {}
            if self._closed:
                self.link.close()
            return
        except ConnectionLostError:
            pass  # the next call waits for the server
        except Exception as error:
            self.usable = False
            logger.debug("No link to a server on this machine: %s", error)
        if segment is not None:
            segment.close()

    def _made_segment(self) -> Segment | None:
        if not self._has_room:
            return None
        try:
            # Some headroom: the number of embedding rows differs from batch to batch.
            return Segment.create(min(self._wanted + self._wanted // 4, _LARGEST))
        except OSError as error:
            self._has_room = False
            logger.warning(
                "No shared memory with a server on this machine: %s. Tensors are sent instead, which is slower.", error
            )
            return None


def attach(message: bytes, links: ServerLinks) -> None:
    """The server's side: connects to a client on this machine. Raises `WireError` if that is not possible."""
    try:
        given = json.loads(message)
        key, name = bytes.fromhex(given["key"]), str(given["socket"])
        where = (str(given["path"]), int(given["inode"]), int(given["size"])) if "path" in given else None
    except (ValueError, KeyError, TypeError) as error:
        raise WireError(f"A message to attach shared memory can't be read: {error}.") from error
    segment = None if where is None else Segment.attach(*where)
    try:
        links.serve(connect(name, key), segment)
    except OSError as error:
        if segment is not None:
            segment.close()
        raise WireError(f"No socket to a client of this machine: {error}.") from error


def request_in(message: Message, header_type: type[Any], segment: Segment | None) -> Frame[Any]:
    """The request in a received message. Its arrays are valid only during the call."""
    if segment is None or message.arrays:
        frame = decode_header(message.data, header_type, message.read)
    else:
        frame = decode_header(message.data, header_type, lambda offset, size: segment.read(offset, size, REQUEST).data)
    if segment is not None and message.data[-1] not in (_NO_PART, *ANSWERS):
        raise WireError(f"A frame requests its answer in part {message.data[-1]} of a segment, which has {ANSWERS}.")
    return frame


def answer_to(request: Message, frame: Frame[Any], segment: Segment | None) -> Message:
    """The message that answers a request."""
    encoded, arrays = encode_header(frame)
    part = _NO_PART if segment is None else request.data[-1]
    if segment is None or part == _NO_PART or needed(arrays) > segment.size:
        return Message(encoded, arrays)
    segment.write(arrays, part)
    return Message(encoded)


class Listener:
    """The client's end of a link over a Unix socket: waits for the one server to which it has sent `name` and a key.

    The socket has no file and closes when either process exits, so a caller that waits for a killed process is notified
    at once.

    Raises `OSError` if sockets are unsupported.
    """

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
