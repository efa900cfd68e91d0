"""Finished prediction tasks whose results a worker's callbacks may still hold in memory."""

from __future__ import annotations

from elasticcb.master.task_record import TaskRecord


class HeldResults:
    """Tasks that each worker has predicted, until the `on_predict_end` hooks of its callbacks have run.

    Then the results are safe. If the worker is lost before, its results are lost too.
    """

    def __init__(self) -> None:
        self._by_worker: dict[int, list[TaskRecord]] = {}

    def hold(self, worker: int, record: TaskRecord) -> None:
        """`worker` has reported the task as done."""
        self._by_worker.setdefault(worker, []).append(record)

    def take(self, worker: int) -> list[TaskRecord]:
        """Removes and returns the tasks of `worker`, in the order of its reports."""
        return self._by_worker.pop(worker, [])

    def __len__(self) -> int:
        return sum(map(len, self._by_worker.values()))
