"""The batches of all workers in one order, for batch callbacks on the master. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from elasticcb.settings import Mode

_MOST_WAITING = 100_000  # batches; beyond them, the oldest are released


@dataclass(frozen=True, slots=True)
class BatchEvent:
    """A batch that a worker has finished."""

    kind: Mode
    number: int  # epoch or evaluation pass
    version: int  # of the model; after the push for a training batch
    size: int  # records
    # of this batch only; of the only worker of a program, of its epoch or pass so far
    logs: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class NumberedBatch:
    """A batch with its position among those of all workers."""

    event: BatchEvent
    index: int  # position in its epoch or round, from 0
    means: Mapping[str, float]  # running means of `logs` over the records of the epoch


class BatchLog:
    """Orders training batches by version, without waiting longer than needed.

    A worker's versions never decrease, and it reports in order. So a batch can still be overtaken only by a batch of a
    worker that is training and whose newest report is older. Once there is no such worker, the batch is released.
    Batches of evaluations and predictions have no order and are released on arrival.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[int, int, BatchEvent]] = []  # a heap
        self._unordered: list[BatchEvent] = []
        self._arrived = 0
        self._reported: dict[int, int] = {}  # worker -> version up to which it has reported all its batches
        self._open: dict[tuple[Mode, int], _Means] = {}
        self._closed: dict[Mode, int] = {}  # newest epoch or round that is over, by mode

    def add(self, worker: int, version: int, events: Iterable[BatchEvent]) -> None:
        """`worker` reported `events`, and will report nothing more of versions before `version`."""
        self._reported[worker] = max(version, self._reported.get(worker, 0))
        for event in events:
            if event.number <= self._closed.get(event.kind, -1):
                continue  # of a worker declared lost; its epoch is over, so callbacks can't see it any more
            self._arrived += 1
            if event.kind is Mode.TRAINING:
                heapq.heappush(self._waiting, (event.version, self._arrived, event))
            else:
                self._unordered.append(event)

    def __len__(self) -> int:
        """Number of waiting batches."""
        return len(self._waiting) + len(self._unordered)

    def take(self, training: Collection[int], most: int | None = None) -> list[NumberedBatch]:
        """At most `most` batches that can no longer be overtaken, if the workers in `training` have training tasks."""
        certain = min((self._reported.get(worker, -1) for worker in training), default=None)
        taken, self._unordered = self._unordered[:most], self._unordered[most:] if most else []
        while self._waiting and len(taken) != most:
            version = self._waiting[0][0]
            if certain is not None and version > certain and len(self._waiting) <= _MOST_WAITING:
                break
            taken.append(heapq.heappop(self._waiting)[2])
        return [self._numbered(event) for event in taken]

    def end(self, kind: Mode, number: int) -> list[NumberedBatch]:
        """The epoch or round is over and all its batches are reported: returns the remaining ones."""
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
    """Record-weighted running means of the logs of a pass."""

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
