"""The tasks that are TODO: requeued ones first, then those still to be created."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping

from elasticcb.master.shards import Shard
from elasticcb.master.task import HANDING_OUT_ORDER, Task, TaskType
from elasticcb.master.task_record import TaskRecord
from elasticcb.master.task_sources import Supply


class Todo:
    """Hands out tasks by type, in `HANDING_OUT_ORDER`; within a type, requeued ones first.

    Tasks are created when they are handed out, so pending ones cost no memory here.
    """

    def __init__(self, supplies: Mapping[TaskType, Supply]) -> None:
        self.next_id = 1
        self.train_end_added = False
        self._again: dict[TaskType, deque[TaskRecord]] = {kind: deque() for kind in HANDING_OUT_ORDER}
        self._supplies = supplies
        self._in_order = [(kind, self._again[kind], supplies[kind]) for kind in HANDING_OUT_ORDER]

    def take(self, train_end: bool, idle: bool = True) -> TaskRecord | None:
        """The next task; None when there is none (now)."""
        for kind, again, supply in self._in_order:
            if kind is TaskType.TRAIN_END and not train_end:
                continue
            for record in again:
                if idle or not record.for_idle:
                    again.remove(record)
                    return record
            task = supply.make(self.next_id)
            if task is not None:
                self.next_id += 1
                return TaskRecord(task)
        return None

    def put_back(self, record: TaskRecord) -> None:
        """Requeues a task ahead of all others of its type."""
        self._again[record.task.type].appendleft(record)

    def append(self, record: TaskRecord) -> None:
        """Appends a task after all requeued ones, before those still to be created."""
        self._again[record.task.type].append(record)

    def split(self, record: TaskRecord, end: int) -> None:
        """Splits `record` after its first `end` records, and appends the rest."""
        rest = TaskRecord(record.cut(end, self.next_id))
        self.next_id += 1
        rest.for_idle = True
        self._supplies[rest.task.type].reopen(rest.task)
        self.put_back(rest)

    def add_train_end(self) -> None:
        """Adds the only TRAIN_END task; repeating it has no effect."""
        if self.train_end_added:
            return
        self.train_end_added = True
        self.append(TaskRecord(Task(self.next_id, TaskType.TRAIN_END, Shard("", 0, 0))))
        self.next_id += 1

    def remove_all(self, kind: TaskType) -> list[TaskRecord]:
        """Removes the requeued tasks of a type; its supply is not touched."""
        records = list(self._again[kind])
        self._again[kind].clear()
        return records

    @property
    def has_returned(self) -> bool:
        """Whether there are requeued tasks."""
        return any(self._again.values())

    @property
    def train_end_waits(self) -> bool:
        return bool(self._again[TaskType.TRAIN_END])

    def count(self, kind: TaskType) -> int:
        """Number of requeued tasks, and of those still to be created."""
        return len(self._again[kind]) + self._supplies[kind].to_make

    def __iter__(self) -> Iterator[TaskRecord]:
        """The requeued tasks."""
        for again in self._again.values():
            yield from again
