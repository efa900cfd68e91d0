"""Records the history of a job for its page, under the master's lock. Pure."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any

from elasticcb.clients.history import EvaluationPoint, Event, History, Point, TaskSpan, finite
from elasticcb.master.snapshot import JobSnapshot
from elasticcb.master.task import Lease, Task

_MOST_LEFT = 100_000  # maximum number of requeued tasks to remember


class JobHistory:
    """The history of a job.

    Args:
        clock: returns seconds since the epoch.
        before: the result of `after` for the same job, before it was resumed.
    """

    def __init__(self, clock: Callable[[], float] = float, before: Mapping[str, Any] = MappingProxyType({})) -> None:
        self.clock = clock
        self._run = clock()  # distinguishes the histories of a job's masters
        self._history = History()
        with contextlib.suppress(TypeError, ValueError):  # written by another release
            self._history.extend(before)
        self._running: dict[int, TaskSpan] = {}  # by lease
        self._free_since: dict[int, float] = {}  # by slot, when its last task ended
        self._unfinished: set[int] = set()  # tasks that their last worker did not finish
        self._pushes = (0, 0.0)
        self._metrics: dict[str, float | None] = {}

    def record_event(self, kind: str, text: str) -> None:
        """`kind` as in `Event`."""
        self._history.add(Event(self.clock(), kind, text))

    def began(self, lease: Lease, place: int) -> None:
        """The worker in a slot got a task, which starts when it has finished its previous ones."""
        task = lease.task
        again = task.id in self._unfinished
        self._running[lease.id] = TaskSpan(
            place, self.clock(), None, task.type.value.lower(), "", task.id, task.shard.records, again
        )

    def ended(self, lease: int, outcome: str, task: Task | None = None) -> None:
        """See `TaskSpan`; leases granted by another master are unknown.

        Args:
            task: the task as finished, if it differs from the one handed out.
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

    def evaluated(self, version: int, metrics: Mapping[str, float]) -> None:
        """An evaluation pass of this version has ended."""
        self._metrics = _finite(metrics)
        self._history.add(EvaluationPoint(self.clock(), version, self._metrics))

    def left(self, place: int) -> None:
        """The worker in a slot is gone; its tasks are requeued."""
        for lease in [lease for lease, run in self._running.items() if run.worker == place]:
            self.ended(lease, "back")

    def note(self, seen: JobSnapshot, leases: Collection[int], pushes: tuple[int, float]) -> None:
        """The job's current figures.

        Args:
            leases: active leases; other running ones were revoked, such as those of a hung worker.
            pushes: number of pushes, and their total seconds.
        """
        for lease in self._running.keys() - set(leases):
            self.ended(lease, "back")
        now = self.clock()
        if seen.metrics and _finite(seen.metrics) != self._metrics:  # of an earlier master
            self.evaluated(seen.version, seen.metrics)
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
        """See `History.after`, with running tasks."""
        running = [
            list(run._replace(begun=max(run.begun, self._free_since.get(run.worker, 0.0))))
            for run in self._running.values()
        ]
        return {**self._history.after(number), "run": self._run, "running": running}


def _finite(metrics: Mapping[str, float]) -> dict[str, float | None]:
    return {name: finite(value) for name, value in metrics.items()}
