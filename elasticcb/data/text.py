"""Text files by lines, and delimited files (CSV, TSV) by records that may span lines."""

from __future__ import annotations

import codecs
import csv
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from elasticcb.data.content import File, compression_of, decoded, opened_content
from elasticcb.data.file_index import FileIndex
from elasticcb.data.file_reader import FileReader, OpenedByOffsets, torn
from elasticcb.data.reader import Metadata
from elasticcb.data.record_formats import (
    DATES,
    SAMPLE_RECORDS,
    STRING,
    LineFormat,
    inferred_type,
    is_float,
    is_integer,
    missing_value,
)
from elasticcb.data.stacking import object_array
from elasticcb.data.text_index import Dialect, index_records, line_in, line_of, split_records
from elasticcb.errors import DataError, UsageError
from elasticcb.process.wording import how_many

csv.field_size_limit(max(csv.field_size_limit(), 1 << 30))  # for long texts
_LONGEST_LINE = 200  # characters of a line that a message shows
_TEXT_DTYPES = ("str", STRING, "bytes", "object")


class TextReader(FileReader):
    r"""Records of text files as scalar UTF-8 strings: the raw line, without its line break.

    Args:
      delimiter: one character. If given, records are split into fields, to find records that span lines because of
        quoted line breaks, and to check that all have the same number of fields. "": each line is a record.
      header: the first record of each file has the names of the columns, and does not count as a record.
      encoding: encoding of the files; other encodings than UTF-8 are converted to a temporary file.
      columns: names of all columns, in order; override the header's.
      skip_blank_lines: skip empty lines. Empty lines at the end of a file are always skipped.
      quote: the character around fields that contain delimiters or line breaks; "": none. None: a double quote; then
          fields between tabs must not contain line breaks.
      column_dtypes: NumPy dtype names, "date" or "timestamp", by column name or number. Each record that is read is
        checked against them; empty fields are valid.
      fill_null: values of empty fields, by column name, without a feed.
      check_fields: refuse files whose records have different numbers of fields before training; else, such a record
        is a bad one when it is read.
    """

    unknown_columns = (
        " Set the reader parameter header=true if the first line of each file has their names, or list them in "
        "`columns`."
    )

    def __init__(
        self,
        files: list[str],
        *,
        delimiter: str = "",
        header: bool = False,
        encoding: str = "utf-8",
        columns: Sequence[str] = (),
        skip_blank_lines: bool = True,
        quote: str | None = None,
        column_dtypes: Mapping[str | int, str] | None = None,
        fill_null: Mapping[str, Any] | None = None,
        check_fields: bool = True,
    ) -> None:
        super().__init__(files)
        spans_lines = quote is not None or delimiter != "\t"
        quote = '"' if quote is None else quote
        for name, value in (("delimiter", delimiter), ("quote", quote)):
            if not isinstance(value, str) or len(value.encode()) > 1 or value in ("\n", "\r"):
                raise UsageError(
                    f"The reader parameter {name} is {value!r}. Expected one ASCII character other than a line break, "
                    "or '' for none."
                )
        switches = {"header": header, "skip_blank_lines": skip_blank_lines, "check_fields": check_fields}
        for name, given in switches.items():
            if given not in (True, False):
                raise UsageError(f"The reader parameter {name} is {given!r}. Expected true or false.")
        if isinstance(columns, str):
            raise UsageError(f"The reader parameter columns is {columns!r}. Expected a list of names.")
        if not delimiter and (header or columns or column_dtypes):
            raise UsageError(
                "The reader parameters header, columns and column_dtypes need columns, but lines are not split "
                "without a delimiter. Set `delimiter` as well."
            )
        try:
            self._encoding = codecs.lookup(encoding).name
        except LookupError:
            raise UsageError(f"The reader parameter encoding is {encoding!r}, which is unknown to Python.") from None
        self._dialect = Dialect(
            delimiter.encode(), quote.encode() if delimiter else b"", skip_blank_lines, spans_lines, check_fields
        )
        self.has_header = header
        self._columns = tuple(columns)
        self._dtypes = dict(column_dtypes or {})
        self._fill = dict(fill_null or {})
        self._checks: list[_Check] | None = None
        self._checks_reads = bool(self._dtypes)

    @property
    def metadata(self) -> Metadata:
        names = self._columns
        if not names and self.has_header:
            names = self.opened(self._files[0], 1).header or self.first_opened().header
        dtypes = {
            names[key] if isinstance(key, int) and names else str(key): dtype for key, dtype in self._dtypes.items()
        }
        return Metadata(column_names=names, column_dtypes=dtypes)

    def record_format(self) -> LineFormat | None:
        """Columns with the types of `column_dtypes`, or else those of the first records. Values are then checked as
        they are converted, not here."""
        names, quote = self.metadata.column_names, self._dialect.quote
        if not names or quote not in (b"", b'"'):
            return None
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise DataError(
                f"The column name {twice!r} occurs {names.count(twice)} times in {', '.join(names)}. Rename the "
                "columns, or define a feed."
            )
        unknown = [name for name in self._fill if name not in (*names, self.may_lack)]
        if unknown:
            raise UsageError(
                f"The reader parameter fill_null has the unknown column {unknown[0]!r}. The columns are "
                f"{', '.join(names)}."
            )
        first = self.first_opened()
        checks = {check.column: check for check in self._resolved_checks(first)}
        given = {names[key] if isinstance(key, int) else key: dtype for key, dtype in self._dtypes.items()}
        types: dict[str, str] = {}
        sample = [record.decode("utf-8", "replace") for record in self.first_records(SAMPLE_RECORDS)]
        rows = [row for row in self._split([record for record in sample if record]) if len(row) == len(names)]
        columns = zip(*rows, strict=True) if rows else [()] * len(names)
        for column, (name, values) in enumerate(zip(names, columns, strict=True)):
            if name in given:
                types[name] = checks[column].type if column in checks else STRING
                continue
            try:
                types[name] = inferred_type(values, name in self._fill)
            except DataError as error:
                raise DataError(
                    f"The column {name!r} of {first.file.name} has {error}. Set the reader parameter "
                    f"column_dtypes={{{name!r}: 'string'}}, or 'float64', which rounds large integers and has NaN for "
                    f"empty fields, or fill_null={{{name!r}: value}}."
                ) from None
        self._checks_reads = False
        return LineFormat(
            types, self._dialect.delimiter.decode(), bool(quote), self._fill, functools.partial(self._explain, types)
        )

    def _explain(self, types: Mapping[str, str], name: str, start: int, end: int) -> None:
        """Raises `DataError` for the first value in the records [start, end) that does not have its column's type."""
        checks = [
            _Check(column, label, kind, label not in self._fill and missing_value(kind) is None, exact=True)
            for column, (label, kind) in enumerate(types.items())
            if kind != STRING
        ]
        opened: _OpenedText = self.opened(name, end)
        for first, records in opened.pieces(start, end):
            self._check_dtypes(opened, first, records, checks)

    def told_of(self) -> str:
        """The names of the columns; without names, the first line, which may be a header that nobody announced."""
        known = super().told_of()
        if known or not self._dialect.delimiter:
            return known
        opened = self.first_opened()
        line = bytes(next(self.read(opened.file.name, 0, 1))).decode("utf-8", "replace")
        shown = line if len(line) <= _LONGEST_LINE else f"{line[:_LONGEST_LINE]}…"
        return (
            f"The columns have no names (`metadata.column_names` is empty). The first line of {opened.file.name} is: "
            f"{shown}\nIf that is a header, set the reader parameter header=true; else set `columns`."
        )

    def _open(self, file: File, index: FileIndex | None, enough: int | None) -> _OpenedText:
        compression = compression_of(file) if index is None else index.compression
        content = opened_content(file, compression, b"" if index is None else index.seek_points)
        if self._encoding not in ("utf-8", "utf-8-sig", "ascii"):
            content = decoded(content, self._encoding)
        elif content.read(0, 2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
            raise DataError(f"{file.name} is not {self._encoding}. Set the reader parameter encoding=utf-16.")
        if index is not None:
            assert index.places is not None
            return _OpenedText(self, file, content, index.places, compression, True, dict(index.details))
        found = index_records(
            content, self._dialect, header=self.has_header, expected_fields=len(self._columns), enough=enough
        )
        names = next(self._split([found.header.decode("utf-8", "replace")])) if found.header else []
        details = {"fields": found.fields, "header": [name.strip() for name in names]}
        return _OpenedText(self, file, content, found.places, compression, found.complete, details)

    def _split(self, lines: Sequence[str]) -> Iterator[list[str]]:
        quote = self._dialect.quote.decode()
        return csv.reader(
            lines,
            delimiter=self._dialect.delimiter.decode(),
            quotechar=quote or None,
            quoting=csv.QUOTE_MINIMAL if quote else csv.QUOTE_NONE,
        )

    def _check_dtypes(self, opened: _OpenedText, first: int, records: list[bytes], checks: Sequence[_Check]) -> None:
        """Checks records of a file; `first` is the number of the first one."""
        present = [i for i, record in enumerate(records) if record]
        rows = list(self._split([records[i].decode("utf-8", "replace") for i in present]))
        for row, i in zip(rows, present, strict=True) if not self._dialect.same_fields else ():
            if len(row) != opened.fields:
                raise DataError(
                    f"{opened.file.name}, record {first + i}, has {how_many(len(row), 'field')}, but expected are "
                    f"{opened.fields}."
                )
        for check in checks:
            for row, i in zip(rows, present, strict=True):
                value = row[check.column]
                if check.accepts(value):
                    continue
                record = first + i
                hint = " If the first line is a header, set `header=True`." if record == 0 else ""
                wrong = f"{value!r} is not a valid {check.type}. Correct the file or `column_dtypes`.{hint}"
                if not value.strip():
                    or_nan = "" if check.type in DATES else f", or column_dtypes={{{check.label!r}: 'float32'}}: NaN"
                    wrong = (
                        f"the field is empty, and {check.type} has no missing value. Set the reader parameter "
                        f"fill_null={{{check.label!r}: value}}{or_nan}."
                    )
                where = f"{opened.file.name}, record {record} (line {opened.line_of(record)}), column {check.label}"
                raise DataError(f"{where}: {wrong}")

    def _resolved_checks(self, opened: _OpenedText) -> list[_Check]:
        if self._checks is None:
            names = self._columns or opened.header
            checks = []
            for key, dtype in self._dtypes.items():
                if isinstance(key, int) and 0 <= key < opened.fields:
                    column = key
                elif key in names:
                    column = names.index(str(key))
                elif key == self.may_lack:
                    continue
                else:
                    raise UsageError(
                        f"The reader parameter column_dtypes contains the unknown column {key!r}. The columns are "
                        f"{', '.join(names) if names else f'0 to {opened.fields - 1}'}."
                    )
                if dtype not in _TEXT_DTYPES:
                    checks.append(_Check(column, str(key), _checked_dtype(key, dtype)))
            self._checks = checks
        return self._checks


@dataclass(frozen=True)
class _Check:
    """What a field must be: a number of a NumPy dtype, a date or a timestamp."""

    column: int
    label: str
    type: str
    required: bool = False
    exact: bool = False  # only what `tf.io.decode_csv` takes

    def accepts(self, value: str) -> bool:
        if not value or not (self.exact or value.strip()):
            return not self.required
        value = value.strip()
        if self.type in DATES:
            return bool(DATES[self.type].fullmatch(value)) and _exists(value.removesuffix("Z"))
        try:
            if np.dtype(self.type).kind == "f":
                float(value)
                return not self.exact or is_float(value)
            if self.exact and not is_integer(value):
                return False
            limits = np.iinfo(self.type)
            return bool(limits.min <= int(value) <= limits.max)
        except ValueError:
            return False


def _exists(time: str) -> bool:
    try:
        np.datetime64(time, "us")
    except ValueError:
        return False
    return True


def _checked_dtype(column: str | int, name: str) -> str:
    if name in DATES:
        return name
    try:
        dtype = np.dtype(name)
    except TypeError:
        dtype = np.dtype(object)
    if dtype.kind not in "iuf":
        raise UsageError(
            f"The reader parameter column_dtypes sets column {column!r} to the dtype {name!r}. Expected NumPy's name "
            "of an integer or float dtype, 'date', 'timestamp' or 'str'."
        )
    return dtype.name


class _OpenedText(OpenedByOffsets):
    def __init__(self, reader: TextReader, *given: Any) -> None:
        super().__init__(*given)
        self._reader, self.dialect = reader, reader._dialect
        self.fields: int = self._details["fields"]
        self.header: tuple[str, ...] = tuple(self._details["header"])

    @property
    def layout(self) -> str:
        if self.header:
            return f"the columns {', '.join(self.header)}"
        return how_many(self.fields, "column") if self.fields else ""

    def read(self, start: int, end: int, size: int) -> Iterator[Any]:
        reader = self._reader
        for first, records in self.pieces(start, end):
            if reader._checks_reads:
                reader._check_dtypes(self, first, records, reader._resolved_checks(self))
            for i in range(0, len(records), size):
                yield object_array(records[i : i + size])

    def pieces(self, start: int, end: int) -> Iterator[tuple[int, list[bytes]]]:
        """The records `[start, end)`, piece by piece; with the number of the first one."""
        for piece in self._places.pieces(start, end):
            blob = self.content.read(piece.start, piece.stop)
            found = split_records(blob, self.dialect)
            if len(blob) != piece.stop - piece.start or len(found) < piece.records or any(found[piece.records :]):
                raise torn(self.file.name, piece)
            first = max(start, piece.first)
            yield first, found[first - piece.first : min(end - piece.first, piece.records)]

    def line_of(self, record: int) -> int:
        """The number of the line, from 1, in which a record begins."""
        piece = next(self._places.pieces(record, record + 1))
        blob = self.content.read(piece.start, piece.stop)
        return line_of(self.content, piece.start) + line_in(blob, self.dialect, record - piece.first)
