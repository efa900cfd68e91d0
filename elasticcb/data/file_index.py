"""What is known of a file before its records are read: how many there are, and where some of them begin."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from elasticcb.data.content import Identity
from elasticcb.data.stacking import CHUNK_BYTES

_SPACING_BYTES = 256 << 10  # between places: little to read in vain before a record, and little to keep per gigabyte


class RecordRange(NamedTuple):
    """Consecutive records, and the bytes that they lie in."""

    first: int  # record
    records: int
    start: int  # byte
    stop: int


class RecordOffsets:
    """Where some records of a file begin; the last place is its end.

    Args:
        records: int64 of shape (n,), ascending; the number of each, and at the end that of all records.
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
        """What to read for the records `[start, end)`: pieces of some `CHUNK_BYTES`, whose first and last may hold
        records more."""
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
    """Collects places while a file is scanned."""

    def __init__(self) -> None:
        self._records: list[Any] = []
        self._offsets: list[Any] = []
        self._last_cell = -1

    def add(self, first: int, starts: Any) -> None:
        """The records from number `first` on begin at the bytes `starts`, int64 of shape (n,)."""
        cells = starts // _SPACING_BYTES
        chosen = np.flatnonzero(np.diff(cells, prepend=self._last_cell))
        if len(chosen):
            self._records.append(chosen + first)
            self._offsets.append(starts[chosen])
            self._last_cell = int(cells[-1])

    def places(self, count: int, end: int) -> RecordOffsets:
        """Of `count` records that end at byte `end`; places of records behind them are left out."""
        records = np.concatenate([*self._records, np.empty(0, np.int64)]).astype(np.int64)
        offsets = np.concatenate([*self._offsets, np.empty(0, np.int64)]).astype(np.int64)
        kept = records < count
        return RecordOffsets(np.append(records[kept], count), np.append(offsets[kept], end))


@dataclass(frozen=True)
class FileIndex:
    """What one process finds out about a file, and others need not.

    Attributes:
        identity: of the file that was indexed.
        count: of records.
        layout: what all files of an origin must have in common, in words; "": nothing is known.
        places: None for formats that have an index of their own.
        compression: see `decompression.compression_of`.
        seek_points: of a gzip file.
        details: of the format; values of JSON.
    """

    identity: Identity
    count: int
    layout: str = ""
    places: RecordOffsets | None = None
    compression: str = ""
    seek_points: bytes = b""
    details: Mapping[str, Any] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        places = self.places or RecordOffsets(np.empty(0, np.int64), np.empty(0, np.int64))
        head = [list(self.identity), self.count, self.layout, self.places is not None, self.compression, self.details]
        file = io.BytesIO()
        np.savez_compressed(
            file,
            head=np.frombuffer(json.dumps(head).encode(), np.uint8),
            records=places.records,
            offsets=places.offsets,
            seek_points=np.frombuffer(self.seek_points, np.uint8),
        )
        return file.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes) -> FileIndex:
        with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
            identity, count, layout, has_places, compression, details = json.loads(arrays["head"].tobytes())
            places = RecordOffsets(arrays["records"], arrays["offsets"]) if has_places else None
            seek_points = arrays["seek_points"].tobytes()
        return cls(Identity(*identity), count, layout, places, compression, seek_points, details)
