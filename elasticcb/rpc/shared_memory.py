"""Memory that two processes of one machine share, so that tensors between them are not sent, but written and read.

A segment is a file in memory (/dev/shm) that the client of a connection makes, with a part for its requests and two
for the answers, of which it may keep one in use. It has no name: the server opens it by the client's descriptor, and
the memory is freed when both have closed it, however they end. One call at a time uses a segment.
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

REQUEST = 0  # number of the part that requests lie in
ANSWERS = (1, 2)
_PARTS = 3


class Segment:
    """Memory in parts: one for requests, two for answers.

    Attributes:
        path: by which another process opens it, as long as its maker lives.
        inode: number of the file.
        size: bytes of each part.
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
        """A new one, readable by this user alone. Raises `OSError` when there is no room, or no such memory."""
        size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        descriptor = os.open(_FOLDER, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
        try:
            # Pages that can't be had would otherwise end the process when they are first written.
            os.posix_fallocate(descriptor, 0, _PARTS * size)
            fcntl.flock(descriptor, fcntl.LOCK_EX)  # the sign that its maker lives
            return cls(descriptor, size)
        except OSError:
            os.close(descriptor)
            raise

    @classmethod
    def attach(cls, path: str, inode: int, size: int) -> Segment:
        """One that another process made. Raises `WireError` when it is not there, or no segment."""
        if not _PATH.fullmatch(path):
            raise WireError(f"{path!r} is not the path of a shared segment.")
        try:
            status, device = os.stat(path), os.stat(_FOLDER).st_dev
            # Elsewhere, or after its maker has ended, the same path is another file.
            is_it = (status.st_dev, status.st_ino, status.st_nlink, status.st_uid) == (device, inode, 0, os.getuid())
            if not is_it or status.st_size != _PARTS * size or size <= 0:
                raise WireError(
                    f"{path} is not the shared segment {inode} of {_PARTS * size} bytes of this user: it is the file "
                    f"{status.st_ino} of {status.st_size} bytes."
                )
            return cls(os.open(path, os.O_RDWR | os.O_CLOEXEC), size)
        except OSError as error:
            raise WireError(f"The segment {path} is not on this machine: {error.strerror}.") from error

    @property
    def abandoned(self) -> bool:
        """Whether its maker is gone; asked by the other process."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                return False
            raise
        return True

    def write(self, arrays: Iterable[Array], part: int) -> None:
        """Puts arrays, `needed` bytes of them, one after another into a part."""
        position = part * self.size
        for array in arrays:
            # NumPy would let go of the interpreter's lock, and then wait for it longer than the copy takes.
            self._view[position : position + array.nbytes] = array.reshape(-1).view(np.uint8).data
            position += array.nbytes + -array.nbytes % SHARED_ALIGNMENT

    def read(self, offset: int, size: int, part: int) -> Array:
        """Bytes of a part: a view, valid until the part is written again. Raises `WireError` beyond its end."""
        if offset + size > self.size:
            raise WireError(f"A tensor ends at byte {offset + size} of a shared segment of {self.size}.")
        begin = part * self.size + offset
        return self._bytes[begin : begin + size]

    def close(self) -> None:
        """Lets go of it; the memory is freed when nobody uses it, or a view of it, any more."""
        self._close()


def is_supported() -> bool:
    """Whether this system has files in memory whose pages can be reserved: Linux has."""
    return os.path.isdir(_FOLDER) and hasattr(os, "posix_fallocate") and hasattr(os, "O_TMPFILE")


def aligned_copy(array: Array) -> Array:
    """A copy that TensorFlow takes without another one."""
    copy = aligned(array.shape, array.dtype)
    copy[...] = array
    return copy


def needed(arrays: Iterable[Any]) -> int:
    """Bytes that arrays take in a part."""
    return sum(array.nbytes + -array.nbytes % SHARED_ALIGNMENT for array in arrays)
