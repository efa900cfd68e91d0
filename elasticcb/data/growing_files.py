"""Files that come while a job trains: each is a partition, trained once, when it is complete."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from elasticcb.data.content import open_file
from elasticcb.data.file_reader import FileReader, check_layout
from elasticcb.data.files import list_files
from elasticcb.data.reader import Metadata
from elasticcb.data.record_formats import RecordFormat
from elasticcb.data.stacking import CHUNK_RECORDS
from elasticcb.data.unbounded import Partition, UnboundedSource
from elasticcb.errors import DataError, SourceError, StreamError
from elasticcb.storage.remote_files import is_url

if TYPE_CHECKING:
    from elasticcb.data.reader import Feed

logger = logging.getLogger(__name__)

SETTLE = "settle_seconds"  # the parameter's name
_DONE = "_SUCCESS"  # a file that Hadoop and Spark write into a folder that is complete


class GrowingFiles(UnboundedSource):
    """The files of a data origin, also those that are added later, in the order of their names; those that are found
    together are in this order, and after those found before.

    A file is complete, and is read, once its folder has a file `_SUCCESS`, or it was not changed for some seconds.
    Write it elsewhere, or by a name that begins with `.` or `_`, and rename it, or else write without long pauses.

    Args:
        origin: as in `elasticcb.data.read`.
        open_files: the reader of a list of files.
        settle_seconds: how long a complete file was not changed.
    """

    in_order = True

    def __init__(
        self, origin: str, open_files: Callable[[list[str]], FileReader], settle_seconds: float = 10.0
    ) -> None:
        self._origin, self._open_files, self._settle_seconds = origin, open_files, settle_seconds
        self.look_seconds = 5.0 if is_url(origin) else 1.0
        self._unsettled: dict[str, tuple[Any, float]] = {}  # identity of a file, and when it was first seen so
        self._counts: dict[str, int] = {}  # of complete files
        self._reader: FileReader | None = None
        self._first = self._layout = ""  # of the first file, which may be gone later
        self._closed = threading.Event()

    def __repr__(self) -> str:
        return f"The files of {self._origin}"

    @property
    def files(self) -> FileReader:
        """The reader of the files; waits for the first one that has records."""
        waits = False
        while self._reader is None:
            readers = map(self._open_files, ([name] for name in self._complete(())))
            self._reader = next((each for each in readers if each.head(each.names[0], 1)), None)
            if self._reader is not None:
                first = self._reader.first_opened()
                self._first, self._layout = first.file.name, first.layout
                break
            if not waits:
                logger.info("Waiting for the first complete file with records of %s", self._origin)
                waits = True
            if self._closed.wait(self.look_seconds):
                raise DataError(f"{self._origin} has no complete file with records yet.")
        return self._reader

    # ------------------------------------------------------------ records

    @property
    def element_spec(self) -> Any:
        return self.files.element_spec

    @property
    def metadata(self) -> Metadata:
        return self.files.metadata

    def default_feed(self) -> Feed | None:
        return self.files.default_feed()

    def record_format(self) -> RecordFormat | None:
        return self.files.record_format()

    @property
    def unknown_columns(self) -> str:  # type: ignore[override]
        return self.files.unknown_columns

    def told_of(self) -> str:
        return self.files.told_of()

    def read(self, name: str, start: int, end: int) -> Iterator[Any]:
        return self.files.read(name, start, end)

    def read_chunks(self, name: str, start: int, end: int, size: int = CHUNK_RECORDS) -> Iterator[Any]:
        return self.files.read_chunks(name, start, end, size)

    def beginning(self, records: int) -> tuple[str, int, int]:
        names = self.files.names
        return names[0], 0, self.files.head(names[0], records)

    # ------------------------------------------------------------ new files

    def partitions(self, known: Collection[str]) -> Mapping[str, Partition]:
        found, away = {}, None
        for name in self._complete(known):
            try:
                count, layout = self.files.survey(name)
            except SourceError as error:  # it is looked at again: the storage is away, or the file may not be read yet
                away = error
                continue
            self._open_files([self._first, name])  # raises if their formats differ
            if count:
                check_layout(name, layout, self._first, self._layout)
            self._counts[name] = count
            found[name] = Partition(0, 0, count)
        if away is not None and not found:
            raise StreamError(str(away)) from away
        return found

    def time_of(self, name: str, offset: int = 0) -> float:
        try:
            return 0.0 if is_url(name) else os.stat(name).st_mtime
        except OSError:
            return 0.0

    def trained(self, offsets: Mapping[str, int]) -> None:
        for name, offset in offsets.items():
            if self._counts.get(name, -1) == offset:
                del self._counts[name]
                self.files.forget(name)

    def _complete(self, known: Collection[str]) -> list[str]:
        """Complete files that are not known, in the order of their names. Raises `StreamError`."""
        try:
            before = {*known, *self._counts}
            names = list_files(self._origin, may_lack=True, before=before)
            new = [name for name in names if name not in before]
            self._unsettled = {name: seen for name, seen in self._unsettled.items() if name in new}
            folders = {name.rpartition("/")[0] for name in new}
            done = {folder for folder in folders if _exists(f"{folder}/{_DONE}")}
            return [name for name in new if name.rpartition("/")[0] in done or self._has_settled(name)]
        except (DataError, OSError) as error:
            raise StreamError(f"The files of {self._origin} can't be listed: {error}") from error

    def _has_settled(self, name: str) -> bool:
        if not is_url(name):
            return time.time() - self.time_of(name) >= self._settle_seconds
        identity, now = open_file(name).identity, time.monotonic()
        before, since = self._unsettled.setdefault(name, (identity, now))
        if before != identity:
            self._unsettled[name] = identity, now
            return False
        return now - since >= self._settle_seconds

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_closed"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._closed = threading.Event()

    def close(self) -> None:
        closed, self._closed = self._closed, threading.Event()
        closed.set()
        self._counts.clear()


def _exists(name: str) -> bool:
    if not is_url(name):
        return os.path.exists(name)
    import fsspec

    file_system, path = fsspec.core.url_to_fs(name)
    return bool(file_system.exists(path))
