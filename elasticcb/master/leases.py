"""The active leases: which worker holds which task, and how long it may go without progress."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from typing import Any

from elasticcb.master.accounting import TaskRecord
from elasticcb.master.shards import Shard
from elasticcb.master.task import Answer, Lease, Task, TaskType

# Ended leases remembered per worker, to recognize a report whose answer got lost. A worker holds about two leases, and
# repeats a report before it continues.
_REMEMBERED = 16

_LONGEST_BATCH = 12  # in multiples of lease_seconds: one hour by default

# Added to lease numbers when a queue is restored, so that a lease handed out between the save and the crash is never
# mistaken for a new one.
_LEASES_PER_LIFE = 1 << 32


class Leases:
    """Grants and ends leases; knows which workers are overdue, and which reports were made before.

    A task has at most one lease, and lease numbers are never reused. Progress is timed per worker, not per lease:
    progress on one lease renews all leases of a worker, because prefetched tasks must wait.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._now = float("-inf")  # newest known time
        self._next = 1
        self._out: dict[int, TaskRecord] = {}  # by lease
        self._held: dict[int, dict[int, TaskRecord]] = {}  # worker -> by lease, oldest first
        self._progress_at: dict[int, float] = {}  # by worker
        self._reported: dict[int, deque[tuple[int, bool, Task]]] = {}  # worker -> (lease, done?, task)
        self._lost: set[int] = set()

    def tell_time(self, now: float) -> None:
        """The current time in seconds; earlier times are ignored."""
        if now > self._now:
            self._now = now

    # ------------------------------------------------------------ granting and ending

    def grant(self, record: TaskRecord, worker: int) -> Lease:
        """A new lease for `worker` on the task of `record`."""
        held = self._held.get(worker)
        if held is None:
            held = self._held[worker] = {}
            self._progress_at[worker] = self._now
        lease = Lease(self._next, record.task, worker, record.failures)
        self._next += 1
        record.lease = lease
        record.heard = False
        self._out[lease.id] = held[lease.id] = record
        return lease

    def progress(self, worker: int) -> None:
        """`worker`, which holds a lease, made progress."""
        self._progress_at[worker] = self._now

    def renew(self) -> None:
        """Restarts the time of all leases, because no progress was possible until now."""
        for worker in self._held:
            self.progress(worker)

    def still(self, worker: int, computing: float) -> Answer:
        """The answer to a report without progress from `worker`, which holds a lease.

        Args:
            computing: seconds spent in the current batch; this counts as progress up to a limit.
        """
        longest = _LONGEST_BATCH * self._seconds
        if not 0 < computing <= longest - self._seconds:
            return Answer(True, "no progress since the last report")
        self.progress(worker)
        if computing < self._seconds:
            return Answer(True, "a batch is being computed")
        reason = (
            f"has computed one batch for {computing:.0f} s. After {longest:.0f} s ({_LONGEST_BATCH} times "
            "lease_seconds) it counts as hung and is replaced. Raise lease_seconds if batches may take longer; lower "
            "it to replace sooner."
        )
        return Answer(True, reason, long_batch=True)

    def reported(self, record: TaskRecord, done: bool) -> None:
        """Ends the lease of `record`: its worker reported the task as `done`, or as failed."""
        lease = self.take_away(record)
        # The worker is alive and only now begins its next task.
        self._progress_at[lease.worker] = self._now
        remembered = self._reported.setdefault(lease.worker, deque(maxlen=_REMEMBERED))
        remembered.append((lease.id, done, record.task))

    def take_away(self, record: TaskRecord) -> Lease:
        """Ends the lease of `record` without a report; returns the lease."""
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
        """`worker` is lost. Its leases still have to be taken away."""
        self._lost.add(worker)
        self._progress_at.pop(worker, None)

    # ------------------------------------------------------------ who holds what

    def find(self, worker: int, lease_id: int) -> TaskRecord | None:
        """The record that `worker` holds by this lease; None if it does not."""
        held = self._held.get(worker)
        return None if held is None else held.get(lease_id)

    def held_by(self, worker: int) -> list[TaskRecord]:
        """Oldest lease first."""
        return list(self._held.get(worker, {}).values())

    def others_hold(self, worker: int) -> bool:
        """Whether another worker has a task, and so will ask for the next one."""
        return any(held for other, held in self._held.items() if other != worker)

    def unanswered(self, worker: int, named: Collection[int]) -> list[TaskRecord]:
        """Leases of `worker` that it does not know of: it neither listed nor ever reported on them."""
        held = self._held.get(worker)
        if held is None:
            return []
        return [record for lease_id, record in held.items() if lease_id not in named and not record.heard]

    def is_lost(self, worker: int) -> bool:
        return worker in self._lost

    def __len__(self) -> int:
        return len(self._out)

    def __iter__(self) -> Iterator[TaskRecord]:
        """All active leases, oldest first."""
        return iter(self._out.values())

    # ------------------------------------------------------------ time

    def overdue(self) -> list[int]:
        """Workers that hold leases and made no progress for too long."""
        return [worker for worker in self._held if self._now >= self._progress_at[worker] + self._seconds]

    # ------------------------------------------------------------ reports on leases that are not held

    def reported_before(self, worker: int, lease_id: int, done: bool) -> Task | None:
        """The task on which `worker` made the same report before; None if it did not."""
        for reported_id, was_done, task in self._reported.get(worker, ()):
            if reported_id == lease_id and was_done is done:
                return task
        return None

    def why_not_held(self, worker: int, lease_id: int) -> str:
        record = self._out.get(lease_id)
        if record is not None and record.lease is not None:
            return f"lease {lease_id} belongs to worker {record.lease.worker}, not to worker {worker}"
        if worker in self._lost:
            return f"worker {worker} was declared lost, and its leases were revoked"
        return f"worker {worker} does not hold lease {lease_id} any more"

    # ------------------------------------------------------------ saving

    def to_dict(self, left_out: Collection[TaskType]) -> dict[str, Any]:
        """JSON values: where lease numbers continue; and, for `resume`, active leases, oldest first, and the last
        report of each worker."""
        return {
            "next_lease": self._next,
            "leases": [
                [record.lease.id, record.lease.worker, *record.progress_to_list()]
                for record in self
                if record.lease is not None and record.task.type not in left_out
            ],
            # A worker repeats a report before it continues, so only the last one can be repeated.
            "reports": [
                [worker, lease, done, task.id, task.type.value, task.shard.name, task.shard.start, task.shard.end]
                for worker, reports in self._reported.items()
                if worker not in self._lost
                for lease, done, task in (reports[-1],)
            ],
        }

    def restore(self, saved: dict[str, Any]) -> None:
        """No lease is active; their numbers continue."""
        self._next = saved["next_lease"] + _LEASES_PER_LIFE

    def resume(self, record: TaskRecord, worker: int, lease_id: int) -> None:
        """Restores a lease that was active when the queue was saved."""
        self._progress_at[worker] = self._now
        record.lease = Lease(lease_id, record.task, worker, record.failures)
        self._out[lease_id] = self._held.setdefault(worker, {})[lease_id] = record

    def resume_reports(self, reports: Collection[Any]) -> None:
        """Restores the reports saved by `to_dict`."""
        for worker, lease, done, task_id, kind, *shard in reports:
            task = Task(task_id, TaskType(kind), Shard(*shard))
            self._reported[worker] = deque([(lease, done, task)], maxlen=_REMEMBERED)
