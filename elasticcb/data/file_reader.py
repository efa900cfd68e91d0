"""What the readers of all file formats have in common."""

from __future__ import annotations

import contextlib
import threading
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Protocol

from elasticcb.data.content import File, Identity, is_remote, open_file
from elasticcb.data.decompression import seek_points_of
from elasticcb.data.file_index import FileIndex, RecordRange
from elasticcb.data.files import listed
from elasticcb.data.reader import Reader, Source, check_range
from elasticcb.data.stacking import CHUNK_RECORDS
from elasticcb.errors import DataChangedError, DataError

_CACHE_BYTES = 1 << 30  # of what a reader keeps in memory of files that it has opened
_CACHE_DISK_BYTES = 16 << 30  # and in temporary files
_SCANNING_THREADS = 8  # remote stores answer slowly, but many at once


class Opened(Protocol):
    """A file whose records are known, or the first of them."""

    file: File
    complete: bool  # whether all are

    @property
    def count(self) -> int: ...  # records, as far as they are known

    @property
    def layout(self) -> str: ...  # in words: what all files of one origin must have in common; "": unknown

    @property
    def memory_bytes(self) -> int: ...  # what keeping it costs

    @property
    def disk_bytes(self) -> int: ...  # in temporary files

    def index(self) -> FileIndex: ...  # for others who open the file

    def read(self, start: int, end: int, size: int) -> Iterator[Any]:
        """As `Reader.read_chunks`."""


class FileReader(Reader):
    """A reader of files of one format.

    Attributes:
        find_index: asks another process, the master, for the index of a file: as `FileIndex.to_bytes`, or b"".
        known: indexes that an earlier process of the job has made, by file; they hold while the file is the same.
    """

    find_index: Callable[[str], bytes] | None = None
    known: Mapping[str, bytes] = {}

    def __init__(self, files: Sequence[str]) -> None:
        self._files = list(files)
        self._sources: list[Source] | None = None
        self._lock = threading.Lock()
        self._cache: OrderedDict[str, Any] = OrderedDict()
        self._indexes: dict[str, bytes] = {}  # those made here, of all files with records
        self.identities: dict[str, Identity] = {}  # of the same files
        self._stopped = threading.Event()

    @abstractmethod
    def _open(self, file: File, index: FileIndex | None, enough: int | None) -> Any:
        """An `Opened` of the format.

        Args:
            index: by another process; None: the file is to be scanned.
            enough: so many records from the first one on will do, if they are cheaper to find than all.
        """

    @property
    def names(self) -> list[str]:
        """All files, also those without records."""
        return list(self._files)

    def head(self, name: str, records: int) -> int:
        """How many records the file `name` has, at most `records`; reads no more of it than that takes."""
        return min(int(self.opened(name, records).count), records)

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
                raise DataError(f"There is no record in {listed(self._files)}. Give data with at least one record.")
        return list(self._sources)

    def stop(self) -> None:
        """Ends `sources`, in whichever thread, with a `DataError`."""
        self._stopped.set()

    def indexes(self) -> Mapping[str, bytes]:
        """By file, what `sources` has found, as `FileIndex.to_bytes`: for `find_index` and `known` of others."""
        return self._indexes

    def read(self, name: str, start: int, end: int) -> Iterator[Any]:
        from elasticcb.data.stacking import flatten, pack

        spec = self.element_spec
        for chunk in self.read_chunks(name, start, end):
            columns = flatten(spec, chunk)
            for row in zip(*columns, strict=True):
                yield pack(spec, iter(row))

    def read_chunks(self, name: str, start: int, end: int, size: int = CHUNK_RECORDS) -> Iterator[Any]:
        opened: Opened = self.opened(name, end)
        opened.file.check()
        check_range(name, start, end, opened.count)
        try:
            for chunk in opened.read(start, end, size):
                if not is_remote(name):  # there it would take a request for each chunk
                    opened.file.check()  # after the read: what was read is of the file that was indexed
                yield chunk
        except DataError:
            opened.file.check()  # looks damaged when it is another file by now
            raise

    def opened(self, name: str, records: int) -> Any:
        """The file `name`, of which the first `records` records at least are known, if it has as many.

        From the cache, by an index that was made before, or by scanning the file from its beginning.
        """
        with self._lock:
            cached = self._cache.get(name)
            if cached is not None and (cached.complete or cached.count >= records):
                self._cache.move_to_end(name)
                return cached
        index = self._index_of(name)
        file = open_file(name, None if index is None else index.identity)
        opened: Opened = self._open(file, index, records)
        with self._lock:
            self._cache[name] = opened
            self._cache.move_to_end(name)
            while len(self._cache) > 1 and (
                sum(o.memory_bytes for o in self._cache.values()) > _CACHE_BYTES
                or sum(o.disk_bytes for o in self._cache.values()) > _CACHE_DISK_BYTES
            ):
                self._cache.popitem(last=False)
        return opened

    def first_opened(self) -> Any:
        """The first file that has records, or its beginning. Raises `DataError` when none has."""
        for name in self._files:
            opened = self.opened(name, 1)
            if opened.count:
                return opened
        return self.opened(self.sources()[0].name, 1)

    def _index_of(self, name: str) -> FileIndex | None:
        data = self._indexes.get(name, b"")
        if not data and self.find_index is not None:
            data = self.find_index(name)
        return FileIndex.from_bytes(data) if data else None

    def _survey(self, name: str) -> tuple[int, str]:
        file = _StoppableFile(open_file(name), self._stopped)
        index = None
        with contextlib.suppress(Exception):  # there is none, or its file was damaged: the data is scanned
            index = FileIndex.from_bytes(self.known[name])
        if index is None or not index.identity.matches(file.identity):
            index = self._scanned(file)
        if index.count:
            self._indexes[name], self.identities[name] = index.to_bytes(), index.identity
        return index.count, index.layout

    def _scanned(self, file: File) -> FileIndex:
        try:
            index: FileIndex = self._open(file, None, None).index()
            if index.compression == ".gz" and index.count:
                index = replace(index, seek_points=seek_points_of(file))
        except DataError:
            file.check()
            raise
        file.check()
        return index


class _StoppableFile:
    """A file that can't be read any more when `stopped` is set."""

    def __init__(self, file: File, stopped: threading.Event) -> None:
        self.name, self.identity, self.block_bytes = file.name, file.identity, file.block_bytes
        self.memory_bytes, self.disk_bytes = file.memory_bytes, file.disk_bytes
        self._file, self._stopped = file, stopped

    def read(self, start: int, stop: int) -> bytes:
        if self._stopped.is_set():
            raise DataError(f"{self.name} is not scanned any more, as the job ends.")
        return self._file.read(start, stop)

    def check(self) -> None:
        self._file.check()


def torn(name: str, piece: RecordRange) -> DataChangedError:
    """The bytes of `piece` are not what was indexed, although the file looks the same."""
    return DataChangedError(
        f"Records [{piece.first}, {piece.first + piece.records}) of {name} are not where they were when the file was "
        "indexed: it was changed while the job used it, or is another file on this machine. Start the job again with "
        "the same files on all machines."
    )
