"""The tasks that are TODO: those that were taken back, and behind them those that are still to be made."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping

from elasticcb.master.shards import Shard
from elasticcb.master.task import HANDING_OUT_ORDER, Task, TaskType
from elasticcb.master.task_record import TaskRecord
from elasticcb.master.task_sources import Supply


class Todo:
    """Hands tasks over by type, in `HANDING_OUT_ORDER`; of one type, those taken back come first.

    A task is made when it is handed over, so what waits to be made costs no memory here.

    Args:
        supplies: what makes the tasks of each type.
    """

    def __init__(self, supplies: Mapping[TaskType, Supply]) -> None:
        self.next_id = 1
        self.train_end_added = False
        self._again: dict[TaskType, deque[TaskRecord]] = {kind: deque() for kind in HANDING_OUT_ORDER}
        self._supplies = supplies
        self._in_order = [(kind, self._again[kind], supplies[kind]) for kind in HANDING_OUT_ORDER]

    def take(self, train_end: bool, idle: bool = True) -> TaskRecord | None:
        """The next task; None when there is none (now).

        Args:
            train_end: it may be the TRAIN_END task.
            idle: whoever gets it has no other, and may get one that is for such a worker.
        """
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
        """Puts a task that was taken before all others of its type."""
        self._again[record.task.type].appendleft(record)

    def append(self, record: TaskRecord) -> None:
        """Puts a task behind all that were put here, before those that are still to be made."""
        self._again[record.task.type].append(record)

    def split(self, record: TaskRecord, end: int) -> None:
        """Cuts what is behind the first `end` records of `record` off, and puts that here."""
        rest = TaskRecord(record.cut(end, self.next_id))
        self.next_id += 1
        rest.for_idle = True
        self._supplies[rest.task.type].reopen(rest.task)
        self.put_back(rest)

    def add_train_end(self) -> None:
        """Adds the one TRAIN_END task; once more changes nothing."""
        if self.train_end_added:
            return
        self.train_end_added = True
        self.append(TaskRecord(Task(self.next_id, TaskType.TRAIN_END, Shard("", 0, 0))))
        self.next_id += 1

    def remove_all(self, kind: TaskType) -> list[TaskRecord]:
        """Takes out the tasks of a type that were put here; the supply is not touched."""
        records = list(self._again[kind])
        self._again[kind].clear()
        return records

    @property
    def has_returned(self) -> bool:
        """Whether there is any that was put here."""
        return any(self._again.values())

    @property
    def train_end_waits(self) -> bool:
        return bool(self._again[TaskType.TRAIN_END])

    def count(self, kind: TaskType) -> int:
        """Tasks that were put here, and those that are still to be made."""
        return len(self._again[kind]) + self._supplies[kind].to_make

    def __iter__(self) -> Iterator[TaskRecord]:
        """The tasks that were put here."""
        for again in self._again.values():
            yield from again
