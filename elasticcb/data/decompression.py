"""Reads compressed or encoded files by ranges."""

from __future__ import annotations

import codecs
import contextlib
import errno
import gzip
import io
import os
import tempfile
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import PurePosixPath
from typing import Any

import indexed_gzip

from elasticcb.data.content import LOCAL_BLOCK_BYTES, Content, File, raw_file
from elasticcb.errors import DataError

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


class GzipStream:
    """A gzip file that is read sequentially with its checksums; reading earlier bytes starts again from the
    beginning."""

    block_bytes = LOCAL_BLOCK_BYTES
    memory_bytes = disk_bytes = 0

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


class SeekableGzip:
    """A gzip file with random access, by points at which decompression can start."""

    block_bytes = LOCAL_BLOCK_BYTES
    disk_bytes = 0

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


class SpooledContent:
    """Stores sequentially read data in an unnamed temporary file, which the system removes with the process. It is
    filled only as far as needed.
    """

    block_bytes = LOCAL_BLOCK_BYTES
    memory_bytes = 0

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
            raise DataError(
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
        raise DataError(
            f"{name} can't be decompressed: {error}. The file is damaged or incomplete. Write it again."
        ) from error
