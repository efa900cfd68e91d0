"""Finds the offsets of the records of a text file with NumPy, block by block, and splits bytes into records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from elasticcb.data.content import Content
from elasticcb.data.file_index import RecordOffsets, RecordOffsetsBuilder
from elasticcb.errors import DataError
from elasticcb.process.wording import how_many

_BITS_SET = np.array([number.bit_count() for number in range(1 << 16)], np.uint8)  # by the value of 16 bits


def odd_so_far(flags: Any) -> Any:
    """Whether the number of set `flags` up to and including each position is odd: bool of shape (n,), like `flags`.

    Same as `np.logical_xor.accumulate`, which is slower because it handles one flag at a time.
    """
    words = _words(flags)
    for shift in (1, 2, 4, 8, 16, 32):
        words ^= words << np.uint64(shift)
    odd = words >> np.uint64(63)  # in each word
    # all bits, if the number of set bits in earlier words is odd
    words ^= np.uint64(0) - (np.bitwise_xor.accumulate(odd) ^ odd)
    return np.unpackbits(words.view(np.uint8), count=len(flags), bitorder="little").view(bool)


def count_before(flags: Any, places: Any) -> Any:
    """How many of `flags`, bool of shape (n,), are set before each of `places`: int64, shape as `places`."""
    cells = _words(flags).view("<u2")
    before = np.zeros(len(cells) + 1, np.int64)
    np.cumsum(_BITS_SET.take(cells), out=before[1:])
    cell = places >> 4
    within: Any = _BITS_SET.take(cells[cell] & ((1 << (places & 15)) - 1))
    return before[cell] + within


def _words(flags: Any) -> Any:
    words = np.zeros(-(-len(flags) // 64), "<u8")
    packed = np.packbits(flags, bitorder="little")
    words.view(np.uint8)[: len(packed)] = packed
    return words


_NEWLINE, _RETURN = 10, 13
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_HEAD_BYTES = 1 << 20  # bytes from which the kind of line breaks is detected


@dataclass(frozen=True)
class Dialect:
    """How lines form records; each character is one byte, or b"" for none."""

    delimiter: bytes
    quote: bytes
    skip_blank_lines: bool
    spans_lines: bool = True  # whether a quoted field may contain line breaks
    same_fields: bool = True  # whether all records must have the same number of fields


@dataclass(frozen=True)
class TextScan:
    """The results of a scan.

    Attributes:
        places: offsets of records, without the header.
        fields: number of fields in each record; 0: lines are not split.
        header: the header's bytes.
        complete: whether the scan reached the end of the file.
    """

    places: RecordOffsets
    fields: int
    header: bytes
    complete: bool


def index_records(
    content: Content, dialect: Dialect, *, header: bool = False, expected_fields: int = 0, enough: int | None = None
) -> TextScan:
    """Finds the records of `content`, or at least the first `enough` of them if given.

    A record extends to the next one's offset; line breaks at its end are not part of it. A header is not a record, and
    does not count in the numbers in errors.

    Raises:
      DataError: a record does not have `expected_fields` fields (0: as many as the first), a quote is misplaced, the
          file ends inside quotes, or lines end with CR without LF.
    """
    return _Scan(content, dialect, header, expected_fields).run(enough)


def split_records(blob: bytes, dialect: Dialect) -> list[bytes]:
    """The records in bytes that start and end at record boundaries."""
    return [line.rstrip(b"\r\n") for line in _lines(blob, dialect) if not (dialect.skip_blank_lines and _blank(line))]


def line_in(blob: bytes, dialect: Dialect, record: int) -> int:
    """How many line breaks of `blob` precede a record of it, counted from 0."""
    line = 0
    for each in _lines(blob, dialect):
        if not (dialect.skip_blank_lines and _blank(each)):
            if record == 0:
                break
            record -= 1
        line += 1 + each.count(b"\n")
    return line


def _lines(blob: bytes, dialect: Dialect) -> list[bytes]:
    """Splits lines, without line breaks; line breaks inside quotes don't end a line."""
    if not dialect.quote or dialect.quote not in blob:
        lines = blob.split(b"\n")
    else:
        data = np.frombuffer(blob, np.uint8)
        outside = ~odd_so_far(data == dialect.quote[0])
        ends = np.flatnonzero((data == _NEWLINE) & outside).tolist()
        starts = [0, *(end + 1 for end in ends)]
        lines = [blob[start:end] for start, end in zip(starts, [*ends, len(blob)], strict=True)]
    if not lines[-1]:
        lines.pop()  # the rest after the last line break
    return lines


def _blank(line: bytes) -> bool:
    return line in (b"", b"\r")


class _Scan:
    """The state of a scan between blocks."""

    def __init__(self, content: Content, dialect: Dialect, header: bool, expected_fields: int) -> None:
        self.content = content
        self.dialect = dialect
        self.has_header = header
        self.fields = expected_fields
        self.given_fields = expected_fields
        self.builder = RecordOffsetsBuilder()
        self.header_bounds: list[int] = []  # offsets of the header, and of the first record
        self.count = 0  # number of records, including the header
        self.solid = 0  # the same, up to the last record that is not blank
        self.record_start = 0
        self.open_delimiters = 0  # in the unfinished record of the last block
        self.inside_quotes = False
        self.closes_quotes = False  # the last byte ends a quoted field, unless the next one is a quote
        self.last_byte = _NEWLINE  # a file starts as if after a line break

    def run(self, enough: int | None) -> TextScan:
        content = self.content
        position = 3 if content.read(0, 3) == _BYTE_ORDER_MARK else 0
        self.record_start = position
        self._refuse_carriage_returns(position)
        complete = False
        while enough is None or self.solid - self.has_header < enough:
            block = content.read(position, position + content.block_bytes)
            if not block:
                complete = True
                self._end(position)
                break
            self._block(position, block)
            position += len(block)
        header = b""
        if len(self.header_bounds) == 1:
            self.header_bounds.append(position)
        if self.header_bounds:
            header = content.read(*self.header_bounds).rstrip(b"\r\n")
        places = self.builder.places(max(self.solid - self.has_header, 0), position if complete else self.record_start)
        return TextScan(places, self.fields, header, complete)

    def _refuse_carriage_returns(self, position: int) -> None:
        """Raises `DataError` if the first lines end with a CR, without LF, as in files of old Macs."""
        data = np.frombuffer(self.content.read(position, position + _HEAD_BYTES), np.uint8)
        returns = data == _RETURN
        if not returns.any():
            return
        newlines = data == _NEWLINE
        if self.dialect.quote and self.dialect.spans_lines:
            outside = ~odd_so_far(data == self.dialect.quote[0])
            returns, newlines = returns & outside, newlines & outside
        if returns[:-1].any() and not newlines.any():
            raise DataError(
                f"Lines of {self.content.name} end with a carriage return (CR) without a line feed (LF). Expected LF "
                "or CR LF. Convert its line breaks, for example with `tr '\\r' '\\n'`."
            )

    def _end(self, end: int) -> None:
        if self.inside_quotes:
            raise DataError(
                f"{self._where(self.count, self.record_start)} is not closed: the file ends inside a quoted field. "
                "Either it is truncated, or quotes are ordinary characters; in that case, set the reader parameter "
                "`quote=''`."
            )
        if self.record_start < end:  # the last line has no line break
            blank = end - self.record_start == 1 and self.last_byte == _RETURN
            self._records(np.array([self.record_start]), np.array([blank]), np.array([self.open_delimiters + 1]))

    def _block(self, position: int, block: bytes) -> None:
        data = np.frombuffer(block, np.uint8)
        newlines = data == _NEWLINE
        delimiters = data == self.dialect.delimiter[0] if self.dialect.delimiter else None
        if self.dialect.quote and (self.inside_quotes or self.closes_quotes or self.dialect.quote in block):
            outside = self._outside_quotes(position, data)
            newlines &= outside
            if delimiters is not None:
                delimiters &= outside
        ends = np.flatnonzero(newlines)
        fields = None
        if delimiters is not None:
            before = count_before(delimiters, ends)
            fields = np.diff(before, prepend=0) + 1
            count = int(np.count_nonzero(delimiters))
            if len(ends):
                fields[0] += self.open_delimiters
                self.open_delimiters = count - int(before[-1])
            else:
                self.open_delimiters += count
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
        inside = odd_so_far(quotes)
        if self.inside_quotes:
            inside = ~inside
        # A valid quote opens a field, closes it, or is one of two doubled ones. Any other quote would make everything
        # after it look quoted.
        places = np.flatnonzero(quotes)
        opens = inside[places]
        around = np.zeros(256, bool)  # the bytes that may be before an opening quote
        around[[self.dialect.quote[0], self.dialect.delimiter[0], _NEWLINE]] = True
        before = data[places - 1]
        if len(places) and places[0] == 0:
            before[0] = self.last_byte
        self._refuse(
            position,
            places[opens & ~around[before]],
            "has a quote inside a field that does not start with one. Double it and enclose the field in quotes",
        )
        around[_RETURN] = True  # and after a closing one
        after = places[~opens] + 1
        self.closes_quotes, closed = bool(quotes[-1] and not inside[-1]), self.closes_quotes
        after = np.concatenate([[0] if closed else [], after[: len(after) - self.closes_quotes]]).astype(np.int64)
        self._refuse(
            position,
            after[~around[data[after]]],
            "continues a field after its closing quote. Double quotes inside it, and enclose the whole field in quotes",
        )
        if not self.dialect.spans_lines:
            self._refuse(
                position,
                np.flatnonzero(inside & (data == _NEWLINE)),
                "ends inside a quoted field. If quoted fields may contain line breaks, set the reader parameter "
                f"`quote='{self.dialect.quote.decode()}'`",
            )
        self.inside_quotes = bool(inside[-1])
        return ~inside

    def _refuse(self, position: int, wrong: Any, problem: str) -> None:
        """Raises `DataError` for the first of some places of a block that are wrong."""
        if len(wrong):
            line = line_of(self.content, position + int(wrong[0]))
            raise DataError(
                f"{self.content.name}, line {line}, {problem}; or, if quotes are ordinary characters in this file, set "
                "the reader parameter `quote=''`."
            )

    def _records(self, starts: Any, blank: Any, fields: Any) -> None:
        if self.dialect.delimiter:
            self._check_fields(starts, blank, fields)
        if self.dialect.skip_blank_lines and blank.any():
            starts = starts[~blank]
            blank = np.zeros(len(starts), bool)
        if not len(starts):
            return
        solid = np.flatnonzero(~blank)
        if len(solid):
            self.solid = self.count + int(solid[-1]) + 1
        if self.has_header and len(self.header_bounds) < 2:
            self.header_bounds += starts[: 2 - len(self.header_bounds)].tolist()
        skipped = 1 if self.has_header and self.count == 0 else 0
        self.builder.add(self.count + skipped - self.has_header, starts[skipped:])
        self.count += len(starts)

    def _check_fields(self, starts: Any, blank: Any, fields: Any) -> None:
        if not self.fields:
            solid = np.flatnonzero(~blank)
            if not len(solid):
                return
            self.fields = int(fields[solid[0]])
        if not self.dialect.same_fields:
            return
        wrong = np.flatnonzero((fields != self.fields) & ~blank)
        if not len(wrong):
            return
        place = int(wrong[0])
        skipped = int(blank[:place].sum()) if self.dialect.skip_blank_lines else 0
        expected = (
            f"the parameter `columns` names {self.given_fields}"
            if self.given_fields
            else f"the {'header' if self.has_header else 'first record'} has {self.fields}"
        )
        raise DataError(
            f"{self._where(self.count + place - skipped, int(starts[place]))} has "
            f"{how_many(int(fields[place]), 'field')}, but {expected}. "
            "Correct the file, or the reader parameters `delimiter`, `quote` and `columns`; with check_fields=false "
            "it is a bad record, which a job can skip."
        )

    def _where(self, number: int, offset: int) -> str:
        """Describes a record; `number` counts the header, if there is one, as record 0."""
        line = line_of(self.content, offset)
        if self.has_header and number == 0:
            return f"{self.content.name}, the header (line {line})"
        return f"{self.content.name}, record {number - self.has_header} (line {line})"


def line_of(content: Content, offset: int) -> int:
    """The number of the line, from 1, that contains byte `offset`."""
    line = 1
    for start in range(0, offset, content.block_bytes):
        line += content.read(start, min(start + content.block_bytes, offset)).count(b"\n")
    return line
