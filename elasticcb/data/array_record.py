"""ArrayRecord files: records are bytes; the format has its own index (extra `array-record`)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

from elasticcb.data.extras import import_extra, library_errors
from elasticcb.data.files import FileReader, is_remote, open_content
from elasticcb.data.reader import CHUNK_RECORDS, check_range
from elasticcb.data.stacking import object_array
from elasticcb.errors import DataError

# Read-ahead is for whole files; ranges are faster without.
_RANDOM_ACCESS = "readahead_buffer_size:0,max_parallelism:0"


class _Opened:
    layout = ""

    def __init__(self, name: str, path: str) -> None:
        module = import_extra("array_record.python.array_record_module", "array-record", "ArrayRecord")
        self.name = name
        self.count = 0
        self.memory_bytes = 1 << 16  # some
        # The reader moves a position when it reads, so one thread at a time.
        self._lock = threading.Lock()
        if not open_content(path).size:
            return
        with library_errors(name):
            self._reader = module.ArrayRecordReader(path, _RANDOM_ACCESS)
            if not self._reader.ok():
                self._reader.close()  # raises what is wrong
                raise ValueError("no ArrayRecord")
            self.count = self._reader.num_records()

    def read(self, start: int, end: int) -> list[bytes]:
        with self._lock, library_errors(f"One of the records [{start}, {end}) of {self.name}"):
            records: list[bytes] = self._reader.read(start, end)
        if len(records) != end - start:
            raise DataError(
                f"{self.name} is truncated or damaged at record {start + len(records)}: {end - start} "
                "records "
                f"from {start} on were asked for. Write the file again."
            )
        return records


class ArrayRecordReader(FileReader):
    """Records of ArrayRecord files as scalar strings; remote files are copied to a local cache."""

    def _open(self, name: str) -> _Opened:
        return _Opened(name, _local_copy(name) if is_remote(name) else name)

    def read_chunks(self, name: str, start: int, end: int, size: int = CHUNK_RECORDS) -> Iterator[Any]:
        opened: _Opened = self.opened(name)
        check_range(name, start, end, opened.count)
        for first in range(start, end, size):
            yield object_array(opened.read(first, min(first + size, end)))


def _local_copy(name: str) -> str:
    import fsspec

    with library_errors(name):
        path: str = fsspec.open_local(f"simplecache::{name}")
    return path
