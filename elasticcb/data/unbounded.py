"""The interface of sources that grow while a job trains on them: partitions of records, read by ranges of offsets."""

from __future__ import annotations

import operator
from abc import abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from elasticcb.data.reader import Reader, Source
from elasticcb.errors import DataError


@dataclass(frozen=True, slots=True)
class Partition:
    """What is there of a partition, by offsets of records; more records come at its end.

    Attributes:
        start: where a new job begins.
        first: the oldest record that is still there; earlier ones were removed.
        end: after the newest record.
        stop: where the job ends; None: never.
        id: when it changes, the partition was deleted and created again: an error that ends the job; "": unknown.
    """

    start: int
    first: int
    end: int
    stop: int | None = None
    id: str = ""


class UnboundedSource(Reader):
    """Records that come while a job trains: named partitions, each of which grows at its end.

    The master calls `partitions` several times a second, in a thread of its own, and gives workers ranges of offsets;
    these call `read_chunks`. Each offset is trained at least once; what is read again after a fault is counted. With
    `may_skip`, offsets may have no record.

    Attributes:
        in_order: train all records of a partition before the next one, in the order of `partitions`; else the
            partitions take turns.
        has_times: `offset_at` finds records by their timestamps.
        look_seconds: time between two calls of `partitions`.
        most: the job ends after this number of records; None: it does not.
    """

    in_order = False
    has_times = False
    look_seconds = 0.2
    most: int | None = None

    @abstractmethod
    def partitions(self, known: Collection[str]) -> Mapping[str, Partition]:
        """Partitions that are not `known`, or have grown, by name. Raises `StreamError` if the source can't be reached
        now: it is asked again.

        Args:
            known: names of earlier results, also of those before the job was resumed: others are new, and train from
                their first record.
        """

    def time_of(self, name: str, offset: int) -> float:
        """When the record at an offset came, in seconds since the epoch; 0: unknown. Raises `StreamError`."""
        return 0.0

    def offset_at(self, name: str, time: float) -> int | None:
        """The first offset whose record has a timestamp of at least `time`, in seconds since the epoch; None: no record
        has by now. Raises `StreamError`."""
        raise NotImplementedError

    def trained(self, offsets: Mapping[str, int]) -> None:
        """All records before these offsets are trained and saved; for monitors of the source. Called now and then."""

    def sources(self) -> list[Source]:
        """None: their number is not known."""
        return []

    @abstractmethod
    def beginning(self, records: int) -> tuple[str, int, int]:
        """A range of at most `records` records to build the model with: partition, start, end; waits for the first
        one. Raises `StreamError`."""

    def close(self) -> None:
        """Closes the connections of this process."""


def checked_partitions(source: UnboundedSource, known: Collection[str]) -> dict[str, Partition]:
    """Calls `source.partitions`; NumPy's integers become Python's. Raises `DataError` if the result is invalid, and
    the source's errors."""
    given = source.partitions(known)
    found = {}
    try:
        for name, each in given.items():
            if not isinstance(name, str):
                raise TypeError("a name is a str")
            stop = None if each.stop is None else operator.index(each.stop)
            start, first, end = map(operator.index, (each.start, each.first, each.end))
            found[name] = Partition(start, first, end, stop, str(each.id))
    except (AttributeError, TypeError) as error:
        raise DataError(
            f"{type(source).__name__}.partitions() returned {given!r}. Expected a dict of names, each with an "
            "elasticcb.data.Partition whose offsets are integers."
        ) from error
    return found
