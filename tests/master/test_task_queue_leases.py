"""Leases that are over, taken back or never came to their worker; and tasks whose end goes to another."""

from __future__ import annotations

import pytest
from task_queues import EPOCH_DONE, TRAINING_DONE, make_queue, reached, take

from elasticcb.errors import WireError
from elasticcb.master.shards import Shard
from elasticcb.master.task import DecisionKind

# ---------------------------------------------------------------- taking over


def test_task_taken_over_starts_behind_the_reported_records():
    queue = make_queue(training=[("a", 20)])
    lease = take(queue)
    queue.report_progress(1, lease.id, 10, 0.0)
    assert queue.worker_lost(1)[0].shard == Shard("a", 10, 20)
    again = take(queue, worker=2)
    assert again.task.id == lease.task.id
    queue.report_progress(2, again.id, 5, 0.0)
    queue.worker_lost(2)
    last = take(queue, worker=3)
    assert last.task.shard == Shard("a", 15, 20)
    queue.report_done(3, last.id)
    accounting = queue.accounting
    assert accounting.records_trained == {0: 20}
    assert accounting.records_repeated == 10 + 5
    assert accounting.tasks_taken_over == 2


def test_what_a_worker_hands_back_counts_neither_as_a_loss_nor_as_trained_twice():
    queue = make_queue(training=[("a", 20)])
    for worker in range(1, 9):  # more often than `max_losses`
        lease = take(queue, worker)
        queue.report_progress(worker, lease.id, 2, 0.0)
        assert queue.worker_left(worker)[0].shard == Shard("a", 2 * worker, 20)
    last = take(queue, worker=9)
    queue.report_done(9, last.id)
    assert queue.accounting.records_trained == {0: 20}
    assert queue.accounting.records_repeated == 0
    assert queue.accounting.tasks_taken_over == 8


def test_records_of_a_worker_that_can_not_tell_which_are_done_may_be_trained_twice():
    queue = make_queue(training=[("a", 20)])
    lease = take(queue)
    queue.report_progress(1, lease.id, 0, 0.0, True)
    queue.worker_left(1)
    take(queue, worker=2)
    assert queue.accounting.records_repeated == 20


def test_late_progress_report_does_not_take_records_back():
    queue = make_queue(training=[("a", 20)])
    lease = take(queue)
    queue.report_progress(1, lease.id, 15, 0.0)
    assert queue.report_progress(1, lease.id, 10, 0.0).accepted
    assert queue.worker_lost(1)[0].shard == Shard("a", 15, 20)
    assert queue.accounting.records_trained == {0: 15}


def test_tasks_taken_back_come_before_new_ones_in_their_order():
    queue = make_queue(training=[("a", 200)])
    first, second = take(queue), take(queue)
    queue.worker_lost(1)
    assert [take(queue, 2).task, take(queue, 2).task] == [first.task, second.task]


def test_a_lost_worker_gets_no_task_any_more():
    queue = make_queue()
    queue.worker_lost(1)
    decision = queue.get_task(1, 0.0)
    assert decision.kind is DecisionKind.FINISHED
    assert "lost" in decision.reason


# ---------------------------------------------------------------- lost answers


def test_lease_whose_answer_got_lost_is_put_back_and_is_no_attempt():
    queue = make_queue(max_losses=0, max_retries=0)
    lease = take(queue, held=[])
    again = take(queue, held=[])
    assert again.task == lease.task
    assert again.id != lease.id
    assert queue.accounting.answers_lost == 1
    assert queue.accounting.records_repeated == 0
    assert queue.failure is None


def test_lease_that_the_worker_spoke_of_is_not_put_back():
    queue = make_queue()
    first = take(queue, held=[])
    queue.report_progress(1, first.id, 0, 0.0)
    assert take(queue, held=[]).task != first.task
    assert queue.report_done(1, first.id).accepted


# ---------------------------------------------------------------- leases and time


def test_lease_without_progress_is_over_after_its_time():
    queue = make_queue()
    lease = take(queue, now=100.0)
    assert queue.expire(159.9) == []
    assert queue.expire(160.0) == [lease]
    assert take(queue, worker=2, now=160.0).task == lease.task
    assert queue.expire(219.9) == []
    assert len(queue.expire(220.0)) == 1


def test_progress_keeps_a_lease_alive_and_repeating_it_does_not():
    queue = make_queue()
    lease = take(queue)
    queue.report_progress(1, lease.id, 10, 50.0)
    queue.report_progress(1, lease.id, 10, 100.0)
    assert queue.expire(109.0) == []
    assert queue.expire(110.0) == [lease]


def test_worker_that_can_not_tell_which_records_are_done_keeps_its_lease_alive_by_saying_that_it_got_on():
    queue = make_queue()
    lease = take(queue)
    queue.report_progress(1, lease.id, 0, 50.0, progressed=True)
    assert queue.expire(109.0) == []
    assert queue.expire(110.0) == [lease]
    assert queue.accounting.records_trained == {}


def test_workers_that_wait_for_a_lost_server_keep_their_leases():
    queue = make_queue()
    lease = take(queue)
    assert queue.expire(400.0, waiting=True) == []
    assert queue.expire(459.9) == []
    assert queue.expire(460.0) == [lease]


def test_evaluation_progress_keeps_the_lease_alive():
    queue = make_queue()
    queue.add_evaluation(1, [("v", 20)])
    lease = take(queue)
    queue.report_progress(1, lease.id, 10, 50.0)
    assert queue.expire(100.0) == []


def test_prefetched_task_lives_on_the_progress_of_the_one_before_it():
    queue = make_queue()
    first, second = take(queue, now=0.0), take(queue, now=1.0)
    queue.report_progress(1, first.id, 10, 50.0)
    assert queue.expire(100.0) == []
    queue.report_done(1, first.id)
    assert queue.expire(159.0) == []
    assert queue.expire(160.0) == [second]


def test_hung_worker_loses_all_its_leases_at_once():
    queue = make_queue()
    first, second = take(queue, now=0.0), take(queue, now=59.0)
    assert queue.expire(60.0) == [first, second]


def test_task_without_records_is_kept_alive_by_any_report():
    queue = make_queue(training=())
    queue.add_train_end()
    lease = take(queue)
    queue.report_progress(1, lease.id, 0, 50.0)
    assert queue.expire(100.0) == []


def test_worker_that_computes_one_long_batch_keeps_its_lease_up_to_a_limit_and_the_user_is_told():
    queue = make_queue()  # of 60 s
    lease = take(queue)
    answers = {now: queue.report_progress(1, lease.id, 0, now, computing=now) for now in range(10, 661, 10)}
    assert queue.expire(719.0) == []
    assert [now for now, answer in answers.items() if answer.long_batch] == list(range(60, 661, 10))
    assert "has computed one batch for 60 s. After 720 s (12 times lease_seconds)" in answers[60].reason
    for now in (670.0, 710.0):  # which keeps nothing alive any more
        assert not queue.report_progress(1, lease.id, 0, now, computing=now).long_batch
    assert queue.expire(720.0) == [lease]


def test_batch_that_ends_leaves_a_worker_the_time_of_a_lease():
    queue = make_queue()
    lease = take(queue)
    queue.report_progress(1, lease.id, 0, 50.0, computing=50.0)
    for now in (60.0, 80.0, 100.0):
        queue.report_progress(1, lease.id, 0, now)  # alive, and waiting for something
    assert queue.expire(109.0) == []
    assert queue.expire(110.0) == [lease]


# ---------------------------------------------------------------- splitting


def test_rest_of_a_task_goes_to_a_worker_that_holds_nothing():
    queue = make_queue(training=[("a", 20)], minibatch_size=5)
    lease = take(queue, 1)
    queue.report_progress(1, lease.id, 5, 1.0)
    assert queue.split(1, lease.id, 10).accepted
    assert queue.get_task(1, 1.0).kind is DecisionKind.WAIT  # it would be no quicker with it
    assert queue.leases(1)[0].task.shard == Shard("a", 0, 10)
    rest = take(queue, 2)
    assert rest.task.shard == Shard("a", 10, 20)
    assert rest.task.id != lease.task.id
    assert queue.report_done(2, rest.id).accepted
    assert reached(queue) == []
    assert queue.report_done(1, lease.id).accepted
    assert reached(queue) == [(EPOCH_DONE, 0), (TRAINING_DONE, 0)]
    accounting = queue.accounting
    assert (accounting.records_trained, accounting.tasks_split) == ({0: 20}, 1)
    assert (accounting.records_repeated, accounting.tasks_taken_over) == (0, 0)


def test_task_that_is_not_begun_is_handed_back_and_its_worker_takes_it_when_it_has_nothing_else():
    queue = make_queue(minibatch_size=5)
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
    queue = make_queue(training=[("a", 20)], minibatch_size=5, num_epochs=2)
    lease = take(queue, 1)
    queue.report_progress(1, lease.id, 5, 1.0)
    queue.split(1, lease.id, 10)
    assert take(queue, 1).task.epoch == 1  # a worker that is busy fetches ahead
    rest = take(queue, 2)
    assert (rest.task.epoch, rest.task.shard) == (0, Shard("a", 10, 20))


def test_splits_that_can_not_be_are_refused():
    queue = make_queue(training=[("a", 20)], minibatch_size=5)
    lease = take(queue, 1)
    queue.report_progress(1, lease.id, 10, 1.0)
    for end in (-5, 0, 5, 21):
        with pytest.raises(WireError, match=rf"asked to keep only the first {end} records.*from 10 to 20"):
            queue.split(1, lease.id, end)
    assert queue.split(1, lease.id, 20).reason == "there is nothing to split off"
    assert not queue.split(2, lease.id, 15).accepted
    assert not queue.split(1, 99, 15).accepted
    assert (queue.accounting.tasks_split, queue.accounting.reports_refused) == (0, 2)
