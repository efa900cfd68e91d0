"""Reads bytes of local or remote files by ranges; a file that changes meanwhile causes an error."""

from __future__ import annotations

import datetime
import io
import os
import socket
from typing import Any, NamedTuple, Protocol

from elasticcb.errors import DataChangedError, DataError

LOCAL_BLOCK_BYTES = 512 << 10  # fits in a core's cache while it is scanned several times
_REMOTE_BLOCK_BYTES = 16 << 20  # makes a request's latency small compared to its transfer time
_VERSION_KEYS = ("ETag", "etag", "md5Hash", "mtime", "LastModified", "last_modified", "modified", "created")


class Identity(NamedTuple):
    """The identity of a file when it was indexed."""

    size: int  # bytes
    version: str  # modification time, or a remote store's version; "": unknown
    machine: str  # where that time is valid: copies on other machines have another; "": everywhere

    def matches(self, other: Identity) -> bool:
        same_clock = self.machine == other.machine and self.version and other.version
        return self.size == other.size and (not same_clock or self.version == other.version)


class Content(Protocol):
    """The bytes of a file, readable from several threads at once."""

    name: str
    block_bytes: int  # bytes to read at once while scanning
    memory_bytes: int  # bytes held in memory

    @property
    def disk_bytes(self) -> int: ...  # bytes in temporary files

    def read(self, start: int, stop: int) -> bytes:
        """The bytes `[start, stop)`; fewer at the end of the file. Raises `DataError` if the file has changed."""


class File(Content, Protocol):
    """A file as stored, not decompressed."""

    identity: Identity

    def check(self) -> None:
        """Raises `DataError` if the file has changed since it was opened or indexed."""


def is_remote(name: str) -> bool:
    return "://" in name


class LocalFile:
    """A local file."""

    block_bytes = LOCAL_BLOCK_BYTES
    memory_bytes = disk_bytes = 0

    def __init__(self, name: str) -> None:
        self.name = name
        with open(name, "rb", buffering=0) as file:  # fails here if a permission is missing
            self.identity = self._identity_of(os.fstat(file.fileno()))

    def check(self) -> None:
        try:
            self._compare(os.stat(self.name))
        except OSError as error:
            raise _gone(self.name, error) from error

    # Opened for each read, because a data set may have more files than a process may keep open. Not memory-mapped: if
    # the file shrank, SIGBUS would kill the process.
    def read(self, start: int, stop: int) -> bytes:
        try:
            with open(self.name, "rb") as file:
                file.seek(start)
                data = file.read(stop - start)
                status = os.fstat(file.fileno())  # after the read, so that `data` is from the opened file
        except OSError as error:
            raise _gone(self.name, error) from error
        self._compare(status)
        return data

    def _compare(self, status: os.stat_result) -> None:
        now = self._identity_of(status)
        if not self.identity.matches(now):
            raise _changed(self.name, self.identity, now)

    @staticmethod
    def _identity_of(status: os.stat_result) -> Identity:
        return Identity(status.st_size, str(status.st_mtime_ns), socket.gethostname())


class RemoteFile:
    """A file read with fsspec."""

    block_bytes = _REMOTE_BLOCK_BYTES
    memory_bytes = disk_bytes = 0

    def __init__(self, name: str) -> None:
        import fsspec

        self.name = name
        self._file_system, self._path = fsspec.core.url_to_fs(name)
        self.identity = self._present()

    def check(self) -> None:
        try:
            now = self._present()
        except Exception as error:
            raise _gone(self.name, error) from error
        if not self.identity.matches(now):
            raise _changed(self.name, self.identity, now)

    def read(self, start: int, stop: int) -> bytes:
        stop = min(stop, self.identity.size)
        if start >= stop:
            return b""
        try:
            data: bytes = self._file_system.cat_file(self._path, start=start, end=stop)
        except Exception as error:
            raise DataError(
                f"Bytes [{start}, {stop}) of {self.name} can't be read: {type(error).__name__}: {error}"
            ) from error
        if len(data) != stop - start:
            raise _changed(self.name, self.identity, Identity(start + len(data), "", ""))
        return data

    def _present(self) -> Identity:
        parent = self._path.rsplit("/", 1)[0]
        self._file_system.invalidate_cache(parent)  # listings that fsspec caches
        info = self._file_system.info(self._path)
        version = next((str(info[key]) for key in _VERSION_KEYS if info.get(key)), "")
        return Identity(int(info["size"]), version, "")


def _changed(name: str, before: Identity, now: Identity) -> DataChangedError:
    return DataChangedError(
        f"{name} was changed while the job used it: it had {_described(before)} when it was indexed, and has "
        f"{_described(now)} now. Data must not change while a job uses it. Start the job again when the file is "
        "complete; add records in new files."
    )


def _gone(name: str, error: Exception) -> DataError:
    return DataError(
        f"{name} can't be read any more ({type(error).__name__}: {error}). Restore the file, and start the job again."
    )


def _described(identity: Identity) -> str:
    size = f"{identity.size:,} bytes"
    if identity.machine and identity.version:
        when = datetime.datetime.fromtimestamp(int(identity.version) / 1e9)
        return f"{size} (modified {when:%Y-%m-%d %H:%M:%S.%f})"
    return f"{size} (version {identity.version})" if identity.version else size


def open_file(name: str, expected: Identity | None = None) -> File:
    """Opens the stored file. Raises `DataError` if it is missing or unreadable, or differs from `expected`."""
    try:
        file: File = RemoteFile(name) if is_remote(name) else LocalFile(name)
    except Exception as error:
        if expected is not None:
            raise _gone(name, error) from error
        raise DataError(f"{name} can't be opened: {type(error).__name__}: {error}") from error
    if expected is not None and not expected.matches(file.identity):
        raise _changed(name, expected, file.identity)
    return file


class MemoryContent:
    """Bytes in memory."""

    block_bytes = LOCAL_BLOCK_BYTES
    disk_bytes = 0

    def __init__(self, name: str, data: bytes) -> None:
        self.name = name
        self.memory_bytes = len(data)
        self._data = data

    def read(self, start: int, stop: int) -> bytes:
        return self._data[start:stop]


def raw_file(content: Content) -> Any:
    """`content` as a Python file object; for one thread."""
    return io.BufferedReader(_Raw(content), LOCAL_BLOCK_BYTES)


class _Raw(io.RawIOBase):
    """Reads a content sequentially."""

    def __init__(self, content: Content) -> None:
        self._content = content
        self._place = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if whence == io.SEEK_END:
            identity = getattr(self._content, "identity", None)
            if identity is None:
                raise io.UnsupportedOperation("the size of this file is not known")
            offset += identity.size
        elif whence == io.SEEK_CUR:
            offset += self._place
        self._place = offset
        return offset

    def tell(self) -> int:
        return self._place

    def readinto(self, buffer: Any) -> int:
        data = self._content.read(self._place, self._place + len(buffer))
        buffer[: len(data)] = data
        self._place += len(data)
        return len(data)
