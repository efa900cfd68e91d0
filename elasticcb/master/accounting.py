"""Task counters of the job's summary."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field, fields, replace
from typing import Any

from elasticcb.master.task import Task, TaskType

_BY_EPOCH = ("records_trained", "records_dropped")
_SPEED_SECONDS = 10.0  # window of the current speed
_SMOOTHING_SECONDS = 30.0  # time constant of the smoothed speed
_LEAST_SECONDS = 2.0  # minimum window of the smoothed speed


@dataclass
class Accounting:
    """Counters for the job's summary. A record counts as trained once a worker has reported it."""

    records_trained: dict[int, int] = field(default_factory=dict)  # by epoch; each record counted once
    records_dropped: dict[int, int] = field(default_factory=dict)  # by epoch; skipped because of stop_training
    records_evaluated: int = 0  # over all rounds
    records_predicted: int = 0
    records_repeated: int = 0  # upper bound of records trained or predicted more than once
    records_given_up: int = 0  # trained since the servers could last save; not trained again if one is lost
    batches_handed_out: int = 0  # TRAINING only; a range that is handed out again counts once
    tasks_retried: int = 0  # times a task was requeued because its worker reported a failure
    tasks_taken_over: int = 0  # times a task was requeued because its worker was lost, hung, or asked to stop
    tasks_split: int = 0  # times a worker handed the rest of its task to an idle worker
    answers_lost: int = 0  # times a task was requeued because the answer that assigned it was lost
    reports_refused: int = 0

    def count_records(self, task: Task, records: int) -> None:
        """`records` more records of the task were reported."""
        if task.type is TaskType.TRAINING and records:
            self.records_trained[task.epoch] = self.records_trained.get(task.epoch, 0) + records
        elif task.type is TaskType.EVALUATION:
            self.records_evaluated += records
        elif task.type is TaskType.PREDICTION:
            self.records_predicted += records

    def count_again(self, task: Task) -> None:
        """The task is handed out again; some of its records may already have been processed."""
        self.records_repeated += task.shard.records

    def count_dropped(self, epoch: int, records: int) -> None:
        if records:
            self.records_dropped[epoch] = self.records_dropped.get(epoch, 0) + records

    def copy(self, **changes: Any) -> Accounting:
        """A deep copy; `changes` replaces counters by name."""
        by_epoch = {name: dict(getattr(self, name)) for name in _BY_EPOCH}
        return replace(self, **{**by_epoch, **changes})

    def to_dict(self) -> dict[str, Any]:
        """JSON values with string keys."""
        saved = {item.name: getattr(self, item.name) for item in fields(self)}
        for name in _BY_EPOCH:
            saved[name] = {str(epoch): count for epoch, count in saved[name].items()}
        return saved

    @classmethod
    def from_dict(cls, saved: dict[str, Any]) -> Accounting:
        by_epoch = {name: {int(epoch): count for epoch, count in saved[name].items()} for name in _BY_EPOCH}
        return cls(**{**saved, **by_epoch})


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
        """Smoothed rate with a time constant of half a minute; 0 until two seconds have been observed."""
        return self._records / self._seconds if self._seconds >= _LEAST_SECONDS else 0.0
