"""Predictions that callbacks of a worker may hold in memory: they are done again when it is lost before it ends."""

from __future__ import annotations

import pytest
from master_state import settings_of, state_of
from task_queues import make_queue, reached, records_of, take

from elasticcb.cluster.external import ExternalCluster
from elasticcb.errors import ClusterLostError
from elasticcb.master.master import Master
from elasticcb.master.members import Role
from elasticcb.master.shards import Shard
from elasticcb.master.task import DecisionKind, MilestoneKind, TaskResult
from elasticcb.settings import Command

ALL = [("a", record) for record in range(40)]


def holding_queue(**changes):
    return make_queue(training=(), prediction=[("a", 40)], records_per_task=10, hold_predictions=True, **changes)


def do(queue, worker, tasks=1):
    done = []
    for _ in range(tasks):
        lease = take(queue, worker)
        assert queue.report_done(worker, lease.id).accepted
        done.append(lease.task)
    return done


def test_prediction_is_done_when_all_tasks_are_and_callbacks_of_all_workers_have_ended():
    queue = holding_queue()
    do(queue, 1, 3)
    do(queue, 2, 1)
    assert reached(queue) == []
    assert queue.get_task(1, 0.0).kind is DecisionKind.FINISHED
    queue.results_kept(1)
    assert reached(queue) == []
    queue.results_kept(2)
    assert reached(queue) == [(MilestoneKind.PREDICTION_DONE, 0)]
    assert queue.accounting.records_predicted == 40
    assert queue.accounting.records_repeated == 0


def test_all_tasks_of_a_worker_that_is_lost_before_its_callbacks_ended_are_done_again():
    queue = holding_queue()
    lost = do(queue, 1, 2)
    running = take(queue, 1).task
    kept = do(queue, 2, 1)
    assert queue.worker_lost(1) == [*lost, running]
    assert queue.accounting.records_predicted == 10
    again = do(queue, 2, 3)
    assert again == [*lost, running]
    assert queue.get_task(2, 0.0).kind is DecisionKind.FINISHED
    queue.results_kept(2)
    assert reached(queue) == [(MilestoneKind.PREDICTION_DONE, 0)]
    assert sorted(records_of([*kept, *again])) == ALL
    assert queue.accounting.records_predicted == 40
    assert queue.accounting.records_repeated == 30
    assert queue.accounting.tasks_taken_over == 3


def test_worker_that_is_lost_while_its_callbacks_end_has_its_tasks_done_by_the_next_one():
    queue = holding_queue()
    do(queue, 1, 2)
    do(queue, 2, 2)
    assert queue.get_task(1, 0.0).kind is queue.get_task(2, 0.0).kind is DecisionKind.FINISHED
    queue.results_kept(2)
    queue.worker_lost(1)
    assert reached(queue) == []
    do(queue, 3, 2)
    queue.results_kept(3)
    assert reached(queue) == [(MilestoneKind.PREDICTION_DONE, 0)]


def test_worker_that_leaves_in_order_keeps_what_it_has_done():
    queue = holding_queue()
    do(queue, 1, 2)
    lease = take(queue, 1)
    queue.report_progress(1, lease.id, 4, 0.0)  # said when its callbacks have ended
    assert [task.shard for task in queue.worker_left(1)] == [Shard("a", 24, 30)]
    queue.worker_lost(1)  # its process is gone, too
    do(queue, 2, 2)
    queue.results_kept(2)
    assert reached(queue) == [(MilestoneKind.PREDICTION_DONE, 0)]
    assert queue.accounting.records_predicted == 40
    assert queue.accounting.records_repeated == 0


def test_report_that_comes_again_is_no_second_task():
    queue = holding_queue()
    lease = take(queue, 1)
    assert queue.report_done(1, lease.id).accepted
    assert queue.report_done(1, lease.id).duplicate
    do(queue, 1, 3)
    queue.results_kept(1)
    assert reached(queue) == [(MilestoneKind.PREDICTION_DONE, 0)]
    assert queue.accounting.records_predicted == 40


def predicting_master(restarts, lines):
    """A master with two workers, of which the first has ended its callbacks and the second is about to."""
    settings = settings_of(Command.PREDICT, num_workers=2, num_ps=1, max_worker_restarts=restarts)
    master = Master(settings.cluster, ExternalCluster(lines.append), lines.append)
    master.server.begin_job(settings)
    state_of(master).queue = holding_queue()
    workers = [master.server.register(Role.WORKER, index, "", index + 1, "here").id for index in range(2)]
    for worker in 2 * workers:
        lease = master.server.get_task(worker, (), 0.0).lease
        assert master.server.report_done(worker, lease.id, TaskResult(0)).accepted
    for worker in workers:
        assert master.server.get_task(worker, (), 0.0).kind is DecisionKind.FINISHED
    assert master.server.next_job(1, workers[0], 0.0) == (0, None)
    master.server.tend()
    return master, workers


def test_job_fails_when_tasks_come_back_and_all_workers_that_are_left_have_ended_their_callbacks():
    lines = []
    master, (_, second) = predicting_master(0, lines)
    master.server.lost(second, "killed by SIGKILL")
    with pytest.raises(ClusterLostError, match=r"2 prediction tasks .*max_worker_restarts"):
        master.server.tend()


def test_tasks_that_come_back_wait_for_a_worker_that_is_expected():
    lines = []
    master, (_, second) = predicting_master(1, lines)
    master.server.lost(second, "killed by SIGKILL")
    master.server.tend()
    third = master.server.register(Role.WORKER, 1, "", 3, "here").id
    master.server.tend()
    for _ in range(2):
        lease = master.server.get_task(third, (), 0.0).lease
        assert master.server.report_done(third, lease.id, TaskResult(0)).accepted
    assert master.server.next_job(1, third, 0.0) == (0, None)
    master.server.tend()
    assert reached(state_of(master).queue) == [(MilestoneKind.PREDICTION_DONE, 0)]
