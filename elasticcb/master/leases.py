"""The leases that are out: which worker holds which task, and for how long it may go on without progress."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from typing import Any

from elasticcb.master.decisions import Answer
from elasticcb.master.shards import Shard
from elasticcb.master.task import Lease, Task, TaskType
from elasticcb.master.task_record import TaskRecord

# Ended leases that are remembered per worker, to recognize a report whose answer got lost. A worker
# holds two leases or so, and repeats a report before it goes on.
_REMEMBERED = 16

_LONGEST_BATCH = 12  # leases: an hour, where nobody says otherwise

# Added to lease numbers when a queue is restored, so that no lease handed out between the save and the
# crash is ever mistaken for a new one.
_LEASES_PER_LIFE = 1 << 32


class Leases:
    """Grants leases and ends them; knows who is late, and which report was made before.

    A task is out at most once, and a lease number is never used twice. Time is kept by worker, not by
    lease: progress on one lease keeps all of a worker's leases alive, for what it fetched ahead waits.

    Args:
        seconds: a worker without progress for so long is overdue.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._now = float("-inf")  # of the newest event that told the time
        self._next = 1
        self._out: dict[int, TaskRecord] = {}  # by lease
        self._held: dict[int, dict[int, TaskRecord]] = {}  # worker -> by lease, oldest first
        self._progress_at: dict[int, float] = {}  # by worker
        self._reported: dict[int, deque[tuple[int, bool, Task]]] = {}  # worker -> (lease, done?, task)
        self._lost: set[int] = set()

    def tell_time(self, now: float) -> None:
        """Seconds; a time before the newest that was told changes nothing."""
        if now > self._now:
            self._now = now

    # ------------------------------------------------------------ from grant to end

    def grant(self, record: TaskRecord, worker: int) -> Lease:
        """A new lease on the task of `record` for `worker`."""
        held = self._held.get(worker)
        if held is None:
            held = self._held[worker] = {}
            self._progress_at[worker] = self._now
        lease = Lease(self._next, record.task, worker)
        self._next += 1
        record.lease = lease
        record.heard = False
        self._out[lease.id] = held[lease.id] = record
        return lease

    def progress(self, worker: int) -> None:
        """`worker`, which holds a lease, has progressed."""
        self._progress_at[worker] = self._now

    def renew(self) -> None:
        """All that are out begin anew: nobody could progress up to now."""
        for worker in self._held:
            self.progress(worker)

    def still(self, worker: int, computing: float) -> Answer:
        """The answer to a report of `worker`, which holds a lease, without progress.

        Args:
            computing: seconds that it has been in its present batch, which is progress unless they are too many.
        """
        longest = _LONGEST_BATCH * self._seconds
        if not 0 < computing <= longest - self._seconds:
            return Answer(True, "no progress since the last report")
        self.progress(worker)
        if computing < self._seconds:
            return Answer(True, "a batch is being computed")
        reason = (
            f"has been in one batch for {computing:.0f} s. After {longest:.0f} s ({_LONGEST_BATCH} times "
            "lease_seconds) it is taken for hung, and replaced; give lease_seconds if batches may take longer, or less."
        )
        return Answer(True, reason, long_batch=True)

    def reported(self, record: TaskRecord, done: bool) -> None:
        """Ends the lease of `record`, on which its worker reported that it is `done`, or has failed."""
        lease = self.take_away(record)
        # The worker is alive, and only now begins with its next task.
        self._progress_at[lease.worker] = self._now
        remembered = self._reported.setdefault(lease.worker, deque(maxlen=_REMEMBERED))
        remembered.append((lease.id, done, record.task))

    def take_away(self, record: TaskRecord) -> Lease:
        """Ends the lease of `record` without a report on it; answers that lease."""
        lease = record.lease
        assert lease is not None
        record.lease = None
        del self._out[lease.id]
        held = self._held[lease.worker]
        del held[lease.id]
        if not held:
            del self._held[lease.worker]
        return lease

    def lose(self, worker: int) -> None:
        """`worker` is gone for good. Its leases are still to be taken away."""
        self._lost.add(worker)
        self._progress_at.pop(worker, None)

    # ------------------------------------------------------------ who holds what

    def find(self, worker: int, lease_id: int) -> TaskRecord | None:
        """The record that `worker` holds by this lease, None when it does not."""
        held = self._held.get(worker)
        return None if held is None else held.get(lease_id)

    def held_by(self, worker: int) -> list[TaskRecord]:
        """Oldest lease first."""
        return list(self._held.get(worker, {}).values())

    def unanswered(self, worker: int, named: Collection[int]) -> list[TaskRecord]:
        """What `worker` holds without knowing of it: it neither named the lease nor ever spoke of it."""
        held = self._held.get(worker)
        if held is None:
            return []
        return [record for lease_id, record in held.items() if lease_id not in named and not record.heard]

    def is_lost(self, worker: int) -> bool:
        return worker in self._lost

    def __len__(self) -> int:
        return len(self._out)

    def __iter__(self) -> Iterator[TaskRecord]:
        """All that are out, oldest lease first."""
        return iter(self._out.values())

    # ------------------------------------------------------------ time

    def overdue(self) -> list[int]:
        """The workers that hold leases and made no progress for too long."""
        return [worker for worker in self._held if self._now >= self._progress_at[worker] + self._seconds]

    # ------------------------------------------------------------ reports on leases that are not held

    def reported_before(self, worker: int, lease_id: int, done: bool) -> Task | None:
        """The task on which `worker` reported the same before, None if it did not."""
        for reported_id, was_done, task in self._reported.get(worker, ()):
            if reported_id == lease_id and was_done is done:
                return task
        return None

    def why_not_held(self, worker: int, lease_id: int) -> str:
        record = self._out.get(lease_id)
        if record is not None and record.lease is not None:
            return f"lease {lease_id} belongs to worker {record.lease.worker}, not to worker {worker}"
        if worker in self._lost:
            return f"worker {worker} was given up as lost, its leases were taken away"
        return f"worker {worker} does not hold lease {lease_id} (any more)"

    # ------------------------------------------------------------ saving

    def to_dict(self) -> dict[str, Any]:
        """As JSON values: where the numbers of leases go on. Those that are out are saved by `open_to_dict`."""
        return {"next_lease": self._next}

    def restore(self, saved: dict[str, Any]) -> None:
        self._next = saved["next_lease"] + _LEASES_PER_LIFE

    def open_to_dict(self, left_out: Collection[TaskType]) -> dict[str, Any]:
        """The leases that are out, oldest first, and the last report of each worker, for `resume`; as JSON values.

        Args:
            left_out: types of tasks that are not saved.
        """
        return {
            "leases": [
                [record.lease.id, record.lease.worker, *record.progress_to_list()]
                for record in self
                if record.lease is not None and record.task.type not in left_out
            ],
            # A worker repeats a report before it goes on: only the last one can come again.
            "reports": [
                [worker, lease, done, task.id, task.type.value, task.shard.name, task.shard.start, task.shard.end]
                for worker, reports in self._reported.items()
                if worker not in self._lost
                for lease, done, task in (reports[-1],)
            ],
        }

    def resume(self, record: TaskRecord, worker: int, lease_id: int) -> None:
        """A lease that was out when the queue was saved is out."""
        self._progress_at[worker] = self._now
        record.lease = Lease(lease_id, record.task, worker)
        self._out[lease_id] = self._held.setdefault(worker, {})[lease_id] = record

    def resume_reports(self, reports: Collection[Any]) -> None:
        """Remembers the reports that `open_to_dict` saved."""
        for worker, lease, done, task_id, kind, *shard in reports:
            task = Task(task_id, TaskType(kind), Shard(*shard))
            self._reported[worker] = deque([(lease, done, task)], maxlen=_REMEMBERED)
