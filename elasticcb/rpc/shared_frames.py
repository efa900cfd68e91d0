"""Frames whose arrays are in memory shared by client and server, if they are on one machine.

The client creates a segment and sends its path to the server (`Attach`); a server that can't open it is on another
machine, and frames are sent whole. A frame that does not fit is also sent whole, and enlarges the next segment. A
failed call may still be running, so its segment is never reused.

Each segment comes with a link (elasticcb/rpc/link.py), a Unix socket for the headers; if it is not possible, gRPC is
used for them.

Arrays of an answer are views of the segment. It has two parts for answers, and the client names one in which no array
is in use; if both are in use, the answer is sent whole. From then on the client copies the arrays of an answer if the
other part is in use, so that one part stays free.

A segment is an in-memory file (/dev/shm) created by the client of a connection, with one part for its requests and two
for answers. It has no name: the server opens it through the client's file descriptor, and the memory is freed once both
have closed it, however they exit. One call at a time uses a segment.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
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
from typing import Any, NamedTuple

import numpy as np

from elasticcb.errors import ConnectionLostError, WireError
from elasticcb.rpc import frame_pieces
from elasticcb.rpc.link import ClientLink, Message, ServerLinks
from elasticcb.rpc.tensors import (
    SHARED_ALIGNMENT,
    Array,
    Frame,
    aligned,
    decode_frame,
    decode_header,
    encode_frame,
    encode_header,
    has_arrays,
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
        self._descriptor = descriptor
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
            fcntl.flock(descriptor, fcntl.LOCK_EX)  # marks the creator as alive
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

    @property
    def abandoned(self) -> bool:
        """Whether its creator has exited; used by the other process."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                return False
            raise
        return True

    def write(self, arrays: Iterable[Array], part: int) -> None:
        """Copies arrays of `needed` bytes into a part, one after another."""
        position = part * self.size
        for array in arrays:
            # NumPy would release the interpreter's lock, and then wait for it longer than the copy takes.
            self._view[position : position + array.nbytes] = array.reshape(-1).view(np.uint8).data
            position += array.nbytes + -array.nbytes % SHARED_ALIGNMENT

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
    return sum(array.nbytes + -array.nbytes % SHARED_ALIGNMENT for array in arrays)


logger = logging.getLogger(__name__)

_SMALLEST = 64 << 10  # bytes of a part
_LARGEST = 1 << 30
_KEY_BYTES = 16
_TAIL_BYTES = _KEY_BYTES + 1  # after a header: the segment's key, and the part for the answer
_WHOLE = 0  # instead of a part: the answer must contain its arrays
_LINKED = b"linked"  # the answer of `Attach` once the server has connected
_HANDSHAKE_SECONDS = 5.0
_CREDENTIALS = struct.Struct("3i")  # process, user and group of the peer


class UnknownSegmentError(WireError):
    """A frame refers to a segment that this server has not attached: the server was restarted."""


class ClientMemory:
    """The client's side of one connection; one call at a time.

    Args:
        attach: sends a message to the server's `Attach`; raises `ConnectionLostError` if it may work later, and another
            error if the server refuses.

    Attributes:
        link: for frames without arrays, if available.
        usable: whether a segment may be used; False if the server is on another machine, or memory is short.
    """

    def __init__(self, attach: Callable[[bytes], bytes], is_alive: Callable[[], bool]) -> None:
        self.lock = threading.Lock()
        self.link: ClientLink | None = None
        self._attach = attach
        self._is_alive = is_alive
        self._segment: Segment | None = None
        self._key = b""
        self._part = _WHOLE  # for the next answer
        self._in_use: dict[int, list[weakref.ref[Array]]] = {}  # weak references to arrays in use, by part
        self._wanted = _SMALLEST  # size of a part that previous frames would have needed
        self._lacked_parts = False  # whether an answer was ever sent whole because both parts were in use
        self.usable = is_supported()
        self._closed = False

    def takes(self, size: int, often: bool) -> bool:
        """Whether a frame with that many bytes of arrays may be sent as one.

        Args:
            often: such frames are sent repeatedly, so a large segment pays off.
        """
        return size <= frame_pieces.LARGEST_FRAME or (often and self.usable and size <= _LARGEST)

    def encode(self, frame: Frame[Any]) -> Message:
        """The bytes to send for a request."""
        size = needed(frame.tensors.values())
        self._wanted = max(self._wanted, size)
        segment = self._usable_segment()
        if segment is None or size > segment.size:
            return Message(encode_frame(frame))
        encoded, arrays = encode_header(frame)
        segment.write(arrays, REQUEST)
        self._part = next((part for part in ANSWERS if self._is_free(part)), _WHOLE)
        self._lacked_parts |= self._part == _WHOLE
        return Message(encoded + self._key + bytes([self._part]))

    def _is_free(self, part: int) -> bool:
        return all(array() is None for array in self._in_use.get(part, ()))

    def decode(self, answer: Message, header_type: type[Any]) -> Frame[Any]:
        """The received answer."""
        data = answer.data
        if has_arrays(data) or self._segment is None:
            frame = decode_frame(data, header_type)
            self._wanted = max(self._wanted, needed(frame.tensors.values()))
            return frame
        segment = self._segment
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

        frame = decode_header(data, header_type, read)
        if used:
            self._in_use[self._part] = used
        return frame

    def forget(self) -> None:
        """Starts with a new segment: the server may still be writing into this one, or does not know it."""
        if self.link is not None:
            self.link.close()
            self.link = None
        if self._segment is not None:
            self._segment.close()
            self._segment = None

    def close(self) -> None:
        """Stops using memory; a call running in another thread frees it at its end."""
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
        """Frees the segment, after frames larger than those to come."""
        with self.lock:
            self.forget()
            self._wanted = _SMALLEST

    def _usable_segment(self) -> Segment | None:
        if self._segment is not None and self._segment.size < self._wanted <= _LARGEST:
            self.forget()
        if self._segment is None and self.usable and self._wanted <= _LARGEST:
            self._make()
        return self._segment

    def _make(self) -> None:
        try:
            # Some headroom: the number of embedding rows differs from batch to batch.
            segment = Segment.create(min(self._wanted + self._wanted // 4, _LARGEST))
        except OSError as error:
            self.usable = False
            logger.warning(
                "No shared memory with a server on this machine: %s. Tensors are sent instead, which is slower.", error
            )
            return
        key = secrets.token_bytes(_KEY_BYTES)
        listener = _listener()
        message = {
            "path": segment.path, "inode": segment.inode, "size": segment.size, "key": key.hex(),
            "socket": listener.name if listener else "",
        }  # fmt: skip
        try:
            answer = self._attach(json.dumps(message).encode())
            self._segment, self._key, self._in_use = segment, key, {}
            if listener is not None and answer == _LINKED:
                with contextlib.suppress(OSError):
                    self.link = listener.accept(key, self._is_alive)
                    if self._closed:
                        self.link.close()
        except ConnectionLostError:
            segment.close()  # the next call waits for the server
        except Exception as error:
            self.usable = False
            segment.close()
            logger.debug("The server does not share memory: %s", error)
        finally:
            if listener is not None:
                listener.close()


def _listener() -> Listener | None:
    try:
        return Listener()
    except OSError as error:
        logger.debug("No sockets between processes of this machine: %s", error)
        return None


class ServerMemory:
    """The server's side of all its connections."""

    def __init__(self, links: ServerLinks) -> None:
        self._links = links
        self._segments: dict[bytes, Segment] = {}
        self._lock = threading.Lock()

    def attach(self, message: bytes) -> bytes:
        """Maps a client's segment and connects to it; returns the answer. Raises `WireError` when mapping fails."""
        try:
            given = json.loads(message)
            path, inode, size = str(given["path"]), int(given["inode"]), int(given["size"])
            key, socket = bytes.fromhex(given["key"]), str(given["socket"])
        except (ValueError, KeyError, TypeError) as error:
            raise WireError(f"A message to attach shared memory can't be read: {error}.") from error
        segment = Segment.attach(path, inode, size)
        with self._lock:
            for old in [old for old, other in self._segments.items() if other.abandoned]:
                self._segments.pop(old).close()
            self._segments[key] = segment
        linked = socket and self._link(socket, key)
        if not linked and segment.abandoned:  # the client has exited meanwhile, which would go unnoticed
            self._detach(key)
        return _LINKED if linked else b""

    def _link(self, socket: str, key: bytes) -> bool:
        try:
            connected = connect(socket, key)
        except OSError as error:
            logger.debug("No socket to a client of this machine: %s", error)
            return False
        return self._links.serve(connected, lambda: self._detach(key))

    def _detach(self, key: bytes) -> None:
        with self._lock:
            segment = self._segments.pop(key, None)
        if segment is not None:
            segment.close()

    def decode(self, data: bytes, header_type: type[Any]) -> tuple[Frame[Any], Reply]:
        """The request in the received bytes, and where its answer goes. Its arrays may be in a segment, and are then
        valid only during the call.

        Raises `UnknownSegmentError` for a segment that is not attached.
        """
        if has_arrays(data):
            return decode_frame(data, header_type), Reply(None, _WHOLE)
        with self._lock:
            segment = self._segments.get(data[-_TAIL_BYTES:-1])
        if segment is None:
            raise UnknownSegmentError("A frame refers to shared memory that is not attached.")
        part = data[-1]
        if part not in (_WHOLE, *ANSWERS):
            raise WireError(f"A frame requests its answer in part {part} of a segment, which has {ANSWERS}.")
        frame = decode_header(data, header_type, lambda offset, size: segment.read(offset, size, REQUEST).data)
        return frame, Reply(segment, part)


class Reply(NamedTuple):
    """Where the answer to a request goes.

    Attributes:
        segment: segment of the request; None if it was sent whole.
        part: part of the segment for the answer.
    """

    segment: Segment | None
    part: int

    @property
    def borrowed(self) -> bool:
        """Whether arrays of the request are valid only during the call."""
        return self.segment is not None

    def takes(self, size: int) -> bool:
        """Whether an answer with that many bytes of arrays may be sent as one."""
        return size <= frame_pieces.LARGEST_FRAME or (
            self.segment is not None and self.part != _WHOLE and size <= self.segment.size
        )

    def encode(self, frame: Frame[Any]) -> Message:
        """The bytes to answer."""
        fits = self.segment is not None and needed(frame.tensors.values()) <= self.segment.size
        if self.segment is None or not fits or (frame.tensors and self.part == _WHOLE):
            return Message(encode_frame(frame))
        encoded, arrays = encode_header(frame)
        self.segment.write(arrays, self.part)
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
