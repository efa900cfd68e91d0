"""Prediction tasks that are done, and whose results a worker's callbacks may still hold in memory."""

from __future__ import annotations

from elasticcb.master.task_record import TaskRecord


class HeldResults:
    """What each worker has predicted since the `on_predict_end` of its callbacks is due.

    Results are safe once that hook has run. Those of a worker that is lost before are lost with it.
    """

    def __init__(self) -> None:
        self._by_worker: dict[int, list[TaskRecord]] = {}

    def hold(self, worker: int, record: TaskRecord) -> None:
        """`worker` has reported the task done."""
        self._by_worker.setdefault(worker, []).append(record)

    def take(self, worker: int) -> list[TaskRecord]:
        """The tasks of `worker`, in the order of its reports; they are held no longer."""
        return self._by_worker.pop(worker, [])

    def __len__(self) -> int:
        return sum(map(len, self._by_worker.values()))
