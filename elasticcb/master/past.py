"""Keeps the past of a job for its page: told by those to whom something happens, under the lock of the master. Pure."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any

from elasticcb.clients.history import EvaluationPoint, Event, History, Point, TaskSpan, finite
from elasticcb.master.snapshot import JobSnapshot
from elasticcb.master.task import Lease, Task

_MOST_LEFT = 100_000  # tasks that are known to have gone back


class Past:
    """What has happened in a job.

    Args:
        clock: gives seconds since the epoch.
        before: what `after` gave of the same job, before it was resumed.
    """

    def __init__(self, clock: Callable[[], float] = float, before: Mapping[str, Any] = MappingProxyType({})) -> None:
        self.clock = clock
        self._run = clock()  # which of the pasts of one job's masters this is
        self._history = History()
        with contextlib.suppress(TypeError, ValueError):  # of another release
            self._history.extend(before)
        self._running: dict[int, TaskSpan] = {}  # by lease
        self._free_since: dict[int, float] = {}  # by place, when the last task there has ended
        self._unfinished: set[int] = set()  # tasks whose last worker did not finish them
        self._pushes = (0, 0.0)
        self._metrics: dict[str, float] = {}

    def happened(self, kind: str, text: str) -> None:
        """`kind` is one of `KINDS`."""
        self._history.add(Event(self.clock(), kind, text))

    def began(self, lease: Lease, place: int) -> None:
        """The worker in a place has got a task, which it begins when it is done with what it had before."""
        task = lease.task
        again = task.id in self._unfinished
        self._running[lease.id] = TaskSpan(
            place, self.clock(), None, task.type.value.lower(), "", task.id, task.shard.records, again
        )

    def ended(self, lease: int, outcome: str, task: Task | None = None) -> None:
        """As `TaskSpan` has it; of a lease that began with another master, nothing is known.

        Args:
            task: as it was done, if that is not as it was handed out.
        """
        run = self._running.pop(lease, None)
        if run is None:
            return
        now = self.clock()
        begun = min(max(run.begun, self._free_since.get(run.worker, 0.0)), now)
        self._free_since[run.worker] = now
        records = run.records if task is None else task.shard.records
        self._history.add(run._replace(begun=begun, ended=now, outcome=outcome, records=records))
        if outcome == "done":
            self._unfinished.discard(run.task)
        elif len(self._unfinished) < _MOST_LEFT:
            self._unfinished.add(run.task)

    def left(self, place: int) -> None:
        """The worker in a place is gone: others do the rest of what it had."""
        for lease in [lease for lease, run in self._running.items() if run.worker == place]:
            self.ended(lease, "back")

    def note(self, seen: JobSnapshot, leases: Collection[int], pushes: tuple[int, float]) -> None:
        """The job looks like this now.

        Args:
            leases: that are out; others that ran went back, as of a worker that hangs.
            pushes: how many there were, and the seconds that they took.
        """
        for lease in self._running.keys() - set(leases):
            self.ended(lease, "back")
        now = self.clock()
        if seen.metrics and seen.metrics != self._metrics:
            self._metrics = dict(seen.metrics)
            metrics = {name: finite(value) for name, value in self._metrics.items()}
            self._history.add(EvaluationPoint(now, seen.version, metrics))
        if self._history.wants_point(now):
            more, took = pushes[0] - self._pushes[0], pushes[1] - self._pushes[1]
            self._pushes = pushes
            mean = took / more if more > 0 and took >= 0 else None
            counts = seen.workers.up, seen.servers.up
            self._history.add(
                Point(
                    now, seen.version, finite(seen.loss), seen.records_trained, seen.records_per_second, *counts, mean
                )
            )

    def after(self, number: int) -> dict[str, Any]:
        """As `History.after`, with the tasks that run."""
        running = [
            list(run._replace(begun=max(run.begun, self._free_since.get(run.worker, 0.0))))
            for run in self._running.values()
        ]
        return {**self._history.after(number), "run": self._run, "running": running}
