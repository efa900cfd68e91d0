"""Which workers make a round together: with `--updates=sync`, all that train, from the first batch of an epoch on.

Otherwise a worker that gets its first task a little earlier than the others would make a round without them.

Pure: no lock, no clock.
"""

from __future__ import annotations

from collections.abc import Collection

from elasticcb.master.task import TaskType
from elasticcb.master.task_queue import TaskQueue

START_SECONDS = 10.0  # for which the first workers of a job wait for the others to start


def begun_epochs(queue: TaskQueue) -> int:
    """Number of the epoch whose tasks are handed out, from 1; 0 before the first task."""
    return queue.epoch + 1 if queue.batches_handed_out else 0


class Gathering:
    """The workers of a job that ask for tasks."""

    def __init__(self) -> None:
        self._asked: set[int] = set()
        self._since: float | None = None  # when the first one asked
        self._epoch, self._given = 0, dict[int, int]()  # `begun_epochs`, and tasks in this epoch by worker
        self._idle: dict[int, int] = {}  # by worker, `begun_epochs` when there was no task for it

    def asks(self, worker: int, queue: TaskQueue, up: Collection[int], wanted: int, now: float) -> bool:
        """A worker asks for a task; returns whether others come first.

        Args:
            up: ids of the workers that are up.
            wanted: number of workers that the job is to have.
            now: seconds of a monotonic clock.
        """
        self._asked.add(worker)
        if self._since is None:
            self._since = now
        others = self._asked & {*up} - {worker}
        if not queue.batches_handed_out and 1 + len(others) < wanted and now < self._since + START_SECONDS:
            return True
        if not queue.leases(worker):
            return False
        given = self._given.get(worker, 0)
        return any(self._given.get(other, 0) < given and not self.is_told(other, queue) for other in others)

    def gets(self, worker: int, queue: TaskQueue) -> None:
        """A worker gets a task."""
        epoch = begun_epochs(queue)
        if epoch != self._epoch:
            self._epoch, self._given = epoch, {}
        # One that comes later has missed the rounds before.
        before = self._given.get(worker, min(self._given.values(), default=1) - 1)
        self._given[worker] = before + 1

    def is_told(self, worker: int, queue: TaskQueue) -> bool:
        """Whether a worker knows that there is no task for it in the present epoch."""
        return self._idle.get(worker, -1) >= begun_epochs(queue)

    def has_none(self, worker: int, queue: TaskQueue) -> None:
        """There is no task for a worker now, and the answer says so."""
        self._idle[worker] = begun_epochs(queue)

    def peers(self, queue: TaskQueue, up: Collection[int]) -> list[int]:
        """The workers that train in the present epoch, or will as soon as they get a task."""
        return [
            worker
            for worker in sorted(self._asked & {*up})
            if not self.is_told(worker, queue)
            and all(lease.task.type is TaskType.TRAINING for lease in queue.leases(worker))
        ]
