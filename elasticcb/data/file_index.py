"""The index of a file: its number of records, and the offsets of some of them."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from elasticcb.data.content import Identity
from elasticcb.data.stacking import CHUNK_BYTES

_SPACING_BYTES = 256 << 10  # bytes between indexed offsets: few to skip before a record, and a small index per gigabyte


class RecordRange(NamedTuple):
    """Consecutive records, and the bytes that contain them."""

    first: int  # record
    records: int
    start: int  # byte
    stop: int


class RecordOffsets:
    """Offsets of some records of a file; the last offset is the end of the file.

    Args:
        records: int64 of shape (n,), ascending; the numbers of these records, then the number of all records.
        offsets: int64 of shape (n,), in bytes.
    """

    def __init__(self, records: Any, offsets: Any) -> None:
        self.records = records
        self.offsets = offsets

    @property
    def count(self) -> int:
        """How many records there are."""
        return int(self.records[-1])

    @property
    def nbytes(self) -> int:
        return int(self.records.nbytes + self.offsets.nbytes)

    def pieces(self, start: int, end: int) -> Iterator[RecordRange]:
        """The pieces to read for the records `[start, end)`, each about `CHUNK_BYTES`; the first and last may contain
        more records."""
        if start >= end:
            return
        place = int(self.records.searchsorted(start, side="right")) - 1
        last = int(self.records.searchsorted(end, side="left"))
        while place < last:
            far = int(self.offsets.searchsorted(self.offsets[place] + CHUNK_BYTES, side="right")) - 1
            next_place = min(max(far, place + 1), last)
            first, stop = int(self.records[place]), int(self.records[next_place])
            yield RecordRange(first, stop - first, int(self.offsets[place]), int(self.offsets[next_place]))
            place = next_place


class RecordOffsetsBuilder:
    """Collects offsets while a file is scanned."""

    def __init__(self) -> None:
        self._records: list[Any] = []
        self._offsets: list[Any] = []
        self._last_cell = -1

    def add(self, first: int, starts: Any) -> None:
        """Adds the records from number `first` on, which start at the bytes `starts`, int64 of shape (n,)."""
        cells = starts // _SPACING_BYTES
        chosen = np.flatnonzero(np.diff(cells, prepend=self._last_cell))
        if len(chosen):
            self._records.append(chosen + first)
            self._offsets.append(starts[chosen])
            self._last_cell = int(cells[-1])

    def places(self, count: int, end: int) -> RecordOffsets:
        """The offsets of `count` records that end at byte `end`, without later records."""
        records = np.concatenate([*self._records, np.empty(0, np.int64)]).astype(np.int64)
        offsets = np.concatenate([*self._offsets, np.empty(0, np.int64)]).astype(np.int64)
        kept = records < count
        return RecordOffsets(np.append(records[kept], count), np.append(offsets[kept], end))


@dataclass(frozen=True)
class FileIndex:
    """The results of scanning a file, which spare other processes the scan.

    Attributes:
        layout: description of what all files of an origin must have in common; "": unknown.
        places: offsets; None for formats with their own index.
        compression: see `decompression.compression_of`.
        details: details of the format; JSON values.
    """

    identity: Identity
    count: int
    layout: str = ""
    places: RecordOffsets | None = None
    compression: str = ""
    seek_points: bytes = b""
    details: Mapping[str, Any] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """A line of JSON, then the arrays, compressed. There may be many files, so it must be quick."""
        places = self.places or RecordOffsets(np.empty(0, np.int64), np.empty(0, np.int64))
        known = -1 if self.places is None else len(places.records)
        head = json.dumps([list(self.identity), self.count, self.layout, known, self.compression, self.details])
        arrays = places.records.tobytes() + places.offsets.tobytes() + self.seek_points
        return zlib.compress(head.encode() + b"\n" + arrays)

    @classmethod
    def from_bytes(cls, data: bytes) -> FileIndex:
        head, _, rest = zlib.decompress(data).partition(b"\n")
        identity, count, layout, known, compression, details = json.loads(head)
        numbers = np.frombuffer(rest, np.int64, 2 * max(known, 0))
        places = RecordOffsets(*numbers.reshape(2, known)) if known >= 0 else None
        return cls(Identity(*identity), count, layout, places, compression, rest[numbers.nbytes :], details)
