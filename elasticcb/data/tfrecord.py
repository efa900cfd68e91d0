"""TFRecord files: records are bytes, usually `tf.train.Example`s.

The format is described at https://www.tensorflow.org/tutorials/load_data/tfrecord: length (uint64),
masked CRC-32C of the length (uint32), data, masked CRC-32C of the data (uint32), little-endian.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import google_crc32c
import numpy as np

from elasticcb.data.files import Content, FileReader, open_content, spans
from elasticcb.data.reader import CHUNK_RECORDS, check_range
from elasticcb.data.stacking import object_array
from elasticcb.errors import DataError

_HEADER_BYTES = 12
_FOOTER_BYTES = 4
_FRAME_BYTES = _HEADER_BYTES + _FOOTER_BYTES


def masked_crc32c(parts: Sequence[bytes]) -> Any:
    """The masked CRC-32C of each of `parts`: uint32 of shape (n,)."""
    crc = np.fromiter(map(google_crc32c.value, parts), np.uint32, len(parts))
    return ((crc >> np.uint32(15)) | (crc << np.uint32(17))) + np.uint32(0xA282EAD8)


@dataclass(frozen=True)
class _Indexed:
    content: Content
    offsets: Any  # of the headers, int64 of shape (records + 1,), the last is the file's end
    layout: str = ""

    @property
    def count(self) -> int:
        return len(self.offsets) - 1

    @property
    def memory_bytes(self) -> int:
        return int(self.offsets.nbytes) + self.content.memory_bytes


def index_records(content: Content) -> Any:
    """The byte offsets of all records and of the end, int64 of shape (records + 1,).

    Raises `DataError` when a length fails its checksum or the file ends inside a record.
    """
    length_at = struct.Struct("<Q").unpack_from
    parts: list[Any] = []
    count, position, size = 0, 0, content.size
    while position < size:
        # A block begins with a header; those that lie in it as a whole are followed, then checked at once.
        origin = position
        block = content.read(origin, min(origin + content.block_bytes, size))
        headers: list[int] = []
        place, last = 0, len(block) - _HEADER_BYTES
        while place <= last:
            headers.append(place)
            place += length_at(block, place)[0] + _FRAME_BYTES
        _check_lengths(content.name, block, headers, count)
        position = origin + place
        if position > size or not headers:
            start = origin + headers[-1] if headers else origin
            raise _truncated(content, count + len(headers) - bool(headers), start)
        parts.append(np.array(headers, np.int64) + origin)
        count += len(headers)
    return np.concatenate([*parts, [size]]).astype(np.int64)


def _check_lengths(name: str, block: bytes, headers: list[int], first: int) -> None:
    if not headers:
        return
    stored = np.frombuffer(b"".join([block[place + 8 : place + _HEADER_BYTES] for place in headers]), "<u4")
    wrong = np.flatnonzero(masked_crc32c([block[place : place + 8] for place in headers]) != stored)
    if len(wrong):
        raise DataError(
            f"Record {first + int(wrong[0])} of {name} has a length that does not match its checksum: the "
            "file is damaged from there on, or is no TFRecord file. Write it again, or name its format "
            "with the reader parameter `format`."
        )


def _truncated(content: Content, record: int, position: int) -> DataError:
    return DataError(
        f"{content.name} is truncated: it ends at byte {content.size}, inside record {record}, which "
        "begins at "
        f"byte {position}. Copy or write the file again."
    )


class TFRecordReader(FileReader):
    """Records of TFRecord files as scalar strings, found by an index of offsets.

    Checksums are always verified: those of lengths for the whole file when it is indexed, those of the data when a
    record is read.

    Args:
      verify_data: accepted for earlier job files; it has no effect.
    """

    def __init__(self, files: list[str], *, verify_data: bool = True) -> None:
        super().__init__(files)

    def _open(self, name: str) -> _Indexed:
        content = open_content(name)
        return _Indexed(content, index_records(content))

    def read_chunks(self, name: str, start: int, end: int, size: int = CHUNK_RECORDS) -> Iterator[Any]:
        indexed: _Indexed = self.opened(name)
        check_range(name, start, end, indexed.count)
        for first, last in spans(indexed.offsets, start, end):
            origin = int(indexed.offsets[first])
            blob = indexed.content.read(origin, int(indexed.offsets[last]))
            bounds = (indexed.offsets[first : last + 1] - origin).tolist()
            records = [blob[begin + _HEADER_BYTES : stop - _FOOTER_BYTES] for begin, stop in itertools.pairwise(bounds)]
            _verify(name, first, records, [blob[stop - _FOOTER_BYTES : stop] for stop in bounds[1:]])
            for i in range(0, len(records), size):
                yield object_array(records[i : i + size])


def _verify(name: str, first: int, records: list[bytes], footers: list[bytes]) -> None:
    wrong = np.flatnonzero(masked_crc32c(records) != np.frombuffer(b"".join(footers), "<u4"))
    if len(wrong):
        raise DataError(
            f"Record {first + int(wrong[0])} of {name} does not match its checksum: the file is damaged. "
            "Write it again."
        )
