"""The end of a task goes to a worker that waits."""

from __future__ import annotations

import pytest

from elasticcb.errors import WireError
from elasticcb.master.decisions import DecisionKind, MilestoneKind
from elasticcb.master.queue_settings import QueueSettings
from elasticcb.master.shards import Shard
from elasticcb.master.task_queue import TaskQueue


def queue_of(records: int = 40, epochs: int = 1) -> TaskQueue:
    return TaskQueue(
        QueueSettings(records_per_task=20, minibatch_size=5, num_epochs=epochs, shuffle_seed=None),
        training=[("a", records)],
    )


def take(queue: TaskQueue, worker: int):
    lease = queue.get_task(worker, 0.0).lease
    assert lease is not None
    return lease


def test_rest_of_a_task_goes_to_a_worker_that_holds_nothing():
    queue = queue_of(20)
    lease = take(queue, 1)
    queue.report_progress(1, lease.id, 5, 1.0)
    assert queue.split(1, lease.id, 10).accepted
    assert queue.get_task(1, 1.0).kind is DecisionKind.WAIT  # it would be no quicker with it
    assert queue.leases(1)[0].task.shard == Shard("a", 0, 10)
    rest = take(queue, 2)
    assert rest.task.shard == Shard("a", 10, 20)
    assert rest.task.id != lease.task.id
    assert queue.report_done(2, rest.id).accepted
    assert queue.take_milestones() == []
    assert queue.report_done(1, lease.id).accepted
    assert [milestone.kind for milestone in queue.take_milestones()] == [
        MilestoneKind.EPOCH_DONE,
        MilestoneKind.TRAINING_DONE,
    ]
    accounting = queue.accounting
    assert (accounting.records_trained, accounting.tasks_split) == ({0: 20}, 1)
    assert (accounting.records_repeated, accounting.tasks_taken_over) == (0, 0)


def test_task_that_is_not_begun_is_handed_back_and_its_worker_takes_it_when_it_has_nothing_else():
    queue = queue_of()
    running, ahead = take(queue, 1), take(queue, 1)
    assert queue.split(1, ahead.id, 0).accepted
    assert queue.get_task(1, 1.0, [running.id]).kind is DecisionKind.WAIT
    assert queue.report_done(1, running.id).accepted
    again = take(queue, 1)
    assert again.task == ahead.task
    assert again.id != ahead.id
    assert not queue.report_done(1, ahead.id).accepted
    assert queue.report_done(1, again.id).accepted
    assert queue.accounting.records_trained == {0: 40}
    assert queue.accounting.records_repeated == 0


def test_next_epoch_waits_for_no_part_that_is_for_an_idle_worker():
    queue = queue_of(20, epochs=2)
    lease = take(queue, 1)
    queue.report_progress(1, lease.id, 5, 1.0)
    queue.split(1, lease.id, 10)
    assert take(queue, 1).task.epoch == 1  # a worker that is busy fetches ahead
    rest = take(queue, 2)
    assert (rest.task.epoch, rest.task.shard) == (0, Shard("a", 10, 20))


def test_splits_that_can_not_be_are_refused():
    queue = queue_of(20)
    lease = take(queue, 1)
    queue.report_progress(1, lease.id, 10, 1.0)
    for end in (-5, 0, 5, 21):
        with pytest.raises(WireError, match=rf"asked to keep only the first {end} records.*from 10 to 20"):
            queue.split(1, lease.id, end)
    assert queue.split(1, lease.id, 20).reason == "there is nothing to split off"
    assert not queue.split(2, lease.id, 15).accepted
    assert not queue.split(1, 99, 15).accepted
    assert (queue.accounting.tasks_split, queue.accounting.reports_refused) == (0, 2)
