"""Training that is told to stop."""

from __future__ import annotations

import json

from task_queues import EPOCH_DONE, TRAINING_DONE, drain, make_queue, reached, take

from elasticcb.master.decisions import DecisionKind
from elasticcb.master.task import TaskState, TaskType
from elasticcb.master.task_queue import TaskQueue


def test_stopping_drops_what_is_to_do_and_lets_what_runs_go_on():
    queue = make_queue(training=[("a", 100)], num_epochs=3)
    running, lost = take(queue, 1), take(queue, 2)
    queue.worker_lost(2)
    queue.stop_training("early")
    assert queue.stop_reason == "early"
    assert queue.get_task(3, 0.0).kind is DecisionKind.WAIT
    assert reached(queue) == []
    queue.report_done(1, running.id)
    assert reached(queue) == [(EPOCH_DONE, 0), (TRAINING_DONE, 0)]
    accounting = queue.accounting
    assert accounting.records_trained == {0: 20}
    assert accounting.records_dropped == {0: 80}
    counts = queue.counts()[TaskType.TRAINING]
    assert (counts[TaskState.DONE], counts[TaskState.DROPPED], counts[TaskState.TODO]) == (1, 4, 0)
    assert lost.task.shard.records == 20


def test_stopping_can_end_overlapping_epochs_by_itself():
    queue = make_queue(num_epochs=3)
    first, second, third = (take(queue, worker) for worker in (1, 2, 3))
    queue.report_done(1, first.id)
    queue.report_done(3, third.id)
    queue.worker_lost(2)
    queue.stop_training("enough")
    assert reached(queue) == [(EPOCH_DONE, 0), (EPOCH_DONE, 1), (TRAINING_DONE, 0)]
    assert not queue.report_done(2, second.id).accepted


def test_task_that_ran_when_training_stopped_is_finished_by_another_worker():
    queue = make_queue()
    lease = take(queue, 1)
    queue.stop_training("early")
    queue.worker_lost(1)
    assert take(queue, 2).task == lease.task


def test_stopping_before_the_first_task_ends_training_without_an_epoch():
    queue = make_queue()
    queue.stop_training("never mind")
    assert reached(queue) == [(TRAINING_DONE, 0)]


def test_stopping_between_held_epochs_ends_training():
    queue = make_queue(num_epochs=3, hold_epochs=True)
    drain(queue)
    queue.take_milestones()
    queue.stop_training("converged")
    assert reached(queue) == [(TRAINING_DONE, 0)]
    queue.finish()
    assert queue.get_task(1, 0.0).kind is DecisionKind.FINISHED


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


def test_stopping_twice_or_after_the_end_changes_nothing():
    queue = make_queue()
    drain(queue)
    queue.take_milestones()
    queue.stop_training("late")
    assert queue.stop_reason is None
    assert reached(queue) == []
