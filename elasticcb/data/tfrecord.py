"""TFRecord files: records are bytes, usually `tf.train.Example`s.

The format is described at https://www.tensorflow.org/tutorials/load_data/tfrecord: length (uint64),
masked CRC-32C of the length (uint32), data, masked CRC-32C of the data (uint32), little-endian.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import google_crc32c
import numpy as np

from elasticcb.data.content import Content, File, compression_of, opened_content
from elasticcb.data.file_index import FileIndex, RecordOffsets, RecordOffsetsBuilder
from elasticcb.data.file_reader import FileReader, OpenedByOffsets, torn
from elasticcb.data.record_formats import EXAMPLES_ADVICE, SAMPLE_RECORDS, ExampleFormat
from elasticcb.data.stacking import object_array
from elasticcb.errors import DataError

_HEADER_BYTES = 12
_FOOTER_BYTES = 4
_FRAME_BYTES = _HEADER_BYTES + _FOOTER_BYTES
_length_at = struct.Struct("<Q").unpack_from


def masked_crc32c(parts: Sequence[bytes]) -> Any:
    """The masked CRC-32C of each of `parts`: uint32 of shape (n,)."""
    crc = np.fromiter(map(google_crc32c.value, parts), np.uint32, len(parts))
    return ((crc >> np.uint32(15)) | (crc << np.uint32(17))) + np.uint32(0xA282EAD8)


def index_records(content: Content, enough: int | None = None) -> tuple[RecordOffsets, bool]:
    """Finds the offsets of all records, or at least of the first `enough`; returns whether these are all.

    Raises `DataError` if a length does not match its checksum or the file ends inside a record.
    """
    builder = RecordOffsetsBuilder()
    count = position = 0
    while enough is None or count < enough:
        # A block starts with a header; all headers inside the block are followed, then checked together.
        origin = position
        block = content.read(origin, origin + content.block_bytes)
        if not block:
            return builder.places(count, origin), True
        if len(block) < _HEADER_BYTES:
            block += content.read(origin + len(block), origin + _HEADER_BYTES)
        headers = _headers_in(block)
        _check_lengths(content.name, block, headers, count)
        if headers:
            position = origin + headers[-1] + _length_at(block, headers[-1])[0] + _FRAME_BYTES
        end_is_there = position <= origin + len(block) or content.read(position - 1, position)
        if not headers or not end_is_there:
            start = origin + headers[-1] if headers else origin
            raise _truncated(content, count + len(headers) - bool(headers), start)
        builder.add(count, np.array(headers, np.int64) + origin)
        count += len(headers)
    return builder.places(count, position), False


def _headers_in(block: bytes) -> list[int]:
    headers: list[int] = []
    place, last = 0, len(block) - _HEADER_BYTES
    while place <= last:
        headers.append(place)
        place += _length_at(block, place)[0] + _FRAME_BYTES
    return headers


def _check_lengths(name: str, block: bytes, headers: list[int], first: int) -> None:
    if not headers:
        return
    stored = np.frombuffer(b"".join([block[place + 8 : place + _HEADER_BYTES] for place in headers]), "<u4")
    wrong = np.flatnonzero(masked_crc32c([block[place : place + 8] for place in headers]) != stored)
    if len(wrong):
        raise DataError(
            f"Record {first + int(wrong[0])} of {name} has a length that does not match its checksum: the file is "
            "damaged from there on, or is not a TFRecord file. Write it again, or set the reader parameter `format` "
            "to its format."
        )


def _truncated(content: Content, record: int, position: int) -> DataError:
    end = position
    while data := content.read(end, end + content.block_bytes):
        end += len(data)
    return DataError(
        f"{content.name} is truncated: it ends at byte {end}, inside record {record}, which starts at byte "
        f"{position}. Copy or write the file again."
    )


class TFRecordReader(FileReader):
    """Records of TFRecord files, including gzip-compressed ones, as scalar strings.

    Checksums are always verified: those of lengths when the file is indexed, those of the data when a record is read.

    Args:
      columns: features of `tf.train.Example`s to read, without a feed; default: those of the first records.
      fill_null: values of missing features, by name, without a feed.
      ragged: names of features that are lists of varying length, although the first records have lists of one length.
    """

    unknown_columns = EXAMPLES_ADVICE

    def __init__(
        self,
        files: list[str],
        *,
        columns: Sequence[str] = (),
        fill_null: Mapping[str, Any] | None = None,
        ragged: Sequence[str] = (),
    ) -> None:
        super().__init__(files)
        self._columns = [columns] if isinstance(columns, str) else list(columns)
        self._ragged = [ragged] if isinstance(ragged, str) else list(ragged)
        self._fill = dict(fill_null or {})

    def record_format(self) -> ExampleFormat:
        return ExampleFormat(self.first_records(SAMPLE_RECORDS), self._columns, self._fill, self._ragged)

    def _open(self, file: File, index: FileIndex | None, enough: int | None) -> _OpenedRecords:
        if index is not None:
            assert index.places is not None
            content = opened_content(file, index.compression, index.seek_points)
            return _OpenedRecords(file, content, index.places, index.compression)
        compression = compression_of(file, _is_header)
        content = opened_content(file, compression)
        places, complete = index_records(content, enough)
        return _OpenedRecords(file, content, places, compression, complete)


def _is_header(head: bytes) -> bool:
    return len(head) == _HEADER_BYTES and masked_crc32c([head[:8]]).tobytes() == head[8:]


class _OpenedRecords(OpenedByOffsets):
    def read(self, start: int, end: int, size: int) -> Iterator[Any]:
        for piece in self._places.pieces(start, end):
            blob = self.content.read(piece.start, piece.stop)
            headers = _headers_in(blob)
            _check_lengths(self.file.name, blob, headers, piece.first)
            if len(headers) != piece.records or len(blob) != piece.stop - piece.start:
                raise torn(self.file.name, piece)
            first = max(start, piece.first)
            bounds = [*headers, len(blob)][
                first - piece.first : min(end, piece.first + piece.records) - piece.first + 1
            ]
            records = [blob[a + _HEADER_BYTES : b - _FOOTER_BYTES] for a, b in itertools.pairwise(bounds)]
            _verify(self.file.name, first, records, [blob[stop - _FOOTER_BYTES : stop] for stop in bounds[1:]])
            for i in range(0, len(records), size):
                yield object_array(records[i : i + size])


def _verify(name: str, first: int, records: list[bytes], footers: list[bytes]) -> None:
    wrong = np.flatnonzero(masked_crc32c(records) != np.frombuffer(b"".join(footers), "<u4"))
    if len(wrong):
        raise DataError(
            f"Record {first + int(wrong[0])} of {name} does not match its checksum: the file is damaged. "
            "Write it again."
        )
