"""The batches of all workers in one order, for callbacks that follow them on the master; pure."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from elasticcb.settings import Mode


@dataclass(frozen=True, slots=True)
class BatchEvent:
    """A batch that a worker has done."""

    kind: Mode
    number: int  # of the epoch, or of the evaluation round
    version: int  # of the model; of a training batch after its push
    size: int  # records
    logs: Mapping[str, float] = field(default_factory=dict)  # of this batch alone


@dataclass(frozen=True, slots=True)
class NumberedBatch:
    """A batch with its place among those of all workers."""

    event: BatchEvent
    index: int  # in its epoch or round, from 0
    means: Mapping[str, float]  # of `logs` over the records of the epoch up to this batch


class BatchLog:
    """Puts training batches in order of version, as long as nothing is lost by waiting.

    A worker's versions never fall, and it reports in order. So a batch can be overtaken only by one of a worker
    that trains and whose newest report is older; when there is none, the batch is given out. Batches of
    evaluations and predictions have no order, and are given out as they come.

    Args:
        limit: so many batches wait at most; beyond, the oldest are given out.
    """

    def __init__(self, limit: int = 100_000) -> None:
        self._limit = limit
        self._waiting: list[tuple[int, int, BatchEvent]] = []  # a heap
        self._unordered: list[BatchEvent] = []
        self._arrived = 0
        self._reported: dict[int, int] = {}  # worker -> the version that it has reported all its batches up to
        self._open: dict[tuple[Mode, int], _Means] = {}
        self._closed: dict[Mode, int] = {}  # newest number that is over

    def add(self, worker: int, version: int, events: Iterable[BatchEvent]) -> None:
        """`worker` has reported `events`, and will report no more of versions before `version`."""
        self._reported[worker] = max(version, self._reported.get(worker, 0))
        for event in events:
            if event.number <= self._closed.get(event.kind, -1):
                continue  # of a worker that was given up; what comes after its epoch's end can't be told any more
            self._arrived += 1
            if event.kind is Mode.TRAINING:
                heapq.heappush(self._waiting, (event.version, self._arrived, event))
            else:
                self._unordered.append(event)

    def __len__(self) -> int:
        """Batches that wait."""
        return len(self._waiting) + len(self._unordered)

    def take(self, training: Collection[int], most: int | None = None) -> list[NumberedBatch]:
        """What can't be overtaken any more while `training` are the workers with training tasks; `most` at once."""
        certain = min((self._reported.get(worker, -1) for worker in training), default=None)
        taken, self._unordered = self._unordered[:most], self._unordered[most:] if most else []
        while self._waiting and len(taken) != most:
            version = self._waiting[0][0]
            if certain is not None and version > certain and len(self._waiting) <= self._limit:
                break
            taken.append(heapq.heappop(self._waiting)[2])
        return [self._numbered(event) for event in taken]

    def end(self, kind: Mode, number: int) -> list[NumberedBatch]:
        """The epoch or round is over, and all its batches are reported: the rest of them."""
        rest = [event for event in self._unordered if _is_of(event, kind, number)]
        rest += [event for _, _, event in sorted(self._waiting) if _is_of(event, kind, number)]
        self._unordered = [event for event in self._unordered if not _is_of(event, kind, number)]
        self._waiting = [entry for entry in self._waiting if not _is_of(entry[2], kind, number)]
        heapq.heapify(self._waiting)
        batches = [self._numbered(event) for event in rest]
        self._open.pop((kind, number), None)
        self._closed[kind] = number
        return batches

    def _numbered(self, event: BatchEvent) -> NumberedBatch:
        means = self._open.setdefault((event.kind, event.number), _Means())
        index = means.batches
        return NumberedBatch(event, index, means.add(event))


def _is_of(event: BatchEvent, kind: Mode, number: int) -> bool:
    return event.kind is kind and event.number == number


class _Means:
    """Means of logs over the batches of a pass, by records."""

    def __init__(self) -> None:
        self.batches = 0
        self._sums: dict[str, float] = {}
        self._records: dict[str, int] = {}

    def add(self, event: BatchEvent) -> dict[str, float]:
        self.batches += 1
        for name, value in event.logs.items():
            self._sums[name] = self._sums.get(name, 0.0) + value * event.size
            self._records[name] = self._records.get(name, 0) + event.size
        return {name: total / self._records[name] for name, total in self._sums.items() if self._records[name]}
