"""A task queue that was saved, and goes on in another process."""

from __future__ import annotations

import json

import pytest
from task_queues import EPOCH_DONE, TRAINING_DONE, drain, make_queue, reached, records_of, take

from elasticcb.errors import CheckpointError
from elasticcb.master.decisions import DecisionKind, MilestoneKind
from elasticcb.master.task_queue import TaskQueue


def test_restored_queue_goes_on_where_it_was_saved():
    queue = make_queue(training=[("a", 100), ("b", 33)], num_epochs=2)
    done = [take(queue) for _ in range(3)]
    for lease in done:
        queue.report_done(1, lease.id)
    running = take(queue)
    queue.report_progress(1, running.id, 10, 0.0)
    saved = json.loads(json.dumps(queue.to_dict()))
    restored = TaskQueue.from_dict(saved)
    before = records_of(lease.task for lease in done) + records_of([running.task])[:10]
    after = drain(restored, worker=5)
    epochs = [t.epoch for t in after]
    first = before + records_of(t for t in after if t.epoch == 0)
    everything = [("a", r) for r in range(100)] + [("b", r) for r in range(33)]
    assert sorted(first) == sorted(records_of(t for t in after if t.epoch == 1)) == everything
    assert epochs == sorted(epochs)
    assert restored.accounting.records_trained == {0: 133, 1: 133}
    assert restored.accounting.records_repeated == running.task.shard.records - 10
    assert reached(restored) == [(EPOCH_DONE, 0), (EPOCH_DONE, 1), (TRAINING_DONE, 0)]


def test_workers_go_on_with_their_leases_when_another_master_restores_the_queue():
    queue = make_queue(training=[("a", 100)], records_per_task=40)
    first, second = (queue.get_task(1, 0.0).lease for _ in range(2))
    other = queue.get_task(2, 0.0).lease
    queue.report_progress(1, first.id, 10, 1.0)
    queue.report_done(2, other.id)
    queue = TaskQueue.from_dict(json.loads(json.dumps(queue.to_dict(leases=True))), 100.0)
    assert [(lease.id, lease.worker, lease.task) for lease in queue.leases()] == [
        (first.id, 1, first.task),
        (second.id, 1, second.task),
    ]
    assert queue.report_done(2, other.id).duplicate
    assert not queue.report_done(2, other.id + 100).accepted
    assert queue.report_progress(1, first.id, 30, 101.0).accepted
    assert queue.report_done(1, first.id).accepted
    assert queue.report_done(1, second.id).accepted
    assert queue.accounting.records_trained == {0: 100}
    assert queue.accounting.records_repeated == queue.accounting.reports_refused - 1 == 0
    assert [milestone.kind for milestone in queue.take_milestones()] == [
        MilestoneKind.EPOCH_DONE,
        MilestoneKind.TRAINING_DONE,
    ]


def test_lease_of_a_worker_that_ended_with_the_master_goes_back_behind_what_it_reported():
    queue = make_queue(training=[("a", 100)], records_per_task=100)
    lease = queue.get_task(1, 0.0).lease
    queue.report_progress(1, lease.id, 10, 1.0)
    queue = TaskQueue.from_dict(json.loads(json.dumps(queue.to_dict(leases=True))), 5.0)
    assert queue.worker_lost(1)
    again = queue.get_task(2, 6.0).lease
    assert (again.task.id, again.task.shard.start, again.task.shard.end) == (lease.task.id, 10, 100)


def test_queue_saved_while_nothing_runs_goes_on_with_its_epoch():
    queue = make_queue(training=[("a", 60)])
    queue.report_done(1, take(queue).id)
    restored = TaskQueue.from_dict(queue.to_dict())
    assert len(drain(restored)) == 2
    assert reached(restored) == [(EPOCH_DONE, 0), (TRAINING_DONE, 0)]


def test_restored_queue_refuses_leases_from_before():
    queue = make_queue()
    saved = queue.to_dict()
    old = take(queue)
    restored = TaskQueue.from_dict(saved)
    assert take(restored).id != old.id
    assert not restored.report_done(1, old.id).accepted


def test_restored_queue_counts_a_task_whose_records_were_all_reported_as_done():
    queue = make_queue(training=[("a", 20)])
    queue.report_progress(1, take(queue).id, 20, 0.0)
    restored = TaskQueue.from_dict(queue.to_dict())
    assert reached(restored) == [(EPOCH_DONE, 0), (TRAINING_DONE, 0)]


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
