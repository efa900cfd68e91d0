"""What is kept of a job's past for its page, in bounded memory: points of curves, tasks, events. Pure.

The master keeps one `History`, and the process that serves the page another, which it fills from the master's.
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
        time: seconds since the epoch.
        trained: records, each once.
        per_second: records, of late.
        workers, servers: how many are up.
        push_seconds: mean of a worker's pushes to all servers since the point before; None: there was none.
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
    """What an evaluation round has given."""

    time: float
    version: int
    metrics: Mapping[str, float | None]


class TaskSpan(NamedTuple):
    """A task on a worker, from its begin to its end.

    Attributes:
        worker: its place.
        ended: None: it runs.
        outcome: "done", "failed", or "back": another worker does the rest; "": it runs.
        again: a worker before has not finished it.
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
    """Something that people should know of. `kind` is one of `KINDS`."""

    time: float
    kind: str
    text: str


KINDS = ("note", "loss", "recovery", "joined", "checkpoint")

_ENTRIES: Mapping[str, Any] = {"points": Point, "evaluations": EvaluationPoint, "tasks": TaskSpan, "events": Event}


class History:
    """The newest tasks and events, and points of the whole time: when there are too many, every other one is dropped,
    and half as many are added from then on.

    Attributes:
        number: of the newest entry; they count from 1.
        interval: seconds between two points.
    """

    def __init__(self, most_points: int = _MOST_POINTS) -> None:
        self.number = 0
        self.interval = 1.0
        self._most_points = most_points
        self._points: list[tuple[int, Point]] = []
        self._rest: dict[str, deque[tuple[int, Any]]] = {
            "evaluations": deque(maxlen=_MOST_EVENTS),
            "tasks": deque(maxlen=_MOST_TASKS),
            "events": deque(maxlen=_MOST_EVENTS),
        }

    def add(self, entry: Point | EvaluationPoint | TaskSpan | Event) -> None:
        """A point that comes before the interval is over is passed over."""
        if not isinstance(entry, Point):
            self.number += 1
            name = next(name for name, kind in _ENTRIES.items() if isinstance(entry, kind))
            self._rest[name].append((self.number, entry))
        elif self.wants_point(entry.time):
            self.number += 1
            self._points.append((self.number, entry))
            if len(self._points) > self._most_points:
                del self._points[1::2]
                self.interval *= 2

    def wants_point(self, time: float) -> bool:
        """Whether the last one is so long ago."""
        # A clock that was set back would else stop the curves for as long.
        return not self._points or not 0 <= time - self._points[-1][1].time < self.interval

    def after(self, number: int) -> dict[str, Any]:
        """What was added after the entry of that number, as JSON values: each entry with its number, in its order."""
        found: dict[str, Any] = {"number": self.number, "points": _after(number, self._points)}
        return found | {name: _after(number, entries) for name, entries in self._rest.items()}

    def extend(self, news: Mapping[str, Any], after: int = 0, since: float = 0.0) -> None:
        """Adds what another one gave by `after`, but for entries up to a number of its own, or from before a time.

        Raises `TypeError` or `ValueError` for what none can have given.
        """
        for name, kind in _ENTRIES.items():
            for number, values in news.get(name, ()):
                entry = kind(*values)
                if number > after and (entry.begun if isinstance(entry, TaskSpan) else entry.time) >= since:
                    self.add(entry)


def finite(value: Any) -> float | None:
    """A number that JSON has; None instead of any other value."""
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
