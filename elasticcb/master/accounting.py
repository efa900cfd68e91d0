"""The numbers of the job's summary, as far as they are about tasks."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field, fields, replace
from typing import Any

from elasticcb.master.task import Task, TaskType

_BY_EPOCH = ("records_trained", "records_dropped")
_SPEED_SECONDS = 10.0  # that the speed is over
_SMOOTHING_SECONDS = 30.0  # after which what was noted counts 1/e in the smoothed speed
_LEAST_SECONDS = 2.0  # that it is over


@dataclass
class Accounting:
    """Numbers for the job's summary; a record counts as trained when a worker reported it."""

    records_trained: dict[int, int] = field(default_factory=dict)  # by epoch; each record once
    records_dropped: dict[int, int] = field(default_factory=dict)  # by epoch; left out by stop_training
    records_evaluated: int = 0  # over all rounds
    records_predicted: int = 0
    records_repeated: int = 0  # so many at most were trained, or predicted, more than once
    batches_handed_out: int = 0  # TRAINING; a range that is handed out again counts once
    tasks_retried: int = 0  # times that a task went back because its worker reported a failure
    tasks_taken_over: int = 0  # times that a task went back because its worker was lost, hung, or was asked to end
    tasks_split: int = 0  # times that a worker gave the end of its task to another that waited
    answers_lost: int = 0  # times that a task went back because its worker never learned of it
    reports_refused: int = 0

    def count_records(self, task: Task, records: int) -> None:
        """`records` more of the task were reported."""
        if task.type is TaskType.TRAINING and records:
            self.records_trained[task.epoch] = self.records_trained.get(task.epoch, 0) + records
        elif task.type is TaskType.EVALUATION:
            self.records_evaluated += records
        elif task.type is TaskType.PREDICTION:
            self.records_predicted += records

    def count_again(self, task: Task) -> None:
        """The task is handed out again, and its records may have been done before."""
        self.records_repeated += task.shard.records

    def count_dropped(self, epoch: int, records: int) -> None:
        if records:
            self.records_dropped[epoch] = self.records_dropped.get(epoch, 0) + records

    def copy(self, **changes: Any) -> Accounting:
        """One that does not share anything with this one; `changes` by name of the number."""
        by_epoch = {name: dict(getattr(self, name)) for name in _BY_EPOCH}
        return replace(self, **{**by_epoch, **changes})

    def to_dict(self) -> dict[str, Any]:
        """As JSON values, whose keys are strings."""
        saved = {item.name: getattr(self, item.name) for item in fields(self)}
        for name in _BY_EPOCH:
            saved[name] = {str(epoch): count for epoch, count in saved[name].items()}
        return saved

    @classmethod
    def from_dict(cls, saved: dict[str, Any]) -> Accounting:
        by_epoch = {name: {int(epoch): count for epoch, count in saved[name].items()} for name in _BY_EPOCH}
        return cls(**{**saved, **by_epoch})


class Speed:
    """Records per second: of late, and smoothed, for an estimate that does not jump when a worker joins."""

    def __init__(self) -> None:
        self._points: deque[tuple[float, int]] = deque()
        self._last: tuple[float, int] | None = None  # since records are trained
        self._seconds = self._records = 0.0  # what was noted since then, the older the less it counts

    def note(self, now: float, done: int) -> None:
        """So many records are `done` at a time, in seconds."""
        before = self._points[-1][1] if self._points else done
        self._points.append((now, done))
        while self._points[0][0] < now - _SPEED_SECONDS and len(self._points) > 2:
            self._points.popleft()
        if self._last is None:
            # The first records took also what is needed once, such as tracing.
            self._last = (now, done) if done > before else None
            return
        passed, trained = now - self._last[0], done - self._last[1]
        self._last = now, done
        kept = math.exp(-passed / _SMOOTHING_SECONDS)
        self._seconds, self._records = self._seconds * kept + passed, self._records * kept + trained

    def per_second(self, now: float, done: int) -> float:
        """Up to `now`, when so many are done; 0 before anything was noted."""
        begun, before = self._points[0] if self._points else (now, done)
        return (done - before) / (now - begun) if now > begun else 0.0

    @property
    def smoothed(self) -> float:
        """Per second, over half a minute or more; 0 until there are two seconds to judge by."""
        return self._records / self._seconds if self._seconds >= _LEAST_SECONDS else 0.0
