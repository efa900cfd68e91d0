"""Memory shared by two processes of one machine, so that tensors are written and read instead of sent.

A segment is an in-memory file (/dev/shm) created by the client of a connection, with one part for its requests and two
for answers, of which it may keep one in use. It has no name: the server opens it through the client's file descriptor,
and the memory is freed once both have closed it, however they exit. One call at a time uses a segment.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import re
import weakref
from collections.abc import Iterable
from typing import Any

import numpy as np

from elasticcb.errors import WireError
from elasticcb.rpc.tensors import SHARED_ALIGNMENT, Array, aligned

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
