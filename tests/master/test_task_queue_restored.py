"""A task queue that was saved, and goes on in another process."""

from __future__ import annotations

import pytest
from task_queues import EPOCH_DONE, TRAINING_DONE, drain, make_queue, reached, take

from elasticcb.errors import CheckpointError
from elasticcb.master.decisions import DecisionKind
from elasticcb.master.task_queue import TaskQueue


def test_restored_queue_refuses_leases_from_before():
    queue = make_queue()
    saved = queue.to_dict()
    old = take(queue)
    restored = TaskQueue.from_dict(saved)
    assert take(restored).id != old.id
    assert not restored.report_done(1, old.id).accepted


def test_restored_queue_tells_milestones_that_nobody_took():
    queue = make_queue()
    drain(queue)
    restored = TaskQueue.from_dict(queue.to_dict())
    assert restored.take_milestones() == queue.take_milestones() != []


def test_restored_queue_remembers_failures_of_a_task():
    queue = make_queue(training=[("a", 20)], max_retries=1)
    queue.report_failed(1, take(queue).id, "first", "")
    restored = TaskQueue.from_dict(queue.to_dict())
    restored.report_failed(1, take(restored).id, "second", "")
    assert restored.failure is not None
    assert [attempt.error for attempt in restored.failure.attempts] == ["first", "second"]


def test_failed_task_does_not_hold_its_epoch_open_in_a_restored_queue():
    queue = make_queue(training=[("a", 20)], max_retries=0)
    queue.report_failed(1, take(queue).id, "boom", "")
    restored = TaskQueue.from_dict(queue.to_dict())
    assert reached(restored) == [(EPOCH_DONE, 0), (TRAINING_DONE, 0)]


def test_restored_queue_leaves_evaluation_rounds_out():
    queue = make_queue(training=())
    queue.add_evaluation(1, [("v", 100)])
    take(queue)
    restored = TaskQueue.from_dict(queue.to_dict())
    assert restored.get_task(1, 0.0).kind is DecisionKind.WAIT
    assert restored.add_evaluation(1, [("v", 100)]) == 5


@pytest.mark.parametrize("saved", [{}, {"format": 99}, {"format": 1}])
def test_something_else_can_not_be_restored(saved):
    with pytest.raises(CheckpointError):
        TaskQueue.from_dict(saved)
