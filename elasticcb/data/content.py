"""Reads bytes of local or remote files by ranges, also of compressed ones; a file that changes meanwhile causes an
error.
"""

from __future__ import annotations

import codecs
import contextlib
import datetime
import errno
import gzip
import io
import os
import socket
import tempfile
import threading
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import PurePosixPath
from typing import Any, NamedTuple

import indexed_gzip

from elasticcb.errors import DataChangedError, DataError, SourceError
from elasticcb.storage.remote_files import is_url

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


class Content(ABC):
    """The bytes of a file, readable from several threads at once.

    Attributes:
        block_bytes: to read at once while scanning.
        memory_bytes: held in memory.
    """

    name: str
    block_bytes = LOCAL_BLOCK_BYTES
    memory_bytes = 0

    @property
    def disk_bytes(self) -> int:
        """In temporary files."""
        return 0

    @abstractmethod
    def read(self, start: int, stop: int) -> bytes:
        """The bytes `[start, stop)`; fewer at the end of the file. Raises `DataError` if the file has changed."""


class File(Content):
    """A file as stored, not decompressed."""

    identity: Identity

    @abstractmethod
    def check(self) -> None:
        """Raises `DataError` if the file has changed since it was opened or indexed."""


class LocalFile(File):
    """A local file."""

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


class RemoteFile(File):
    """A file read with fsspec."""

    block_bytes = _REMOTE_BLOCK_BYTES

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
            raise SourceError(
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


def _gone(name: str, error: Exception) -> SourceError:
    return SourceError(
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
        file: File = RemoteFile(name) if is_url(name) else LocalFile(name)
    except Exception as error:
        if expected is not None:
            raise _gone(name, error) from error
        raise SourceError(f"{name} can't be opened: {type(error).__name__}: {error}") from error
    if expected is not None and not expected.matches(file.identity):
        raise _changed(name, expected, file.identity)
    return file


class MemoryContent(Content):
    """Bytes in memory."""

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


_SEEK_SPACING_BYTES = 8 << 20  # bytes of uncompressed data between points at which decompression can start
_MOST_SEEK_POINTS = 4096  # maximum number per file; each has 32 KiB
_GZIP_MAGIC = b"\x1f\x8b\x08"
# bytes that a temporary file counts in addition to its size, because open files are limited
_OPEN_FILE_BYTES = 64 << 20

COMPRESSIONS = (".gz",)
_NOT_READ = (".bz2", ".xz", ".zst", ".lz4", ".zip")


def compression_of(file: File, is_plain: Callable[[bytes], bool] = lambda head: False) -> str:
    """One of `COMPRESSIONS`, or "": from the file extension; gzip also from the first bytes.

    Args:
        is_plain: whether the first 12 bytes are known to be uncompressed, even if they look like gzip.

    Raises `DataError` if the file extension is that of another compression.
    """
    ending = PurePosixPath(file.name.lower()).suffix
    if ending in _NOT_READ:
        raise DataError(
            f"{file.name} is compressed in the format {ending}, which is not supported. Expected gzip, or no "
            "compression. Compress the file with gzip instead."
        )
    if ending in COMPRESSIONS:
        return ending if file.identity.size else ""
    head = file.read(0, 12)
    return ".gz" if head.startswith(_GZIP_MAGIC) and not is_plain(head) else ""


def opened_content(file: File, compression: str, seek_points: bytes = b"") -> Content:
    """The decompressed content of `file`.

    Args:
        seek_points: seek points of a gzip file from `seek_points_of`; without them, it is read sequentially.
    """
    if not compression:
        return file
    return SeekableGzip(file, seek_points) if seek_points else GzipStream(file)


class GzipStream(Content):
    """A gzip file that is read sequentially with its checksums; reading earlier bytes starts again from the
    beginning."""

    def __init__(self, file: File) -> None:
        self.name = file.name
        self._file = file
        self._lock = threading.Lock()
        self._stream: Any = None
        self._last = (0, b"")  # offset of the last bytes, and these bytes

    def read(self, start: int, stop: int) -> bytes:
        with self._lock, _damage_named(self.name):
            if self._stream is None:
                self._stream = gzip.GzipFile(fileobj=raw_file(self._file))
            last_start, last = self._last
            data = last[start - last_start : stop - last_start] if start >= last_start else b""
            if start + len(data) < stop:
                self._stream.seek(start + len(data))
                data += self._stream.read(stop - start - len(data))
            self._last = (start, data)
            return data


class SeekableGzip(Content):
    """A gzip file with random access, by points at which decompression can start."""

    def __init__(self, file: File, seek_points: bytes) -> None:
        self.name = file.name
        self._file = file
        self._lock = threading.Lock()
        self.memory_bytes = len(seek_points)
        self._stream = indexed_gzip.IndexedGzipFile(fileobj=raw_file(file), auto_build=False)
        self._stream.import_index(fileobj=io.BytesIO(seek_points))

    def read(self, start: int, stop: int) -> bytes:
        with self._lock, _damage_named(self.name):
            try:
                self._stream.seek(start)
                data: bytes = self._stream.read(stop - start)
            except indexed_gzip.ZranError:
                self._file.check()  # it may look damaged because the file was replaced
                raise
            return data


def seek_points_of(file: File) -> bytes:
    """Points in a gzip file at which decompression can start, for `SeekableGzip`; reads the whole file."""
    spacing = max(_SEEK_SPACING_BYTES, file.identity.size * 4 // _MOST_SEEK_POINTS)
    with _damage_named(file.name):
        stream = indexed_gzip.IndexedGzipFile(fileobj=raw_file(file), spacing=spacing)
        stream.build_full_index()
        points = io.BytesIO()
        stream.export_index(fileobj=points)
    return points.getvalue()


class SpooledContent(Content):
    """Stores sequentially read data in an unnamed temporary file, which the system removes with the process. It is
    filled only as far as needed.
    """

    def __init__(self, source: Content, begin: Callable[[], Callable[[int], bytes]]) -> None:
        self.name = source.name
        self._source = source
        self._read_on = begin()
        self._lock = threading.Lock()
        self._spool = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as this object
        self._size = 0
        self._ended = False

    @property
    def disk_bytes(self) -> int:
        return self._size + _OPEN_FILE_BYTES + self._source.disk_bytes

    def read(self, start: int, stop: int) -> bytes:
        with self._lock:
            while self._size < stop and not self._ended:
                with _damage_named(self.name):
                    data = self._read_on(LOCAL_BLOCK_BYTES)
                self._ended = not data
                self._keep(data)
            return os.pread(self._spool.fileno(), max(min(stop, self._size) - start, 0), start)

    def _keep(self, data: bytes) -> None:
        view = memoryview(data)
        try:
            while view:
                written = os.pwrite(self._spool.fileno(), view, self._size)
                self._size, view = self._size + written, view[written:]
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise SourceError(
                f"{self.name} must be decompressed or decoded to a temporary file, but {tempfile.gettempdir()} is "
                f"full after {self._size:,} bytes. Set TMPDIR to a folder with enough space, or convert the file to "
                "gzip or plain UTF-8."
            ) from error


def decoded(content: Content, encoding: str) -> Content:
    """`content` in UTF-8."""

    def begin() -> Callable[[int], bytes]:
        decoder = codecs.getincrementaldecoder(encoding)()
        place = lines = 0

        def read_on(count: int) -> bytes:
            nonlocal place, lines
            while True:
                data = content.read(place, place + count)
                try:
                    text = decoder.decode(data, final=not data)
                except UnicodeDecodeError as error:
                    at = place + len(data) - len(error.object) + error.start
                    line = lines + error.object.count(b"\n", 0, error.start) + 1
                    raise DataError(
                        f"{content.name}, line {line}, is not valid {encoding}: {error.reason} at byte {at}. Set the "
                        "reader parameter `encoding` to the file's encoding."
                    ) from error
                place += len(data)
                lines += text.count("\n")
                if text or not data:
                    return text.encode()

        return read_on

    return SpooledContent(content, begin)


@contextlib.contextmanager
def _damage_named(name: str) -> Iterator[None]:
    """Turns the errors of decompression into a `DataError` that names the file."""
    try:
        yield
    except DataError:
        raise
    except (OSError, EOFError, ValueError, zlib.error, indexed_gzip.ZranError) as error:
        if isinstance(error, indexed_gzip.ZranError) and isinstance(error.__cause__, DataError):
            raise error.__cause__ from None
        raise SourceError(
            f"{name} can't be decompressed: {error}. The file is damaged or incomplete. Write it again."
        ) from error
