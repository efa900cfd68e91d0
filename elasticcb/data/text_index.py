"""Where the records of a text file begin, found with NumPy, block by block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from elasticcb.data.files import Content
from elasticcb.errors import DataError

_NEWLINE, _RETURN = 10, 13
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Dialect:
    """How lines make records; each of the characters is one byte, or b"" for none."""

    delimiter: bytes
    quote: bytes
    skip_blank_lines: bool


def index_records(
    content: Content, dialect: Dialect, *, header: bool = False, expected_fields: int = 0
) -> tuple[Any, int]:
    """Offsets of the records and of the end, int64 of shape (records + 1,), and the fields per record.

    A record reaches to the next one's offset; line breaks at its end are not part of it. A header
    counts as a record here, but not in the numbers that errors give.

    Raises:
      DataError: a record has not `expected_fields` fields (0: as many as the first), a quote stands where
        none may, or the file ends inside quotes.
    """
    return _Scan(content, dialect, header, expected_fields).run()


class _Scan:
    """The state that is carried from block to block."""

    def __init__(self, content: Content, dialect: Dialect, header: bool, expected_fields: int) -> None:
        self.content = content
        self.dialect = dialect
        self.header = header
        self.fields = expected_fields
        self.given_fields = expected_fields
        self.starts: list[Any] = []
        self.blanks: list[Any] = []
        self.count = 0
        self.record_start = 0
        self.open_delimiters = 0  # in the record that the last block left open
        self.inside_quotes = False
        self.last_byte = _NEWLINE  # a file begins as if after a line

    def run(self) -> tuple[Any, int]:
        content = self.content
        position = 0
        if content.read(0, min(3, content.size)) == _BYTE_ORDER_MARK:
            position = 3
        self.record_start = position
        while position < content.size:
            block = content.read(position, min(position + content.block_bytes, content.size))
            self._block(position, block)
            position += len(block)
        if self.inside_quotes:
            raise DataError(
                f"{self._where(self.count, self.record_start)} is not closed: the file ends inside a "
                "quoted field. It is truncated, or its quotes are ordinary characters: then give the "
                "reader parameter `quote=''`."
            )
        if self.record_start < content.size:  # the last line has no line break
            blank = content.size - self.record_start == 1 and self.last_byte == _RETURN
            self._records(np.array([self.record_start]), np.array([blank]), np.array([self.open_delimiters + 1]))
        starts = np.concatenate(self.starts) if self.starts else np.empty(0, np.int64)
        if not self.dialect.skip_blank_lines and len(starts):
            solid = np.flatnonzero(~np.concatenate(self.blanks))
            starts = starts[: solid[-1] + 1 if len(solid) else 0]
        return np.append(starts, content.size).astype(np.int64), self.fields

    def _block(self, position: int, block: bytes) -> None:
        data = np.frombuffer(block, np.uint8)
        newlines = data == _NEWLINE
        delimiters = data == self.dialect.delimiter[0] if self.dialect.delimiter else None
        if self.dialect.quote and (self.inside_quotes or self.dialect.quote in block):
            outside = self._outside_quotes(position, data)
            newlines &= outside
            if delimiters is not None:
                delimiters &= outside
        ends = np.flatnonzero(newlines)
        fields = None
        if delimiters is not None:
            places = np.flatnonzero(delimiters)
            before = places.searchsorted(ends)
            fields = np.diff(before, prepend=0) + 1
            if len(ends):
                fields[0] += self.open_delimiters
                self.open_delimiters = len(places) - int(before[-1])
            else:
                self.open_delimiters += len(places)
        if len(ends):
            starts = np.empty(len(ends), np.int64)
            starts[0] = self.record_start
            starts[1:] = ends[:-1] + (position + 1)
            lengths = ends + position - starts
            before_end = data[ends - 1]
            if ends[0] == 0:
                before_end[0] = self.last_byte
            blank = (lengths == 0) | ((lengths == 1) & (before_end == _RETURN))
            self._records(starts, blank, fields)
            self.record_start = position + int(ends[-1]) + 1
        self.last_byte = int(data[-1])

    def _outside_quotes(self, position: int, data: Any) -> Any:
        quotes = data == self.dialect.quote[0]
        inside = np.logical_xor.accumulate(quotes)
        if self.inside_quotes:
            inside = ~inside
        # A quote opens a field, or is the second of a doubled one. Any other is an ordinary character
        # that would make all that follows look quoted.
        openers = np.flatnonzero(quotes & inside)
        before = data[openers - 1]
        if len(openers) and openers[0] == 0:
            before[0] = self.last_byte
        allowed = (before == self.dialect.delimiter[0]) | (before == _NEWLINE) | (before == self.dialect.quote[0])
        if not allowed.all():
            place = position + int(openers[np.argmin(allowed)])
            if place > 3 or self.content.read(0, place) != _BYTE_ORDER_MARK:
                raise DataError(
                    f"{self.content.name}, line {line_of(self.content, place)}, has a quote inside a "
                    "field that does not begin "
                    "with one. Double it and put the field in quotes, or, when quotes are ordinary "
                    "characters in this file, give the reader parameter `quote=''`."
                )
        self.inside_quotes = bool(inside[-1])
        return ~inside

    def _records(self, starts: Any, blank: Any, fields: Any) -> None:
        if self.dialect.delimiter:
            self._check_fields(starts, blank, fields)
        if self.dialect.skip_blank_lines:
            if blank.any():
                starts = starts[~blank]
        else:
            self.blanks.append(blank)
        self.starts.append(starts)
        self.count += len(starts)

    def _check_fields(self, starts: Any, blank: Any, fields: Any) -> None:
        if not self.fields:
            solid = np.flatnonzero(~blank)
            if not len(solid):
                return
            self.fields = int(fields[solid[0]])
        wrong = np.flatnonzero((fields != self.fields) & ~blank)
        if not len(wrong):
            return
        place = int(wrong[0])
        skipped = int(blank[:place].sum()) if self.dialect.skip_blank_lines else 0
        expected = (
            f"{self.given_fields} columns are named"
            if self.given_fields
            else f"the {'header' if self.header else 'first record'} has {self.fields}"
        )
        raise DataError(
            f"{self._where(self.count + place - skipped, int(starts[place]))} has {int(fields[place])} "
            f"field{'s' if fields[place] != 1 else ''}, but {expected}. "
            f"Correct the file, or the reader parameters `delimiter`, `quote` and `columns`."
        )

    def _where(self, number: int, offset: int) -> str:
        """`number` counts a header, if there is one, as record 0."""
        line = line_of(self.content, offset)
        if self.header and number == 0:
            return f"{self.content.name}, the header (line {line})"
        return f"{self.content.name}, record {number - self.header} (line {line})"


def line_of(content: Content, offset: int) -> int:
    """The number of the line, from 1, that byte `offset` lies in."""
    line = 1
    for start in range(0, offset, content.block_bytes):
        line += content.read(start, min(start + content.block_bytes, offset)).count(b"\n")
    return line
