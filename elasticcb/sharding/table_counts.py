"""Statistics of an embedding table: from each server that holds a part of it, or from each file of a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from elasticcb.errors import WireError
from elasticcb.proto import elasticcb_pb2 as pb
from elasticcb.rpc.tensors import Array

QUANTILES = (0.0, 0.25, 0.5, 0.75, 0.99, 1.0)

# The ranges of a `Spread`: numbers below _EXACT have one each; above, each power of two is split into _EXACT / 2 equal
# ranges, as in HDR Histogram (Tene, 2012), so that a range starts less than 1 % below each of its numbers.
_EXACT_BITS = 8
_EXACT, _HALF = 1 << _EXACT_BITS, 1 << (_EXACT_BITS - 1)
_RANGES = _EXACT + (63 - _EXACT_BITS) * _HALF  # up to 2^63


class Spread:
    """A histogram of integers >= 0: counts by range, which can be summed over servers.

    Attributes:
        counts: by range, int64.
        least, most, sum: of the numbers; 0 if there are none.
    """

    def __init__(self) -> None:
        self.counts = np.zeros(_RANGES, np.int64)
        self.least = self.most = self.sum = 0

    def __len__(self) -> int:
        return int(self.counts.sum())

    def count(self, numbers: Array) -> None:
        """Counts `numbers` (int64 [n], 0 or more)."""
        if not len(numbers):
            return
        least, most = int(numbers.min()), int(numbers.max())
        self.least = min(self.least, least) if self.counts.any() else least
        self.most = max(self.most, most)
        self.sum += int(numbers.sum())
        small = numbers if most < _EXACT else numbers[numbers < _EXACT]
        self.counts[:_EXACT] += np.bincount(small, minlength=_EXACT)
        if len(small) < len(numbers):
            ranges, counts = np.unique(_range_of(numbers[numbers >= _EXACT]), return_counts=True)
            self.counts[ranges] += counts

    def add(self, other: Spread) -> None:
        """Adds the counts of `other`."""
        if other.counts.any():
            self.least = min(self.least, other.least) if self.counts.any() else other.least
            self.most = max(self.most, other.most)
        self.counts += other.counts
        self.sum += other.sum

    def quantiles(self) -> tuple[int, ...]:
        """Values for `QUANTILES`: minimum and maximum are exact, others less than 1 % too small; () without numbers."""
        total = len(self)
        if not total:
            return ()
        places = [round(share * (total - 1)) for share in QUANTILES]
        ranges = np.searchsorted(np.cumsum(self.counts), places, side="right")
        found = [max(self.least, min(self.most, _start_of(int(each)))) for each in ranges]
        return (self.least, *found[1:-1], self.most)

    def to_message(self) -> pb.Spread:
        ranges = np.flatnonzero(self.counts)
        return pb.Spread(
            ranges=ranges.tolist(),
            counts=self.counts[ranges].tolist(),
            least=self.least,
            most=self.most,
            sum=self.sum,
        )

    @classmethod
    def from_message(cls, message: pb.Spread) -> Spread:
        """Raises `WireError` for invalid ranges."""
        ranges = np.array(message.ranges, np.int64)
        if len(ranges) != len(message.counts) or ((ranges < 0) | (ranges >= _RANGES)).any():
            raise WireError(
                f"A server sent {len(ranges)} ranges with {len(message.counts)} counts; expected as many counts as "
                f"ranges, and ranges below {_RANGES}. All processes of a job must run the same release."
            )
        spread = cls()
        spread.counts[ranges] = message.counts
        spread.least, spread.most, spread.sum = message.least, message.most, message.sum
        return spread


def _range_of(numbers: Array) -> Array:
    """The range of each of `numbers`, all from _EXACT on."""
    # A float64 may round up to the next power of two: the number then falls into the last range below it, as it should.
    shifts = np.frexp(numbers.astype(np.float64))[1].astype(np.int64) - _EXACT_BITS
    ranges: Array = _EXACT + (shifts - 1) * _HALF + (numbers >> shifts) - _HALF
    return ranges


def _start_of(index: int) -> int:
    """The first number of a range."""
    if index < _EXACT:
        return index
    power, place = divmod(index - _EXACT, _HALF)
    return (place + _HALF) << (power + 1)


class Top:
    """The most frequently looked-up ids among those shown.

    Attributes:
        ids, hits: int64 [n], most frequent first; among equal ones, the smaller id first.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self.ids, self.hits = np.empty(0, np.int64), np.empty(0, np.int64)

    def show(self, ids: Array, hits: Array) -> None:
        """Adds `ids` (int64 [n]) with their lookups, int64 [n]."""
        if self._size and len(self.ids) == self._size:  # few of many rows qualify
            better = (hits > self.hits[-1]) | ((hits == self.hits[-1]) & (ids < self.ids[-1]))
            ids, hits = ids[better], hits[better]
        if not len(ids):
            return
        ids, hits = np.concatenate([self.ids, ids]), np.concatenate([self.hits, hits])
        best = np.lexsort((ids, -hits))[: self._size]
        self.ids, self.hits = ids[best], hits[best]


# Of `TableCounts` and its message.
_COUNTS = (
    "rows", "row_bytes", "slot_bytes", "bytes", "waiting", "removed", "seconds", "made_lately", "removed_lately",
)  # fmt: skip


@dataclass
class TableCounts:
    """Statistics of one part of a table.

    Attributes:
        top: most frequent ids.
        rows, row_bytes: number of rows, and bytes of their values.
        slot_bytes, slots: bytes of the optimizer slots, and their names.
        hits: lookups of each row in training; empty if not counted.
        ages: versions since each row was last trained; likewise.

    Of a server:
        bytes: total memory of its part of the table, including counts and index.
        waiting: ids not looked up often enough for a row.
        removed: rows removed since the process has had the table.
        seconds: the time until now that the next two count.
        made_lately: rows created for new ids.
        removed_lately: rows removed because of age or lack of space.
    """

    top: Top
    rows: int = 0
    row_bytes: int = 0
    slot_bytes: int = 0
    slots: Sequence[str] = ()
    hits: Spread = field(default_factory=Spread)
    ages: Spread = field(default_factory=Spread)
    bytes: int = 0
    waiting: int = 0
    removed: int = 0
    seconds: float = 0.0
    made_lately: int = 0
    removed_lately: int = 0

    def count(self, ids: Array, hits: Array, used: Array, version: int) -> None:
        """Counts rows by their ids, lookups and versions of last training, int64 [n]."""
        self.hits.count(hits)
        self.ages.count(np.maximum(version - used, 0))
        self.top.show(ids, hits)

    def to_message(self, variable: int) -> pb.TableCounts:
        return pb.TableCounts(
            variable=variable,
            slots=self.slots,
            **{name: getattr(self, name) for name in _COUNTS},
            hits=self.hits.to_message(),
            ages=self.ages.to_message(),
            top_ids=self.top.ids.tolist(),
            top_hits=self.top.hits.tolist(),
        )

    @classmethod
    def from_message(cls, message: pb.TableCounts) -> TableCounts:
        """Raises `WireError`."""
        top = Top(len(message.top_ids))
        top.ids, top.hits = np.array(message.top_ids, np.int64), np.array(message.top_hits, np.int64)
        return cls(
            top,
            slots=tuple(message.slots),
            **{name: getattr(message, name) for name in _COUNTS},
            hits=Spread.from_message(message.hits),
            ages=Spread.from_message(message.ages),
        )
