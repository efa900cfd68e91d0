"""ArrayRecord files: records are bytes; the format has its own index (extra `array-record`)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

from elasticcb.data.content import File
from elasticcb.data.extras import import_extra, library_errors
from elasticcb.data.file_index import FileIndex
from elasticcb.data.file_reader import FileReader, Opened
from elasticcb.data.record_formats import EXAMPLES_ADVICE, SAMPLE_RECORDS, ExampleFormat
from elasticcb.data.stacking import object_array
from elasticcb.errors import DataError
from elasticcb.process.wording import how_many
from elasticcb.storage.remote_files import is_url

# Read-ahead helps only for whole files; ranges are faster without.
_RANDOM_ACCESS = "readahead_buffer_size:0,max_parallelism:0"


class _OpenedArrayRecord(Opened):
    def __init__(self, file: File) -> None:
        super().__init__(file)
        module = import_extra("array_record.python.array_record_module", "array-record", "ArrayRecord")
        # Reading moves the reader's position, so only one thread may read at a time.
        self._lock = threading.Lock()
        if not file.identity.size:
            return
        path = _local_copy(file.name) if is_url(file.name) else file.name
        with library_errors(file.name):
            self._reader = module.ArrayRecordReader(path, _RANDOM_ACCESS)
            if not self._reader.ok():
                self._reader.close()  # raises the error
                raise ValueError("no ArrayRecord")
            self.count = self._reader.num_records()

    def read(self, start: int, end: int, size: int) -> Iterator[Any]:
        for first in range(start, end, size):
            yield object_array(self._records(first, min(first + size, end)))

    def _records(self, start: int, end: int) -> list[bytes]:
        name = self.file.name
        with self._lock, library_errors(f"One of the records [{start}, {end}) of {name}"):
            records: list[bytes] = self._reader.read(start, end)
        if len(records) != end - start:
            raise DataError(
                f"{name} is truncated or damaged at record {start + len(records)}: expected "
                f"{how_many(end - start, 'record')} from {start} on. Write the file again."
            )
        return records


class ArrayRecordReader(FileReader):
    """Records of ArrayRecord files as scalar strings; remote files are copied to a local cache."""

    unknown_columns = EXAMPLES_ADVICE

    def record_format(self) -> ExampleFormat:
        return ExampleFormat(self.first_records(SAMPLE_RECORDS))

    def _open(self, file: File, index: FileIndex | None, enough: int | None) -> _OpenedArrayRecord:
        return _OpenedArrayRecord(file)


def _local_copy(name: str) -> str:
    import fsspec

    with library_errors(name):
        path: str = fsspec.open_local(f"simplecache::{name}")
    return path
