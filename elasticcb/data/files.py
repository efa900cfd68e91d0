"""Files behind a data origin, local or remote, and their bytes by ranges."""

from __future__ import annotations

import bz2
import glob
import gzip
import lzma
import os
import re
import threading
import zlib
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

from elasticcb.data.reader import CHUNK_BYTES, Reader, Source
from elasticcb.errors import DataError

_LOCAL_BLOCK_BYTES = 1 << 20  # stays in a core's cache while it is scanned several times
_REMOTE_BLOCK_BYTES = 16 << 20  # makes the latency of a request small against its transfer
_CACHE_BYTES = 1 << 30  # of indexes and decompressed files that a reader keeps
_SCANNING_THREADS = 8  # remote stores answer slowly, but many at once

DECOMPRESSORS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.decompress,
    ".bz2": bz2.decompress,
    ".xz": lzma.decompress,
}
_PART_OF_MANY = re.compile(r"-\d+-of-\d+(?=\.|$)")  # train.tfrecord-00000-of-00010


def endings_of(name: str) -> tuple[str, str]:
    """The ending that tells the format of a file, and that of its compression: (".csv", ".gz"), (".npy", "")."""
    path = PurePosixPath(_PART_OF_MANY.sub("", name.lower()))
    compression = path.suffix if path.suffix in DECOMPRESSORS else ""
    return PurePosixPath(path.name.removesuffix(compression)).suffix, compression


def is_remote(name: str) -> bool:
    return "://" in name


def list_files(origin: str) -> list[str]:
    """The files that `origin` stands for, sorted, each once: absolute paths or URLs.

    `origin` is a path, a glob, a folder (searched to the bottom), a URL of one of these, or several
    joined by commas. Files and folders whose names begin with `.` or `_` are left out of folders and
    globs. Raises `DataError` when a part stands for nothing.
    """
    if not is_remote(origin) and os.path.isfile(os.path.expanduser(origin)):
        return [os.path.abspath(os.path.expanduser(origin))]  # a comma or a star may be part of its name
    parts = [part.strip() for part in origin.split(",") if part.strip()]
    if not parts:
        raise DataError(
            f"The data origin {origin!r} names no file. Give a path, a glob, a folder or a URL, or several "
            "joined by commas."
        )
    return sorted({name for part in parts for name in _files_of(part)})


def _files_of(part: str) -> list[str]:
    part = part.removeprefix("file://")
    try:
        found = _remote_files(part) if is_remote(part) else _local_files(part)
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"The data at {part} can't be listed: {type(error).__name__}: {error}") from error
    if not found:
        raise DataError(
            f"There is no data at {part}: it is no file, and no folder or glob with files in it "
            "(files whose names begin with '.' or '_' do not count). Check the path."
        )
    return found


def _local_files(part: str) -> list[str]:
    path = os.path.abspath(os.path.expanduser(part))
    if os.path.isfile(path):
        return [path]
    if os.path.isdir(path):
        files = [os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names]
        return [name for name in files if not _hidden(os.path.relpath(name, path))]
    matches = [name for name in glob.glob(path, recursive=True) if not _hidden(os.path.basename(name))]
    return [file for match in matches for file in _local_files(match)]


def _remote_files(part: str) -> list[str]:
    import fsspec

    file_system, path = fsspec.core.url_to_fs(part)
    if file_system.isfile(path):
        return [part]
    if any(mark in path for mark in "*?["):
        found = [name for name in file_system.glob(path) if not _hidden(PurePosixPath(name).name)]
    else:
        found = [name for name in file_system.find(path) if not _hidden(name.removeprefix(path).lstrip("/"))]
    # Not `unstrip_protocol`: it loses the host of sftp:// and hdfs:// URLs.
    whole = part.rstrip("/")
    prefix = whole.removesuffix(path)
    names = [name for name in found if file_system.isfile(name)]
    return [file_system.unstrip_protocol(name) if prefix == whole else prefix + name for name in names]


def _hidden(relative: str) -> bool:
    return any(piece.startswith((".", "_")) for piece in Path(relative).parts)


class Content(Protocol):
    """The bytes of a file, readable from several threads at once."""

    name: str
    size: int  # bytes
    block_bytes: int  # how much to read at once while scanning
    memory_bytes: int  # how much of it is held in memory

    def read(self, start: int, stop: int) -> bytes:
        """The bytes `[start, stop)`. Raises `DataError` when the file ends before `stop`."""


class _LocalContent:
    block_bytes = _LOCAL_BLOCK_BYTES
    memory_bytes = 0

    def __init__(self, name: str) -> None:
        self.name = name
        with open(name, "rb", buffering=0) as file:
            self.size = os.fstat(file.fileno()).st_size

    # Opened for each read, since a data set may have more files than a process may keep open. Not a memory
    # map: a file that shrinks would kill the process with SIGBUS instead of an error.
    def read(self, start: int, stop: int) -> bytes:
        try:
            with open(self.name, "rb") as file:
                file.seek(start)
                data = file.read(stop - start)
        except OSError as error:
            raise DataError(
                f"{self.name} can't be read any more ({type(error).__name__}: {error}). Put it back, and start the "
                "job again."
            ) from error
        if len(data) < stop - start:
            raise _shrunk(self.name, start + len(data), self.size)
        return data


class _RemoteContent:
    block_bytes = _REMOTE_BLOCK_BYTES
    memory_bytes = 0

    def __init__(self, name: str) -> None:
        import fsspec

        self.name = name
        self._file_system, self._path = fsspec.core.url_to_fs(name)
        self.size = int(self._file_system.info(self._path)["size"])

    def read(self, start: int, stop: int) -> bytes:
        if start == stop:
            return b""
        try:
            data: bytes = self._file_system.cat_file(self._path, start=start, end=stop)
        except Exception as error:
            raise DataError(
                f"Bytes [{start}, {stop}) of {self.name} can't be read: {type(error).__name__}: {error}"
            ) from error
        if len(data) != stop - start:
            raise _shrunk(self.name, start + len(data), self.size)
        return data


class MemoryContent:
    """A file's bytes, decompressed or decoded in memory."""

    block_bytes = _LOCAL_BLOCK_BYTES

    def __init__(self, name: str, data: bytes) -> None:
        self.name = name
        self.size = self.memory_bytes = len(data)
        self._data = data

    def read(self, start: int, stop: int) -> bytes:
        return self._data[start:stop]


def _shrunk(name: str, end: int, size: int) -> DataError:
    return DataError(
        f"{name} ends at byte {end}, and had {size} bytes when it was opened: it was changed while the job "
        "read it. Start the job again when the file is whole."
    )


def open_content(name: str) -> Content:
    """The bytes of the file `name`; a file in .gz, .bz2 or .xz is decompressed into memory.

    Raises `DataError` when it is missing, unreadable, or its compression is damaged.
    """
    try:
        content: Content = _RemoteContent(name) if is_remote(name) else _LocalContent(name)
    except Exception as error:
        raise DataError(f"{name} can't be opened: {type(error).__name__}: {error}") from error
    decompress = DECOMPRESSORS.get(endings_of(name)[1])
    if decompress is None:
        return content
    try:
        return MemoryContent(name, decompress(content.read(0, content.size)) if content.size else b"")
    except (OSError, EOFError, ValueError, zlib.error, lzma.LZMAError) as error:
        raise DataError(
            f"{name} can't be decompressed: {error}. It is damaged or was not copied to its end; write it again."
        ) from error


def spans(offsets: Any, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Cuts records `[start, end)` into ranges of `CHUNK_BYTES` or a single record.

    `offsets` are the byte offsets of all records, int64 of shape (records + 1,).
    """
    while start < end:
        stop = int(offsets.searchsorted(offsets[start] + CHUNK_BYTES, side="right")) - 1
        stop = min(max(stop, start + 1), end)
        yield start, stop
        start = stop


class Opened(Protocol):
    """A file whose records are known."""

    @property
    def count(self) -> int: ...  # records

    @property
    def layout(self) -> str: ...  # in words: what all files of one origin must have in common; "": unknown

    @property
    def memory_bytes(self) -> int: ...  # what keeping it costs


class FileReader(Reader):
    """A reader of files of one format, whose indexes it keeps in memory up to a limit."""

    def __init__(self, files: Sequence[str]) -> None:
        self._files = list(files)
        self._sources: list[Source] | None = None
        self._lock = threading.Lock()
        self._cache: OrderedDict[str, Any] = OrderedDict()

    @abstractmethod
    def _open(self, name: str) -> Any:
        """An `Opened` of the format."""

    def sources(self) -> list[Source]:
        """The files that have records.

        Raises `DataError` when a file can't be read, none has records, or their columns differ.
        """
        if self._sources is None:
            with ThreadPoolExecutor(min(_SCANNING_THREADS, len(self._files))) as pool:
                surveys = list(pool.map(self._survey, self._files))
            first: tuple[str, str] | None = None
            for name, (count, layout) in zip(self._files, surveys, strict=True):
                if not count or not layout:
                    continue
                if first is None:
                    first = name, layout
                elif layout != first[1]:
                    raise DataError(
                        f"{name} holds {layout}, but {first[0]} holds {first[1]}. All files of one data "
                        "origin must agree."
                    )
            self._sources = [
                Source(name, count) for name, (count, _) in zip(self._files, surveys, strict=True) if count
            ]
            if not self._sources:
                raise DataError(f"There is no record in {_listed(self._files)}. Give data with at least one record.")
        return list(self._sources)

    def read(self, name: str, start: int, end: int) -> Iterator[Any]:
        from elasticcb.data.stacking import flatten, pack

        spec = self.element_spec
        for chunk in self.read_chunks(name, start, end):
            columns = flatten(spec, chunk)
            for row in zip(*columns, strict=True):
                yield pack(spec, iter(row))

    def opened(self, name: str) -> Any:
        """The index of the file `name`, from the cache or by scanning the file."""
        with self._lock:
            if name in self._cache:
                self._cache.move_to_end(name)
                return self._cache[name]
        opened: Opened = self._open(name)
        with self._lock:
            self._cache[name] = opened
            while len(self._cache) > 1 and sum(o.memory_bytes for o in self._cache.values()) > _CACHE_BYTES:
                self._cache.popitem(last=False)
        return opened

    def first_opened(self) -> Any:
        """The first file that has records. Raises `DataError` when none has."""
        for name in self._files:
            opened = self.opened(name)
            if opened.count:
                return opened
        return self.opened(self.sources()[0].name)

    def _survey(self, name: str) -> tuple[int, str]:
        opened: Opened = self.opened(name)
        return opened.count, opened.layout


def _listed(files: list[str]) -> str:
    return ", ".join(files[:3]) + (f" and {len(files) - 3} more files" if len(files) > 3 else "")
