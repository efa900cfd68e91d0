"""FUNCTION tasks of the queue: calls, named by numbers, in the order in which they were added."""

from __future__ import annotations

import pytest

from elasticcb.master.decisions import DecisionKind
from elasticcb.master.queue_settings import QueueSettings
from elasticcb.master.task import TaskState, TaskType
from elasticcb.master.task_queue import TaskQueue


@pytest.fixture
def queue():
    queue = TaskQueue(QueueSettings(records_per_task=1, minibatch_size=1, max_losses=1, lease_seconds=10.0))
    for number in (5, 6, 7):
        queue.add_function(number)
    return queue


def take(queue, worker=1, now=0.0):
    lease = queue.get_task(worker, now).lease
    assert lease is not None
    assert lease.task.type is TaskType.FUNCTION
    return lease


def states(queue):
    return {state: count for state, count in queue.counts()[TaskType.FUNCTION].items() if count}


def test_functions_are_handed_out_in_their_order_and_the_job_waits_for_more(queue):
    leases = [take(queue) for _ in range(3)]
    assert [lease.task.function for lease in leases] == [5, 6, 7]
    assert all(queue.report_done(1, lease.id).accepted for lease in leases)
    assert queue.get_task(1, 0.0).kind is DecisionKind.WAIT
    queue.add_function(8)
    assert take(queue).task.function == 8
    queue.finish()
    assert queue.get_task(2, 0.0).kind is DecisionKind.WAIT  # that one may come back
    queue.worker_lost(1)
    assert queue.report_done(2, take(queue, 2).id).accepted
    assert queue.get_task(2, 0.0).kind is DecisionKind.FINISHED


def test_function_of_a_lost_worker_comes_first_again_and_only_one_report_counts(queue):
    first = take(queue)
    queue.worker_lost(1)
    again = take(queue, worker=2)
    assert again.task.function == 5
    assert not queue.report_done(1, first.id).accepted
    assert queue.report_done(2, again.id).accepted
    assert queue.report_done(2, again.id).duplicate
    assert take(queue, worker=2).task.function == 6


def test_cancelling_drops_what_nobody_runs_and_leaves_the_rest(queue):
    running, lost = take(queue, 1), take(queue, 2)
    queue.worker_lost(2)
    assert queue.cancel_functions() == [lost.task.function, 7]
    assert queue.cancel_functions() == []
    assert states(queue) == {TaskState.DOING: 1, TaskState.DROPPED: 2}
    assert queue.report_done(1, running.id).accepted
    queue.add_function(9)
    assert take(queue).task.function == 9


def test_functions_are_not_saved(queue):
    take(queue)
    restored = TaskQueue.from_dict(queue.to_dict())
    assert states(restored) == {}
    assert restored.get_task(1, 0.0).kind is DecisionKind.WAIT
