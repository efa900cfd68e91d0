"""How fast a job trains: in all, and by worker. Pure; times are arguments, in seconds."""

from __future__ import annotations

import math
from collections import deque

from elasticcb.master.stragglers import Paces
from elasticcb.master.task import TaskType
from elasticcb.master.task_queue import TaskQueue

_SPEED_SECONDS = 10.0  # window of the current speed
_SMOOTHING_SECONDS = 60.0  # time constant of the smoothed speed
_LEAST_SECONDS = 2.0  # minimum window of the smoothed speed


class Speed:
    """Records per second: recent, and smoothed so that an estimate does not jump when a worker joins."""

    def __init__(self) -> None:
        self._points: deque[tuple[float, int]] = deque()
        self._last: tuple[float, int] | None = None  # time and records of the last note, once records are trained
        self._seconds = self._records = 0.0  # exponentially decayed sums since the first of these

    def note(self, now: float, done: int) -> None:
        """`done` records were finished by time `now` (seconds)."""
        before = self._points[-1][1] if self._points else done
        self._points.append((now, done))
        while self._points[0][0] < now - _SPEED_SECONDS and len(self._points) > 2:
            self._points.popleft()
        if self._last is None:
            # The first records include one-time costs such as tracing.
            self._last = (now, done) if done > before else None
            return
        passed, trained = now - self._last[0], max(0, done - self._last[1])  # fewer: some are trained again
        self._last = now, done
        kept = math.exp(-passed / _SMOOTHING_SECONDS)
        self._seconds, self._records = self._seconds * kept + passed, self._records * kept + trained

    def per_second(self, now: float, done: int) -> float:
        """Recent rate at time `now`, with `done` records finished; 0 before the first note."""
        begun, before = self._points[0] if self._points else (now, done)
        return max(0, done - before) / (now - begun) if now > begun else 0.0

    @property
    def smoothed(self) -> float:
        """Smoothed rate with a time constant of a minute; 0 until two seconds have been observed."""
        return self._records / self._seconds if self._seconds >= _LEAST_SECONDS else 0.0


class Speeds:
    """Of one job.

    Attributes:
        records: records per second of all workers.
        paces: how long a batch takes on each worker.
    """

    def __init__(self) -> None:
        self.records, self.paces = Speed(), Paces()
        self._batches: dict[int, Speed] = {}  # batches per second of each worker, by id
        # batches that each worker has trained of a task that counts no records before its end, by id
        self._uncounted: dict[int, int] = {}

    def trained(self, worker: int, batches: int, seconds: float, now: float) -> str:
        """`worker` has trained `batches` batches in `seconds` seconds; returns a message as `Paces.note`."""
        verdict = self.paces.note(worker, batches, seconds)
        if self.paces.knows(worker):
            self._batches.setdefault(worker, Speed()).note(now, self.paces.batches(worker))
        return verdict

    def not_counted(self, worker: int, batches: int) -> None:
        """These batches are of a task that counts no records before its end."""
        self._uncounted[worker] = self._uncounted.get(worker, 0) + batches

    def task_ended(self, worker: int) -> None:
        """All records of its task are counted."""
        self._uncounted.pop(worker, None)

    def forget(self, worker: int) -> None:
        """`worker` is gone."""
        self.paces.forget(worker)
        self._batches.pop(worker, None)
        self._uncounted.pop(worker, None)

    def note(self, now: float, queue: TaskQueue) -> None:
        """To be called regularly."""
        self.records.note(now, self.begun(queue))

    def begun(self, queue: TaskQueue) -> int:
        """An estimate of the records trained so far that also counts those of running tasks, which tasks with a
        shuffling feed report only at their end."""
        running = 0
        for worker, held in queue.batches_left().items():
            left = sum(entry.records - entry.reported for entry in held if entry.type is TaskType.TRAINING)
            running += min(self._uncounted.get(worker, 0) * held[0].batch, left)
        return sum(queue.accounting.records_trained.values()) + running

    def batches_per_second(self, worker: int, now: float) -> float | None:
        """Recent rate of a worker; None: it has reported none."""
        speed = self._batches.get(worker)
        return None if speed is None else speed.per_second(now, self.paces.batches(worker))
