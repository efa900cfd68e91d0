"""Text files by lines, and delimited ones (CSV, TSV) by records that may span lines."""

from __future__ import annotations

import codecs
import csv
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from elasticcb.data.files import Content, FileReader, MemoryContent, open_content, spans
from elasticcb.data.reader import CHUNK_RECORDS, Metadata, check_range
from elasticcb.data.stacking import object_array
from elasticcb.data.text_index import Dialect, index_records, line_of
from elasticcb.errors import DataError, UsageError

_TEXT_DTYPES = ("str", "string", "bytes", "object")


@dataclass(frozen=True)
class _Indexed:
    content: Content
    offsets: Any  # int64 of shape (records + 1,), without the header
    fields: int  # in each record; 0: lines are not split
    header: tuple[str, ...]

    @property
    def count(self) -> int:
        return len(self.offsets) - 1

    @property
    def layout(self) -> str:
        if self.header:
            return f"the columns {', '.join(self.header)}"
        return f"{self.fields} columns" if self.fields else ""

    @property
    def memory_bytes(self) -> int:
        return int(self.offsets.nbytes) + self.content.memory_bytes


class TextReader(FileReader):
    r"""Records of text files as scalar strings in UTF-8: the raw line, without its end.

    Args:
      delimiter: one character. With it, records are split into fields to find those that span lines
        because of a quoted line break, and to check that all have as many fields. "": each line is a
        record.
      header: the first record of each file holds the names of columns, and is no record.
      encoding: of the files; others than UTF-8 are decoded as a whole, in memory.
      columns: names of all columns, in order; instead of the header's.
      skip_blank_lines: empty lines are no records. Those at the end of a file never are.
      quote: the character around fields that hold delimiters or line breaks; "": there is none.
      column_dtypes: NumPy dtype names by column name or number. Each record that is read is checked
        against them; empty fields pass.
    """

    def __init__(
        self,
        files: list[str],
        *,
        delimiter: str = "",
        header: bool = False,
        encoding: str = "utf-8",
        columns: Sequence[str] = (),
        skip_blank_lines: bool = True,
        quote: str = '"',
        column_dtypes: Mapping[str | int, str] | None = None,
    ) -> None:
        super().__init__(files)
        for name, value in (("delimiter", delimiter), ("quote", quote)):
            if not isinstance(value, str) or len(value.encode()) > 1 or value in ("\n", "\r"):
                raise UsageError(
                    f"The reader parameter {name} is {value!r}. Expected one ASCII character other than "
                    "a line "
                    "break, or '' for none."
                )
        if isinstance(columns, str):
            raise UsageError(f"The reader parameter columns is {columns!r}. Expected a list of names.")
        if not delimiter and (header or columns or column_dtypes):
            raise UsageError(
                "The reader parameters header, columns and column_dtypes need columns, and these lines "
                "are not "
                "split. Give `delimiter` as well."
            )
        try:
            self._encoding = codecs.lookup(encoding).name
        except LookupError:
            raise UsageError(f"The reader parameter encoding is {encoding!r}, which Python does not know.") from None
        self._dialect = Dialect(delimiter.encode(), quote.encode() if delimiter else b"", skip_blank_lines)
        self._has_header = header
        self._columns = tuple(columns)
        self._dtypes = dict(column_dtypes or {})
        self._checks: list[tuple[int, str, np.dtype[Any]]] | None = None

    @property
    def metadata(self) -> Metadata:
        names = self._columns
        if not names and self._has_header:
            names = self.opened(self._files[0]).header or self.first_opened().header
        dtypes = {
            names[key] if isinstance(key, int) and names else str(key): dtype for key, dtype in self._dtypes.items()
        }
        return Metadata(column_names=names, column_dtypes=dtypes)

    def _open(self, name: str) -> _Indexed:
        content = self._decoded(open_content(name))
        offsets, fields = index_records(
            content, self._dialect, header=self._has_header, expected_fields=len(self._columns)
        )
        header: tuple[str, ...] = ()
        if self._has_header and len(offsets) > 1:
            line = content.read(int(offsets[0]), int(offsets[1])).decode("utf-8", "replace").rstrip("\r\n")
            header = tuple(field.strip() for field in next(self._split([line])))
            offsets = offsets[1:]
        return _Indexed(content, offsets, fields, header)

    def _decoded(self, content: Content) -> Content:
        if self._encoding in ("utf-8", "utf-8-sig", "ascii"):
            return content
        data = content.read(0, content.size)
        try:
            return MemoryContent(content.name, data.decode(self._encoding).encode())
        except UnicodeDecodeError as error:
            line = data.count(b"\n", 0, error.start) + 1
            raise DataError(
                f"{content.name}, line {line}, is not in the encoding {self._encoding}: {error.reason} "
                "at byte "
                f"{error.start}. Give the file's encoding with the reader parameter `encoding`."
            ) from error

    def read_chunks(self, name: str, start: int, end: int, size: int = CHUNK_RECORDS) -> Iterator[Any]:
        indexed: _Indexed = self.opened(name)
        check_range(name, start, end, indexed.count)
        for first, last in spans(indexed.offsets, start, end):
            origin = int(indexed.offsets[first])
            blob = indexed.content.read(origin, int(indexed.offsets[last]))
            bounds = (indexed.offsets[first : last + 1] - origin).tolist()
            # A record's bytes reach to the next record, over the blank lines between them.
            records = [blob[begin:stop].rstrip(b"\r\n") for begin, stop in itertools.pairwise(bounds)]
            if self._dtypes:
                self._check_dtypes(name, indexed, first, records)
            for i in range(0, len(records), size):
                yield object_array(records[i : i + size])

    def _split(self, lines: Sequence[str]) -> Iterator[list[str]]:
        quote = self._dialect.quote.decode()
        return csv.reader(
            lines,
            delimiter=self._dialect.delimiter.decode(),
            quotechar=quote or None,
            quoting=csv.QUOTE_MINIMAL if quote else csv.QUOTE_NONE,
        )

    def _check_dtypes(self, name: str, indexed: _Indexed, first: int, records: list[bytes]) -> None:
        checks = self._resolved_checks(indexed)
        present = [i for i, record in enumerate(records) if record]
        rows = list(self._split([records[i].decode("utf-8", "replace") for i in present]))
        for column, label, dtype in checks:
            convert: Any = float if dtype.kind == "f" else int
            limits = np.iinfo(dtype) if dtype.kind in "iu" else None
            for row, i in zip(rows, present, strict=True):
                value = row[column]
                try:
                    number = convert(value) if value.strip() else 0
                    if limits is None or limits.min <= number <= limits.max:
                        continue
                except ValueError:
                    pass
                record = first + i
                hint = " If the first line holds names, give `header=True`." if record == 0 else ""
                raise DataError(
                    f"{name}, record {record} (line "
                    f"{line_of(indexed.content, int(indexed.offsets[record]))}), column "
                    f"{label}: {value!r} is no {dtype.name}. Correct the file or `column_dtypes`.{hint}"
                )

    def _resolved_checks(self, indexed: _Indexed) -> list[tuple[int, str, np.dtype[Any]]]:
        if self._checks is None:
            names = self._columns or indexed.header
            checks = []
            for key, dtype in self._dtypes.items():
                if isinstance(key, int) and 0 <= key < indexed.fields:
                    column = key
                elif key in names:
                    column = names.index(str(key))
                else:
                    raise UsageError(
                        f"The reader parameter column_dtypes names the column {key!r}. The columns are "
                        f"{', '.join(names) if names else f'0 to {indexed.fields - 1}'}."
                    )
                if dtype not in _TEXT_DTYPES:
                    checks.append((column, str(key), _number_dtype(key, dtype)))
            self._checks = checks
        return self._checks


def _number_dtype(column: str | int, name: str) -> np.dtype[Any]:
    try:
        dtype = np.dtype(name)
    except TypeError:
        dtype = np.dtype(object)
    if dtype.kind not in "iuf":
        raise UsageError(
            f"The reader parameter column_dtypes gives column {column!r} the dtype {name!r}. Expected "
            "NumPy's "
            "name of an integer or float dtype, or 'str'."
        )
    return dtype
