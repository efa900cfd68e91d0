"""A job's history for its page, in bounded memory: points of curves, tasks, events. Pure.

The master keeps one `History`; the process that serves the page keeps another and updates it from the master's.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Reversible
from typing import Any, NamedTuple

_MOST_POINTS = 3_600
_MOST_TASKS = 3_000
_MOST_EVENTS = 1_000


class Point(NamedTuple):
    """The job at one moment.

    Attributes:
        push_seconds: mean duration of a worker's pushes to all servers since the previous point; None: there were none.
    """

    time: float
    version: int
    loss: float | None
    trained: int
    per_second: float
    workers: int
    servers: int
    push_seconds: float | None


class EvaluationPoint(NamedTuple):
    """Results of an evaluation pass."""

    time: float
    version: int
    metrics: Mapping[str, float | None]


class TaskSpan(NamedTuple):
    """A task on a worker, from start to end.

    Attributes:
        ended: None: it is running.
        outcome: "done", "failed", or "back": requeued for another worker; "": it is running.
        again: an earlier worker did not finish it.
    """

    worker: int
    begun: float
    ended: float | None
    type: str
    outcome: str
    task: int
    records: int
    again: bool


class Event(NamedTuple):
    """An event to show to users. `kind` is "note", "loss", "recovery", "joined" or "checkpoint"."""

    time: float
    kind: str
    text: str


_ENTRIES: Mapping[str, Any] = {"points": Point, "evaluations": EvaluationPoint, "tasks": TaskSpan, "events": Event}


class History:
    """The newest tasks and events, and points over the whole time: when there are too many, every other point is
    dropped, and the interval doubles.

    Attributes:
        number: number of the newest entry, from 1.
    """

    def __init__(self) -> None:
        self.number = 0
        self.interval = 1.0
        self._points: list[tuple[int, Point]] = []
        self._rest: dict[str, deque[tuple[int, Any]]] = {
            "evaluations": deque(maxlen=_MOST_EVENTS),
            "tasks": deque(maxlen=_MOST_TASKS),
            "events": deque(maxlen=_MOST_EVENTS),
        }

    def add(self, entry: Point | EvaluationPoint | TaskSpan | Event) -> None:
        """Ignores a point that comes before the interval has passed."""
        if not isinstance(entry, Point):
            self.number += 1
            name = next(name for name, kind in _ENTRIES.items() if isinstance(entry, kind))
            self._rest[name].append((self.number, entry))
        elif self.wants_point(entry.time):
            self.number += 1
            self._points.append((self.number, entry))
            if len(self._points) > _MOST_POINTS:
                del self._points[1::2]
                self.interval *= 2

    def wants_point(self, time: float) -> bool:
        """Whether the interval since the last point has passed."""
        # Otherwise a clock that was set back would stop the curves for as long.
        return not self._points or not 0 <= time - self._points[-1][1].time < self.interval

    def after(self, number: int) -> dict[str, Any]:
        """Entries added after number `number`, as JSON values, in order, each with its number."""
        found: dict[str, Any] = {"number": self.number, "points": _after(number, self._points)}
        return found | {name: _after(number, entries) for name, entries in self._rest.items()}

    def extend(self, news: Mapping[str, Any], after: int = 0, since: float = 0.0) -> None:
        """Adds the result of another history's `after`, except entries up to an own number, or before a time.

        Raises `TypeError` or `ValueError` for invalid data.
        """
        for name, kind in _ENTRIES.items():
            for number, values in news.get(name, ()):
                entry = kind(*values)
                if number > after and (entry.begun if isinstance(entry, TaskSpan) else entry.time) >= since:
                    self.add(entry)


def finite(value: Any) -> float | None:
    """A number that JSON supports; None for any other value."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def _after(number: int, entries: Reversible[tuple[int, Any]]) -> list[list[Any]]:
    found = []
    for own, entry in reversed(entries):
        if own <= number:
            break
        found.append([own, list(entry)])
    return found[::-1]
