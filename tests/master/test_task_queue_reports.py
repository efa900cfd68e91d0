"""What workers report of their tasks: done, failed, got on; and tasks that call functions."""

from __future__ import annotations

import re

import pytest
from task_queues import drain, make_queue, take

from elasticcb.errors import JobFailedError, WireError
from elasticcb.master.accounting import IllegalTransitionError, TaskRecord
from elasticcb.master.shards import Shard
from elasticcb.master.task import DecisionKind, QueueSettings, Task, TaskEvent, TaskState, TaskType
from elasticcb.master.task_queue import TaskQueue


def test_duplicate_report_of_a_failed_lease_uses_up_no_second_retry():
    queue = make_queue(max_retries=1)
    lease = take(queue)
    assert queue.report_failed(1, lease.id, "boom", "").accepted
    assert queue.report_failed(1, lease.id, "boom", "").duplicate
    assert queue.failure is None
    assert queue.accounting.tasks_retried == 1


def test_report_on_the_lease_of_another_worker_is_refused():
    queue = make_queue()
    lease = take(queue, worker=1)
    outcome = queue.report_done(2, lease.id)
    assert not outcome.accepted
    assert "belongs to worker 1" in outcome.reason
    assert queue.report_done(1, lease.id).accepted


def test_progress_beyond_the_shard_is_an_error_in_words():
    queue = make_queue()
    lease = take(queue)
    with pytest.raises(WireError, match="21 records"):
        queue.report_progress(1, lease.id, 21, 0.0)


def test_transition_that_is_not_in_the_table_is_refused_with_the_story_of_the_task():
    record = TaskRecord(Task(7, TaskType.TRAINING, Shard("data.csv", 0, 20)))
    with pytest.raises(IllegalTransitionError, match=r"task 7 .*data\.csv.* is TODO"):
        record.move(TaskEvent.REPORTED_DONE)


# ---------------------------------------------------------------- failing


def test_failed_task_that_may_not_be_retried_is_not_said_to_have_used_up_its_retries():
    queue = make_queue(training=[("data.csv", 20)], max_retries=0)
    queue.report_failed(1, take(queue, 1).id, "ValueError: row 1", "")
    assert str(queue.failure).endswith("failed on worker 1: ValueError: row 1")


def test_failed_task_is_tried_again_until_its_retries_are_used_up():
    queue = make_queue(training=[("data.csv", 20)], max_retries=2)
    for worker in (1, 2):
        outcome = queue.report_failed(worker, take(queue, worker).id, f"ValueError: row {worker}", "")
        assert outcome.accepted
        assert queue.failure is None
    lease = take(queue, worker=3)
    queue.report_progress(3, lease.id, 10, 0.0)
    queue.report_failed(3, lease.id, "ValueError: row 3", "Traceback of worker 3")
    failure = queue.failure
    assert failure is not None
    assert (failure.shard, failure.worker) == (Shard("data.csv", 0, 20), 3)
    assert failure.event is TaskEvent.RETRIES_USED_UP
    assert [attempt.worker for attempt in failure.attempts] == [1, 2, 3]
    story = str(failure)
    for part in ("'data.csv'", "[0, 20)", "worker 3", "row 3", "row 1", "row 2", "max_task_retries"):
        assert part in story
    error = failure.to_error("on host a")
    assert isinstance(error, JobFailedError)
    assert error.user_traceback == "Traceback of worker 3"
    assert queue.accounting.tasks_retried == 2
    assert queue.counts()[TaskType.TRAINING][TaskState.FAILED] == 1


def test_failed_task_goes_to_another_worker_if_one_has_a_task():
    queue = make_queue(training=[("a", 20), ("b", 20)])
    failed, other = take(queue, 1), take(queue, 2)
    queue.report_failed(1, failed.id, "ValueError: a row", "")
    assert queue.get_task(1, 0.0).kind is DecisionKind.WAIT
    queue.report_done(2, other.id)
    again = take(queue, 2)
    assert (again.task.shard, again.failures) == (failed.task.shard, 1)
    queue.report_failed(2, again.id, "ValueError: a row", "")
    assert take(queue, 2).failures == 2  # nobody else is there


def test_error_of_all_attempts_is_told_once_with_the_workers_that_met_it():
    queue = make_queue(training=[("data.csv", 20)], max_retries=2)
    for worker in (3, 1, 1):
        queue.report_failed(worker, take(queue, worker).id, "ValueError: a row", "")
    story = str(queue.failure)
    assert story.count("a row") == 1
    assert "3 times, by workers 1, 3" in story


def test_attempts_that_ended_otherwise_are_listed_beside_those_that_ended_as_the_last():
    queue = make_queue(training=[("data.csv", 20)], max_retries=1)
    take(queue, worker=1)
    queue.worker_lost(1)
    for worker in (2, 3):
        queue.report_failed(worker, take(queue, worker).id, "ValueError: a row", "")
    story = str(queue.failure)
    assert story.count("a row") == 1
    assert "1. worker 1, [0, 20): worker lost: the worker was lost" in story
    assert re.search(r"3\. worker 3, .*: as above", story)


@pytest.mark.parametrize("reported", [0, 20])
def test_fatal_failure_ends_the_job_even_behind_the_last_record(reported):
    queue = make_queue()
    lease = take(queue)
    queue.report_progress(1, lease.id, reported, 0.0)
    queue.report_failed(1, lease.id, "bad model file", "", fatal=True)
    assert queue.failure is not None
    assert queue.failure.event is TaskEvent.REPORTED_FATAL


def test_first_failure_is_the_one_that_is_told():
    queue = make_queue(max_retries=0)
    first, second = take(queue, 1), take(queue, 2)
    queue.report_failed(1, first.id, "first", "")
    queue.report_failed(2, second.id, "second", "")
    assert queue.failure is not None
    assert queue.failure.error == "first"


def test_lost_workers_do_not_use_up_retries():
    queue = make_queue(training=[("a", 20)], max_retries=0, max_losses=10)
    for worker in range(10):
        take(queue, worker)
        queue.worker_lost(worker)
    assert queue.failure is None
    assert len(drain(queue, 99)) == 1


def test_task_that_takes_every_worker_down_ends_the_job():
    queue = make_queue(training=[("a", 20)], max_losses=3)
    for worker in range(4):
        assert queue.failure is None
        take(queue, worker)
        queue.worker_lost(worker)
    assert queue.failure is not None
    assert queue.failure.event is TaskEvent.LOSSES_USED_UP
    assert "4 times" in str(queue.failure)


def test_task_that_hangs_every_worker_ends_the_job():
    queue = make_queue(training=[("a", 20)], max_losses=1)
    for now in (0.0, 100.0):
        take(queue, now=now)
        queue.expire(now + 60)
    assert queue.failure is not None
    assert "no progress for 60 s" in queue.failure.error


def test_losses_of_a_task_that_gets_on_do_not_add_up():
    queue = make_queue(training=[("a", 20)], max_losses=1)
    for worker in range(15):
        queue.report_progress(worker, take(queue, worker).id, 1, 0.0)
        queue.worker_lost(worker)
    assert queue.failure is None
    assert take(queue, 99).task.shard == Shard("a", 15, 20)


def test_prefetched_task_is_not_blamed_for_the_loss_of_its_worker():
    queue = make_queue(max_losses=2)
    deadly = take(queue, 0).task
    prefetched = take(queue, 0).task
    queue.worker_lost(0)
    for worker in (1, 2):
        assert take(queue, worker).task == deadly
        assert take(queue, worker).task == prefetched
        queue.worker_lost(worker)
    assert queue.failure is not None
    assert queue.failure.task == deadly


# ---------------------------------------------------------------- FUNCTION tasks


@pytest.fixture
def functions():
    queue = TaskQueue(QueueSettings(records_per_task=1, minibatch_size=1))
    for number in (5, 6, 7):
        queue.add_function(number)
    return queue


def states(queue):
    return {state: count for state, count in queue.counts()[TaskType.FUNCTION].items() if count}


def test_functions_are_handed_out_in_their_order_and_the_job_waits_for_more(functions):
    leases = [take(functions) for _ in range(3)]
    assert [lease.task.function for lease in leases] == [5, 6, 7]
    assert all(functions.report_done(1, lease.id).accepted for lease in leases)
    assert functions.get_task(1, 0.0).kind is DecisionKind.WAIT
    functions.add_function(8)
    assert take(functions).task.function == 8
    functions.finish()
    assert functions.get_task(2, 0.0).kind is DecisionKind.WAIT  # that one may come back
    functions.worker_lost(1)
    assert functions.report_done(2, take(functions, 2).id).accepted
    assert functions.get_task(2, 0.0).kind is DecisionKind.FINISHED


def test_function_of_a_lost_worker_comes_first_again_and_only_one_report_counts(functions):
    first = take(functions)
    functions.worker_lost(1)
    again = take(functions, worker=2)
    assert again.task.function == 5
    assert not functions.report_done(1, first.id).accepted
    assert functions.report_done(2, again.id).accepted
    assert functions.report_done(2, again.id).duplicate
    assert take(functions, worker=2).task.function == 6


def test_cancelling_drops_what_nobody_runs_and_leaves_the_rest(functions):
    running, lost = take(functions, 1), take(functions, 2)
    functions.worker_lost(2)
    assert functions.cancel_functions() == [lost.task.function, 7]
    assert functions.cancel_functions() == []
    assert states(functions) == {TaskState.DOING: 1, TaskState.DROPPED: 2}
    assert functions.report_done(1, running.id).accepted
    functions.add_function(9)
    assert take(functions).task.function == 9


def test_functions_are_not_saved(functions):
    take(functions)
    restored = TaskQueue.from_dict(functions.to_dict())
    assert states(restored) == {}
    assert restored.get_task(1, 0.0).kind is DecisionKind.WAIT
