"""Records that can't be converted to examples: found, counted, and kept as they came."""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Callable, Iterator
from typing import Any

from elasticcb.data.reader import Reader
from elasticcb.errors import DataError, SourceError
from elasticcb.storage.remote_files import is_url

logger = logging.getLogger(__name__)

_WHOLE_BATCHES = 64  # that are held until all are converted


class BadRecords:
    """Skips bad records of a reader.

    Args:
        convert: the batches of the records [start, end) of a source. Raises `DataError` if one of them is bad.
        keeps_order: whether it makes one example of each record, in order.
        folder: of a folder or URL to keep them in, two files each: the record, and why it is bad; "": only count.
    """

    def __init__(
        self, reader: Reader, convert: Callable[[str, int, int], Iterator[Any]], keeps_order: bool, folder: str
    ) -> None:
        self._reader, self._convert, self._keeps_order, self._folder = reader, convert, keeps_order, folder
        self._count, self._first = 0, ""
        self._skipped = self._passed = 0  # records: skipped, but not passed yet; passed since the last call of `passed`

    def take(self) -> tuple[int, str]:
        """How many were found since the last call, and what is wrong with the first one."""
        taken, self._count, self._first = (self._count, self._first), 0, ""
        return taken

    def passed(self) -> int:
        """How many records were skipped, since the last call, before the end of the last batch, or right behind it."""
        passed, self._passed = self._passed, 0
        return passed

    def good_batches(self, name: str, start: int, end: int, size: int, rows: Callable[[Any], int]) -> Iterator[Any]:
        """The batches without bad records, of at most `size` records; `rows` is the number of examples of one."""
        self._skipped = self._passed = 0
        if self._reader.may_skip and end - start > _WHOLE_BATCHES * size:  # no count gives the place of an error
            for place in range(start, end, _WHOLE_BATCHES * size):
                yield from self.good_batches(name, place, min(place + _WHOLE_BATCHES * size, end), size, rows)
            return
        try:
            if not self._keeps_order or self._reader.may_skip:
                yield from [*self._convert(name, start, end)]  # all or none
                return
            for batch in self._convert(name, start, end):
                start += rows(batch)
                yield batch
            return
        except SourceError:
            raise
        except DataError as error:
            logger.debug("Records [%d, %d) of %s have a bad one: %s", start, end, name, error)
        for place in range(start, end, size):
            parts = [*self._parts(name, place, min(place + size, end))]
            for number, batch in enumerate(parts, 1):
                if number == len(parts):  # else those behind it might count as done before it is
                    self._passed, self._skipped = self._passed + self._skipped, 0
                yield batch

    def _parts(self, name: str, start: int, end: int) -> Iterator[Any]:
        """The batches of the good ones among these records, by halves."""
        try:
            batches = [*self._convert(name, start, end)]
        except SourceError:
            raise
        except DataError as error:
            if end - start == 1:
                self._note(name, start, error)
                return
            middle = (start + end) // 2
            yield from self._parts(name, start, middle)
            yield from self._parts(name, middle, end)
            return
        yield from batches

    def _note(self, name: str, number: int, error: DataError) -> None:
        text = f"Record {number} of {name} is skipped: {error}"
        logger.warning("%s", text)
        self._count, self._first = self._count + 1, self._first or text
        self._skipped += 1
        if self._folder:
            checksum = hashlib.sha256(name.encode()).hexdigest()[:8]  # of names that differ only in other characters
            shown = re.sub(r"[^A-Za-z0-9._-]+", "_", name).strip("_")[-150:]
            self._keep(f"{shown}-{checksum}-{number}", name, number, text)

    def _keep(self, file: str, name: str, number: int, text: str) -> None:
        import fsspec

        try:
            file_system, folder = fsspec.core.url_to_fs(self._folder)
            if not is_url(self._folder):
                file_system.makedirs(folder, exist_ok=True)
            file_system.pipe_file(f"{folder}/{file}.record", self._reader.as_it_came(name, number))
            file_system.pipe_file(f"{folder}/{file}.why", f"{text}\n".encode())
        except Exception as error:
            raise DataError(
                f"{text}\nIt can't be kept in {self._folder}: {type(error).__name__}: {error}. Make it writable, or "
                "set bad_records to skip."
            ) from error
