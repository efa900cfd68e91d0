"""The base class of readers of all file formats."""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from elasticcb.data.content import Content, File, open_file, seek_points_of
from elasticcb.data.file_index import FileIndex, RecordOffsets, RecordRange
from elasticcb.data.files import listed
from elasticcb.data.reader import Reader, Source, check_range
from elasticcb.data.stacking import CHUNK_RECORDS, unstacked
from elasticcb.errors import DataChangedError, DataError
from elasticcb.storage.remote_files import is_url

_CACHE_BYTES = 1 << 30  # bytes that a reader keeps in memory for open files
_CACHE_DISK_BYTES = 16 << 30  # and in temporary files
_SCANNING_THREADS = 8  # remote stores are slow, but handle many requests at once


class Opened(ABC):
    """An opened file of which all records, or the first ones, are known.

    Attributes:
        count: number of known records.
        complete: whether these are all.
    """

    complete = True

    def __init__(self, file: File, count: int = 0) -> None:
        self.file, self.count = file, count

    @property
    def layout(self) -> str:
        """Description of what all files of one origin must have in common; "": unknown."""
        return ""

    @property
    def memory_bytes(self) -> int:
        """Memory for keeping it open."""
        return 1 << 16  # some

    @property
    def disk_bytes(self) -> int:
        """In temporary files."""
        return 0

    def index(self) -> FileIndex:
        """For other processes that open the file."""
        return FileIndex(self.file.identity, self.count, self.layout)

    @abstractmethod
    def read(self, start: int, end: int, size: int) -> Iterator[Any]:
        """Like `Reader.read_chunks`."""


class OpenedByOffsets(Opened):
    """A file whose records are found by their offsets in its content."""

    def __init__(
        self,
        file: File,
        content: Content,
        places: RecordOffsets,
        compression: str,
        complete: bool = True,
        details: Mapping[str, Any] = {},
    ) -> None:
        super().__init__(file, places.count)
        self.content, self.complete = content, complete
        self._places, self._compression, self._details = places, compression, details

    @property
    def memory_bytes(self) -> int:
        return self._places.nbytes + self.content.memory_bytes

    @property
    def disk_bytes(self) -> int:
        return self.content.disk_bytes

    def index(self) -> FileIndex:
        return FileIndex(
            self.file.identity, self.count, self.layout, self._places, self._compression, details=self._details
        )


class FileReader(Reader):
    """A reader of files of one format.

    Attributes:
        find_index: requests the index of a file from another process, the master: as `FileIndex.to_bytes`, or b"".
        known: indexes from an earlier process of the job, by file; valid while the file is unchanged.
    """

    find_index: Callable[[str], bytes] | None = None
    known: Mapping[str, bytes] = {}

    def __init__(self, files: Sequence[str]) -> None:
        self._files = list(files)
        self._sources: list[Source] | None = None
        self._lock = threading.Lock()
        self._cache: OrderedDict[str, Opened] = OrderedDict()
        self._indexes: dict[str, bytes] = {}  # indexes created here, of all files with records
        self._stopped = threading.Event()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_cache": OrderedDict()}  # open files belong to a process

    @abstractmethod
    def _open(self, file: File, index: FileIndex | None, enough: int | None) -> Opened:
        """Opens a file of the format.

        Args:
            index: index from another process; None: scan the file.
            enough: it suffices to find this many records from the first one on, if that is cheaper.
        """

    @property
    def names(self) -> list[str]:
        """All files, including empty ones."""
        return list(self._files)

    def head(self, name: str, records: int) -> int:
        """The number of records of the file `name`, at most `records`; reads only as much as needed."""
        return min(int(self.opened(name, records).count), records)

    def sources(self) -> list[Source]:
        """The files that have records.

        Raises `DataError` if a file can't be read, no file has records, or columns differ.
        """
        if self._sources is None:
            with ThreadPoolExecutor(min(_SCANNING_THREADS, len(self._files))) as pool:
                surveys = list(pool.map(self.survey, self._files))
            filled = [(name, *found) for name, found in zip(self._files, surveys, strict=True) if found[0]]
            known = [(name, layout) for name, _, layout in filled if layout]
            for name, layout in known[1:]:
                check_layout(name, layout, *known[0])
            self._sources = [Source(name, count) for name, count, _ in filled]
            if not self._sources:
                raise DataError(f"There are no records in {listed(self._files)}. Provide at least one record.")
        return list(self._sources)

    def stop(self) -> None:
        """Aborts `sources`, in any thread, with a `DataError`."""
        self._stopped.set()

    def indexes(self) -> Mapping[str, bytes]:
        """The indexes found by `sources`, by file, as `FileIndex.to_bytes`, for `find_index` and `known` of other
        readers."""
        return self._indexes

    def read(self, name: str, start: int, end: int) -> Iterator[Any]:
        return unstacked(self.read_chunks(name, start, end), self.element_spec)

    def read_chunks(self, name: str, start: int, end: int, size: int = CHUNK_RECORDS) -> Iterator[Any]:
        opened: Opened = self.opened(name, end)
        opened.file.check()
        check_range(name, start, end, opened.count)
        try:
            for chunk in opened.read(start, end, size):
                if not is_url(name):  # remotely, it would take a request for each chunk
                    opened.file.check()  # after the read: the data is from the indexed file
                yield chunk
        except DataError:
            opened.file.check()  # looks damaged if the file was replaced
            raise

    def opened(self, name: str, records: int) -> Any:
        """The opened file `name`, with at least the first `records` records known, if it has as many.

        From the cache, from an existing index, or by scanning the file.
        """
        with self._lock:
            cached = self._cache.get(name)
            if cached is not None and (cached.complete or cached.count >= records):
                self._cache.move_to_end(name)
                return cached
        index = self._index_of(name)
        file = open_file(name, None if index is None else index.identity)
        opened = self._open(file, index, records)
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
        """The first file with records, or its beginning. Raises `DataError` if no file has records."""
        for name in self._files:
            opened = self.opened(name, 1)
            if opened.count:
                return opened
        return self.opened(self.sources()[0].name, 1)

    def first_records(self, records: int) -> list[Any]:
        """The first records of the first file that has some, at most `records`."""
        name = self.first_opened().file.name
        opened = self.opened(name, records)
        return [record for chunk in opened.read(0, min(opened.count, records), records) for record in chunk]

    def _index_of(self, name: str) -> FileIndex | None:
        data = self._indexes.get(name, b"")
        if not data and self.find_index is not None:
            data = self.find_index(name)
        return FileIndex.from_bytes(data) if data else None

    def forget(self, name: str) -> None:
        """Nothing more of the file `name` is read."""
        self._indexes.pop(name, None)
        with self._lock:
            self._cache.pop(name, None)

    def survey(self, name: str) -> tuple[int, str]:
        """The number of records of a file, and its layout as in `Opened`. Raises `DataError`."""
        file = _StoppableFile(open_file(name), self._stopped)
        index = None
        with contextlib.suppress(Exception):  # there is none, or its file is damaged: the data is scanned
            index = FileIndex.from_bytes(self.known[name])
        if index is None or not index.identity.matches(file.identity):
            index = self._scanned(file)
        if index.count:
            self._indexes[name] = index.to_bytes()
        return index.count, index.layout

    def _scanned(self, file: File) -> FileIndex:
        try:
            index = self._open(file, None, None).index()
            if index.compression == ".gz" and index.count:
                index = replace(index, seek_points=seek_points_of(file))
        except DataError:
            file.check()
            raise
        file.check()
        return index


def check_layout(name: str, layout: str, first: str, its_layout: str) -> None:
    """Raises `DataError` if a file has another layout than the first one; "": unknown."""
    if layout and its_layout and layout != its_layout:
        raise DataError(
            f"{name} has {layout}, but {first} has {its_layout}. All files of a data origin must have the same layout."
        )


class _StoppableFile(File):
    """A file that can't be read any more once `stopped` is set."""

    def __init__(self, file: File, stopped: threading.Event) -> None:
        self.name, self.identity, self.block_bytes = file.name, file.identity, file.block_bytes
        self._file, self._stopped = file, stopped

    def read(self, start: int, stop: int) -> bytes:
        if self._stopped.is_set():
            raise DataError(f"Scanning {self.name} was aborted because the job ends.")
        return self._file.read(start, stop)

    def check(self) -> None:
        self._file.check()


def torn(name: str, piece: RecordRange) -> DataChangedError:
    """The bytes of `piece` differ from the index, although the file seems unchanged."""
    return DataChangedError(
        f"Records [{piece.first}, {piece.first + piece.records}) of {name} are not where they were when the file was "
        "indexed: the file was changed while the job used it, or differs on this machine. Start the job again with "
        "the same files on all machines."
    )
