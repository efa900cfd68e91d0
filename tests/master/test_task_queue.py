"""What the task queue hands out, in which order, until which end; and a queue that was saved."""

from __future__ import annotations

import json

import pytest
from task_queues import EPOCH_DONE, TRAINING_DONE, drain, make_queue, reached, take

from elasticcb.errors import CheckpointError
from elasticcb.master.task import DecisionKind, MilestoneKind, QueueSettings, TaskState, TaskType
from elasticcb.master.task_queue import TaskQueue


def test_order_of_shards_depends_on_seed_and_epoch_and_on_nothing_else():
    def order(seed: int) -> list[list[int]]:
        tasks = drain(make_queue(training=[("a", 2000)], num_epochs=2, shuffle_seed=seed))
        return [[t.shard.start for t in tasks if t.epoch == epoch] for epoch in range(2)]

    first, second = order(7)
    assert [first, second] == order(7)
    assert first != second
    assert first != sorted(first)
    assert order(8)[0] != first


def test_prediction_tasks_come_in_order():
    queue = make_queue(training=(), prediction=[("p", 50), ("q", 30)])
    assert [str(t.shard) for t in drain(queue)] == ["p [0, 20)", "p [20, 40)", "p [40, 50)", "q [0, 20)", "q [20, 30)"]
    assert reached(queue) == [(MilestoneKind.PREDICTION_DONE, 0)]


def test_a_million_tasks_are_queued_without_being_made():
    queue = TaskQueue(
        QueueSettings(records_per_task=64, minibatch_size=64, num_epochs=100), training=[("a", 64_000_000)]
    )
    lease = take(queue)
    assert queue.counts()[TaskType.TRAINING][TaskState.TODO] == 99_999_999
    assert lease.task.id == 1


# ---------------------------------------------------------------- max_batches


def test_a_range_handed_out_again_does_not_count_towards_max_batches():
    queue = make_queue(num_epochs=9, max_batches=5)
    for worker in range(1, 4):
        take(queue, worker)
        queue.worker_lost(worker)
    assert sum(t.shard.records for t in drain(queue, worker=9)) == 50
    assert queue.accounting.batches_handed_out == 5


def test_epoch_cut_short_by_max_batches_is_done_when_its_tasks_are():
    queue = make_queue(num_epochs=2, max_batches=5)
    drain(queue)
    assert reached(queue) == [(EPOCH_DONE, 0), (EPOCH_DONE, 1), (TRAINING_DONE, 0)]


# ---------------------------------------------------------------- epochs


def test_held_epoch_begins_only_after_release():
    queue = make_queue(num_epochs=2, hold_epochs=True)
    queue.finish()
    assert len(drain(queue)) == 2
    assert reached(queue) == [(EPOCH_DONE, 0)]
    decision = queue.get_task(1, 0.0)
    assert decision.kind is DecisionKind.WAIT
    assert "epoch 0 has not been released" in decision.reason
    queue.release_epoch(0)
    assert [t.epoch for t in drain(queue)] == [1, 1]
    assert reached(queue) == [(EPOCH_DONE, 1), (TRAINING_DONE, 0)]


def test_epochs_before_the_initial_one_are_taken_as_done() -> None:
    queue = make_queue(training=[("a", 4)], records_per_task=4, num_epochs=3, initial_epoch=1)
    assert [task.epoch for task in drain(queue)] == [1, 2]
    assert [kind for kind, _ in reached(queue)][-1] is MilestoneKind.TRAINING_DONE
    assert queue.accounting.records_trained == {1: 4, 2: 4}


def test_nothing_is_left_to_train_when_the_initial_epoch_is_the_last() -> None:
    queue = make_queue(training=[("a", 4)], records_per_task=4, num_epochs=2, initial_epoch=2)
    assert queue.training_done
    assert [milestone.kind for milestone in queue.take_milestones()] == [MilestoneKind.TRAINING_DONE]


def test_an_open_ended_epoch_ends_where_its_source_does() -> None:
    queue = make_queue(training=[("a", 1 << 40)], records_per_task=4, num_epochs=2, shuffle_seed=None, open_ended=True)
    first, second, third = (queue.get_task(worker, 0.0).lease for worker in (1, 2, 3))
    queue.report_done(2, second.id, ended_after=1)
    assert queue.take_milestones() == []
    queue.report_done(1, first.id)
    queue.report_done(3, third.id, ended_after=0)
    assert [milestone.kind for milestone in queue.take_milestones()] == [MilestoneKind.EPOCH_DONE]
    following = queue.get_task(1, 0.0).lease.task
    assert (following.epoch, following.shard.start) == (1, 0)
    assert queue.accounting.records_trained == {0: 5}


# ---------------------------------------------------------------- evaluation, TRAIN_END, the end


def test_wait_becomes_finished_only_when_nothing_runs_and_nothing_will_come():
    queue = make_queue(training=[("a", 20)])
    lease = take(queue)
    queue.report_done(1, lease.id)
    assert queue.get_task(2, 0.0).kind is DecisionKind.WAIT
    queue.add_evaluation(1, [("v", 20)])
    lease = take(queue)
    queue.finish()
    assert queue.get_task(2, 0.0).kind is DecisionKind.WAIT
    queue.report_done(1, lease.id)
    assert queue.get_task(2, 0.0).kind is DecisionKind.FINISHED


# ---------------------------------------------------------------- counting


def test_counts_know_the_tasks_that_are_still_to_be_made():
    queue = make_queue(training=[("a", 100)], num_epochs=3)
    take(queue)
    counts = queue.counts()[TaskType.TRAINING]
    assert (counts[TaskState.TODO], counts[TaskState.DOING]) == (14, 1)
    capped = make_queue(training=[("a", 100)], num_epochs=3, max_batches=6)
    assert capped.counts()[TaskType.TRAINING][TaskState.TODO] == 3


# ---------------------------------------------------------------- told to stop


def test_stopping_before_the_first_task_ends_training_without_an_epoch():
    queue = make_queue()
    queue.stop_training("never mind")
    assert reached(queue) == [(TRAINING_DONE, 0)]


def test_stopping_before_the_first_batch_of_an_epoch_trains_it_as_fit_does():
    queue = make_queue(training=[("a", 100)], num_epochs=3, hold_epochs=True)
    trained = len(drain(queue))
    queue.stop_training("enough", before_batch=True)  # by on_epoch_begin
    queue = TaskQueue.from_dict(json.loads(json.dumps(queue.to_dict())))
    assert queue.stop_reason == "enough"
    queue.take_milestones()
    queue.release_epoch(0)
    last = take(queue, 1)
    assert (last.task.epoch, last.task.shard.records) == (1, 10)
    assert queue.get_task(2, 0.0).kind is DecisionKind.WAIT
    queue.report_done(1, last.id)
    assert reached(queue) == [(EPOCH_DONE, 1), (TRAINING_DONE, 0)]
    assert queue.accounting.records_trained == {0: 100, 1: 10}
    assert queue.accounting.records_dropped == {1: 90}
    assert trained == 5


# ---------------------------------------------------------------- saved, and going on in another process


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
