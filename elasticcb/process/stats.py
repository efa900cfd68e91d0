"""Statistics of a process for the master's metrics, cheap to collect.

Workers and servers send them with other messages.
"""

from __future__ import annotations

import math
import os
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from elasticcb.errors import WireError
from elasticcb.proto import elasticcb_pb2 as pb

_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)

PUSH, PULL, LOOKUP, STALENESS = "push", "pull", "lookup", "staleness"
SECONDS = (PUSH, PULL, LOOKUP)  # names of the time histograms
# Upper bounds of buckets, by histogram: seconds of a worker's calls to all servers, or versions.
BOUNDS: Mapping[str, Sequence[float]] = {
    PUSH: _SECONDS,
    PULL: _SECONDS,
    LOOKUP: _SECONDS,
    STALENESS: (0, 1, 2, 4, 8, 16, 32, 64, 128, 256),
}


class Histogram:
    """A histogram. Only one thread at a time may observe.

    Args:
        bounds: inclusive upper bounds of the buckets; the last bucket has no upper bound.
    """

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def add(self, other: Histogram) -> None:
        """Adds the counts of another histogram with the same bounds."""
        self.counts = [own + theirs for own, theirs in zip(self.counts, other.counts, strict=True)]
        self.sum += other.sum

    def quantile(self, share: float) -> float | None:
        """The quantile of the values, interpolated linearly in a bucket; None: there are no values. At most the last
        bound."""
        rank, below, lower = share * sum(self.counts), 0, 0.0
        for bound, count in zip(self.bounds, self.counts, strict=False):
            if count and below + count >= rank:
                return lower + (bound - lower) * max(0.0, rank - below) / count
            below, lower = below + count, bound
        return lower if any(self.counts) else None


def histograms() -> dict[str, Histogram]:
    """One empty histogram of each kind."""
    return {name: Histogram(bounds) for name, bounds in BOUNDS.items()}


class TableSize(NamedTuple):
    """A server's part of an embedding table; `bytes` includes slots, counts and index."""

    rows: int
    bytes: int


@dataclass
class Stats:
    """The statistics of a process since it started.

    Attributes:
        resident_bytes: memory usage; 0: unknown.
        refused_calls: number of refused calls, by text of the `Refusal`.
        certificate_expires: expiry of its TLS certificate, in seconds since the epoch; 0: it has none.
    """

    cpu_seconds: float = 0.0
    resident_bytes: int = 0
    rows_looked_up: int = 0
    certificate_expires: float = 0.0
    histograms: dict[str, Histogram] = field(default_factory=histograms)
    refused_calls: dict[str, int] = field(default_factory=dict)
    tables: dict[str, TableSize] = field(default_factory=dict)

    @classmethod
    def from_message(cls, message: pb.ProcessStats) -> Stats:
        """Raises `WireError` for unknown histograms or buckets, and for impossible numbers."""
        counted = {
            name: getattr(message, name)
            for name in (
                "cpu_seconds",
                "resident_bytes",
                "rows_looked_up",
                "certificate_expires",
            )
        }
        tables = {each.path: TableSize(each.rows, each.bytes) for each in message.tables}
        sizes = (number for size in tables.values() for number in size)
        numbers = [*counted.values(), *message.refused_calls.values(), *sizes]
        if not all(0 <= number < math.inf for number in numbers):
            raise WireError(f"A process reported impossible statistics: {numbers}.")
        stats = cls(**counted, refused_calls=dict(message.refused_calls), tables=tables)
        for given in message.histograms:
            known = stats.histograms.get(given.name)
            if (
                known is None
                or len(given.counts) != len(known.counts)
                or min(given.counts) < 0
                or not math.isfinite(given.sum)
            ):
                raise WireError(
                    f"A process sent {len(given.counts)} counts and the sum {given.sum} for the histogram "
                    f"{given.name!r}; known are {sorted(BOUNDS)}, with a count from 0 for each range."
                )
            known.counts, known.sum = list(given.counts), given.sum
        return stats


class Measures:
    """The counters of this process.

    Attributes:
        refused_calls: returns the number of calls that its server refused, by reason.
        certificate_expires: returns the expiry of its TLS certificate, in seconds since the epoch; 0: it has none.
        tables: returns a server's parts of embedding tables, by path of the variable.
    """

    def __init__(self) -> None:
        self.histograms = histograms()
        self.rows_looked_up = 0
        self.refused_calls: Callable[[], Mapping[str, int]] = dict
        self.certificate_expires: Callable[[], float] = float
        self.tables: Callable[[], Mapping[str, TableSize]] = dict

    def to_message(self) -> pb.ProcessStats:
        return pb.ProcessStats(
            cpu_seconds=time.process_time(),
            resident_bytes=resident_bytes(),
            rows_looked_up=self.rows_looked_up,
            histograms=[
                pb.Histogram(name=name, counts=each.counts, sum=each.sum)
                for name, each in self.histograms.items()
                if any(each.counts)
            ],
            refused_calls=self.refused_calls(),
            certificate_expires=self.certificate_expires(),
            tables=[pb.TableSize(path=path, rows=size.rows, bytes=size.bytes) for path, size in self.tables().items()],
        )


def resident_bytes() -> int:
    """Resident memory of this process, including shared memory; 0 if unknown."""
    try:
        return int(Path("/proc/self/statm").read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0
