"""Task queues for tests, and what they do with them."""

from __future__ import annotations

from elasticcb.master.task import DecisionKind, Lease, MilestoneKind, QueueSettings, Task
from elasticcb.master.task_queue import TaskQueue

EPOCH_DONE, TRAINING_DONE = MilestoneKind.EPOCH_DONE, MilestoneKind.TRAINING_DONE


def make_queue(**changes) -> TaskQueue:
    sources = {"training": changes.pop("training", [("a", 40)]), "prediction": changes.pop("prediction", [])}
    settings = {"records_per_task": 20, "minibatch_size": 10, "lease_seconds": 60.0}
    return TaskQueue(QueueSettings(**{**settings, **changes}), **sources)


def take(queue: TaskQueue, worker: int = 1, now: float = 0.0, held=None) -> Lease:
    decision = queue.get_task(worker, now, held)
    assert decision.kind is DecisionKind.TASK, decision.reason
    assert decision.lease is not None
    return decision.lease


def drain(queue: TaskQueue, worker: int = 1) -> list[Task]:
    """Does all tasks one after another."""
    tasks = []
    while (decision := queue.get_task(worker, 0.0)).kind is DecisionKind.TASK:
        assert decision.lease is not None
        tasks.append(decision.lease.task)
        assert queue.report_done(worker, decision.lease.id).accepted
    return tasks


def records_of(tasks) -> list[tuple[str, int]]:
    return [(t.shard.name, r) for t in tasks for r in range(t.shard.start, t.shard.end)]


def reached(queue: TaskQueue) -> list[tuple[MilestoneKind, int]]:
    return [(milestone.kind, milestone.number) for milestone in queue.take_milestones()]
