from __future__ import annotations

import json

import pytest

from elasticcb.errors import CheckpointError, JobFailedError, UsageError, WireError
from elasticcb.master.accounting import Accounting
from elasticcb.master.answers import DecisionKind, Milestone, MilestoneKind
from elasticcb.master.shards import Shard
from elasticcb.master.task import Lease, Task, TaskEvent, TaskState, TaskType
from elasticcb.master.task_queue import TaskQueue
from elasticcb.master.task_record import IllegalTransitionError, TaskRecord

EPOCH_DONE, TRAINING_DONE = MilestoneKind.EPOCH_DONE, MilestoneKind.TRAINING_DONE


def make_queue(**changes) -> TaskQueue:
    settings = {"training": [("a", 40)], "records_per_task": 20, "minibatch_size": 10, "lease_seconds": 60.0}
    return TaskQueue(**{**settings, **changes})


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


# ---------------------------------------------------------------- cutting and order


def test_every_record_is_handed_out_once_per_epoch():
    queue = make_queue(training=[("a", 45), ("empty", 0), ("b", 7)], num_epochs=3)
    tasks = drain(queue)
    for epoch in range(3):
        records = records_of(t for t in tasks if t.epoch == epoch)
        assert sorted(records) == [("a", r) for r in range(45)] + [("b", r) for r in range(7)]
    assert queue.accounting.records_trained == {0: 52, 1: 52, 2: 52}


def test_tasks_never_span_two_sources():
    tasks = drain(make_queue(training=[("a", 45), ("b", 7)]))
    assert sorted((t.shard.name, t.shard.start, t.shard.end) for t in tasks) == [
        ("a", 0, 20),
        ("a", 20, 40),
        ("a", 40, 45),
        ("b", 0, 7),
    ]


def test_order_of_shards_depends_on_seed_and_epoch_and_on_nothing_else():
    def order(seed: int) -> list[list[int]]:
        tasks = drain(make_queue(training=[("a", 2000)], num_epochs=2, shuffle_seed=seed))
        return [[t.shard.start for t in tasks if t.epoch == epoch] for epoch in range(2)]

    first, second = order(7)
    assert [first, second] == order(7)
    assert first != second
    assert first != sorted(first)
    assert order(8)[0] != first


def test_task_ids_and_lease_ids_are_unique():
    queue = make_queue(num_epochs=5)
    leases = []
    while (decision := queue.get_task(1, 0.0)).lease is not None:
        leases.append(decision.lease)
    assert len({lease.id for lease in leases}) == len({lease.task.id for lease in leases}) == 10


def test_prediction_tasks_come_in_order():
    queue = make_queue(training=(), prediction=[("p", 50), ("q", 30)])
    assert [str(t.shard) for t in drain(queue)] == ["p [0, 20)", "p [20, 40)", "p [40, 50)", "q [0, 20)", "q [20, 30)"]
    assert reached(queue) == [(MilestoneKind.PREDICTION_DONE, 0)]


@pytest.mark.parametrize(
    "wrong",
    [
        {"records_per_task": 0},
        {"minibatch_size": 0},
        {"num_epochs": 0},
        {"max_batches": -1},
        {"lease_seconds": 0},
        {"max_retries": -1},
        {"training": [("a", -1)]},
    ],
)
def test_numbers_out_of_range_are_refused(wrong):
    with pytest.raises(UsageError):
        make_queue(**wrong)


# ---------------------------------------------------------------- max_batches


@pytest.mark.parametrize("max_batches", [1, 2, 3, 4, 5, 7, 8, 9])
def test_max_batches_is_exact(max_batches):
    queue = make_queue(training=[("a", 45), ("b", 7)], num_epochs=2, max_batches=max_batches)
    tasks = drain(queue)
    assert sum(-(-t.shard.records // 10) for t in tasks) == max_batches
    assert queue.training_done
    assert reached(queue)[-1] == (TRAINING_DONE, 0)


def test_max_batches_beyond_the_epochs_changes_nothing():
    assert len(drain(make_queue(num_epochs=2, max_batches=1000))) == 4


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


def test_epochs_overlap_but_are_done_in_their_order():
    queue = make_queue(num_epochs=2)
    first, second, third, fourth = (take(queue, worker) for worker in (1, 2, 3, 4))
    assert [lease.task.epoch for lease in (first, second, third, fourth)] == [0, 0, 1, 1]
    queue.report_done(1, first.id)
    queue.report_done(3, third.id)
    queue.report_done(4, fourth.id)
    assert reached(queue) == []
    queue.report_done(2, second.id)
    assert reached(queue) == [(EPOCH_DONE, 0), (EPOCH_DONE, 1), (TRAINING_DONE, 0)]


def test_epoch_is_done_while_the_next_one_runs():
    queue = make_queue(num_epochs=2)
    first, second, third = (take(queue) for _ in range(3))
    queue.report_done(1, first.id)
    queue.report_done(1, second.id)
    assert reached(queue) == [(EPOCH_DONE, 0)]
    assert queue.report_done(1, third.id).accepted


def test_held_epoch_begins_only_after_release():
    queue = make_queue(num_epochs=2, hold_epochs=True)
    assert len(drain(queue)) == 2
    assert reached(queue) == [(EPOCH_DONE, 0)]
    decision = queue.get_task(1, 0.0)
    assert decision.kind is DecisionKind.WAIT
    assert "epoch 0 is not released" in decision.reason
    queue.release_epoch(0)
    assert [t.epoch for t in drain(queue)] == [1, 1]
    assert reached(queue) == [(EPOCH_DONE, 1), (TRAINING_DONE, 0)]


def test_finished_is_not_answered_while_an_epoch_is_held():
    queue = make_queue(num_epochs=2, hold_epochs=True)
    queue.finish()
    drain(queue)
    assert queue.get_task(1, 0.0).kind is DecisionKind.WAIT


def test_training_sources_without_records_are_done_at_once():
    queue = make_queue(training=[("a", 0)])
    assert reached(queue) == [(TRAINING_DONE, 0)]


# ---------------------------------------------------------------- reports


def test_duplicate_report_of_a_done_lease_is_accepted_without_effect():
    queue = make_queue()
    lease = take(queue)
    assert not queue.report_done(1, lease.id).duplicate
    before = queue.accounting, queue.counts()
    again = queue.report_done(1, lease.id)
    assert again.accepted
    assert again.duplicate
    assert again.task == lease.task
    assert (queue.accounting, queue.counts()) == before


def test_duplicate_report_of_a_failed_lease_uses_up_no_second_retry():
    queue = make_queue(max_retries=1)
    lease = take(queue)
    assert queue.report_failed(1, lease.id, "boom", "").accepted
    assert queue.report_failed(1, lease.id, "boom", "").duplicate
    assert queue.failure is None
    assert queue.accounting.tasks_retried == 1


def test_late_report_of_a_lost_worker_is_refused_and_counted():
    queue = make_queue()
    lease = take(queue)
    queue.worker_lost(1)
    outcome = queue.report_done(1, lease.id)
    assert not outcome.accepted
    assert "lost" in outcome.reason
    assert not queue.report_progress(1, lease.id, 10, 1.0).accepted
    assert not queue.report_failed(1, lease.id, "boom", "").accepted
    assert queue.accounting.reports_refused == 3
    assert queue.accounting.records_trained == {}


def test_done_report_after_a_failed_report_of_the_same_lease_is_refused():
    queue = make_queue()
    lease = take(queue)
    queue.report_failed(1, lease.id, "boom", "")
    assert not queue.report_done(1, lease.id).accepted


def test_report_on_the_lease_of_another_worker_is_refused():
    queue = make_queue()
    lease = take(queue, worker=1)
    outcome = queue.report_done(2, lease.id)
    assert not outcome.accepted
    assert "belongs to worker 1" in outcome.reason
    assert queue.report_done(1, lease.id).accepted


def test_records_reported_while_a_task_runs_are_not_counted_again_when_it_is_done():
    queue = make_queue(training=[("a", 20)])
    lease = take(queue)
    queue.report_progress(1, lease.id, 10, 0.0)
    assert queue.accounting.records_trained == {0: 10}
    queue.report_done(1, lease.id)
    assert queue.accounting.records_trained == {0: 20}


def test_progress_beyond_the_shard_is_an_error_in_words():
    queue = make_queue()
    lease = take(queue)
    with pytest.raises(WireError, match="21 records"):
        queue.report_progress(1, lease.id, 21, 0.0)


# ---------------------------------------------------------------- taking over


def test_task_of_a_dead_worker_is_handed_out_again():
    queue = make_queue()
    lease = take(queue)
    assert queue.worker_lost(1) == [lease.task]
    again = take(queue, worker=2)
    assert again.task == lease.task
    assert again.id != lease.id


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
    assert accounting.records_handed_out_again == 10 + 5
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
    assert queue.accounting.records_handed_out_again == 0
    assert queue.accounting.tasks_taken_over == 8


def test_records_of_a_worker_that_can_not_tell_which_are_done_may_be_trained_twice():
    queue = make_queue(training=[("a", 20)])
    lease = take(queue)
    queue.report_progress(1, lease.id, 0, 0.0, True)
    queue.worker_left(1)
    take(queue, worker=2)
    assert queue.accounting.records_handed_out_again == 20


def test_late_progress_report_does_not_take_records_back():
    queue = make_queue(training=[("a", 20)])
    lease = take(queue)
    queue.report_progress(1, lease.id, 15, 0.0)
    assert queue.report_progress(1, lease.id, 10, 0.0).accepted
    assert queue.worker_lost(1)[0].shard == Shard("a", 15, 20)
    assert queue.accounting.records_trained == {0: 15}


@pytest.mark.parametrize("kind", ["training", "prediction"])
def test_task_whose_records_were_all_reported_is_done_when_its_worker_is_lost(kind):
    queue = make_queue(**{"training": (), kind: [("a", 20)]})
    lease = take(queue)
    queue.report_progress(1, lease.id, 20, 0.0)
    assert reached(queue) == []
    queue.worker_lost(1)
    expected = {
        "training": [(EPOCH_DONE, 0), (TRAINING_DONE, 0)],
        "prediction": [(MilestoneKind.PREDICTION_DONE, 0)],
    }
    assert reached(queue) == expected[kind]
    assert queue.counts()[TaskType(kind.upper())][TaskState.DONE] == 1
    queue.finish()
    assert queue.get_task(2, 0.0).kind is DecisionKind.FINISHED


def test_prediction_task_taken_over_starts_behind_the_reported_records():
    queue = make_queue(training=(), prediction=[("p", 20)])
    queue.report_progress(1, take(queue).id, 10, 0.0)
    queue.worker_lost(1)
    assert take(queue, worker=2).task.shard == Shard("p", 10, 20)


def test_evaluation_task_taken_over_starts_at_its_beginning():
    queue = make_queue()
    queue.add_evaluation(1, [("v", 20)])
    lease = take(queue)
    assert queue.report_progress(1, lease.id, 20, 0.0).accepted
    queue.worker_lost(1)
    assert take(queue, worker=2).task == lease.task
    assert queue.accounting.records_handed_out_again == 0


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


def test_lease_whose_answer_got_lost_is_put_back():
    queue = make_queue()
    lease = take(queue, held=[])
    again = take(queue, held=[])
    assert again.task == lease.task
    assert again.id != lease.id
    assert queue.accounting.answers_lost == 1
    assert queue.accounting.records_handed_out_again == 0


def test_lease_that_the_worker_names_stays_with_it():
    queue = make_queue()
    first = take(queue, held=[])
    second = take(queue, held=[first.id])
    assert first.task != second.task
    assert len(queue.leases(1)) == 2


def test_lease_that_the_worker_spoke_of_is_not_put_back():
    queue = make_queue()
    first = take(queue, held=[])
    queue.report_progress(1, first.id, 0, 0.0)
    assert take(queue, held=[]).task != first.task
    assert queue.report_done(1, first.id).accepted


def test_lost_answers_are_no_attempts():
    queue = make_queue(training=[("a", 20)], max_losses=0, max_retries=0)
    for _ in range(5):
        lease = take(queue, held=[])
    assert queue.report_done(1, lease.id).accepted
    assert queue.failure is None


# ---------------------------------------------------------------- leases and time


def test_lease_without_progress_is_over_after_its_time():
    queue = make_queue()
    lease = take(queue, now=100.0)
    assert lease.deadline == queue.next_deadline == 160.0
    assert queue.expire(159.9) == []
    assert queue.expire(160.0) == [lease]
    assert take(queue, worker=2, now=160.0).task == lease.task
    assert queue.next_deadline == 220.0


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


def test_all_workers_that_hang_lose_their_leases():
    queue = make_queue()
    leases = [take(queue, 1), take(queue, 2)]
    assert queue.expire(60.0) == leases


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


def test_hung_worker_that_wakes_up_is_refused_and_may_take_tasks_again():
    queue = make_queue()
    lease = take(queue)
    queue.expire(60.0)
    assert not queue.report_progress(1, lease.id, 10, 61.0).accepted
    again = take(queue, now=61.0)
    assert again.task == lease.task
    assert not queue.report_done(1, lease.id).accepted
    assert queue.report_done(1, again.id).accepted


def test_task_without_records_is_kept_alive_by_any_report():
    queue = make_queue(training=())
    queue.add_train_end()
    lease = take(queue)
    queue.report_progress(1, lease.id, 0, 50.0)
    assert queue.expire(100.0) == []


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


def test_after_a_failure_nothing_is_handed_out():
    queue = make_queue(max_retries=0)
    other = take(queue, worker=2)
    queue.report_failed(1, take(queue).id, "boom", "")
    decision = queue.get_task(2, 0.0)
    assert decision.kind is DecisionKind.FINISHED
    assert "failed" in decision.reason
    assert queue.report_done(2, other.id).accepted


def test_fatal_failure_is_not_tried_again():
    queue = make_queue()
    queue.report_failed(1, take(queue).id, "bad model file", "", fatal=True)
    assert queue.failure is not None
    assert queue.failure.event is TaskEvent.REPORTED_FATAL


def test_fatal_failure_behind_the_last_record_still_ends_the_job():
    queue = make_queue()
    lease = take(queue)
    queue.report_progress(1, lease.id, 20, 0.0)
    queue.report_failed(1, lease.id, "bad", "", fatal=True)
    assert queue.failure is not None


def test_failure_behind_the_last_record_leaves_nothing_to_do():
    queue = make_queue(training=[("a", 20)])
    lease = take(queue)
    queue.report_progress(1, lease.id, 20, 0.0)
    assert queue.report_failed(1, lease.id, "late", "").accepted
    assert queue.training_done
    assert queue.accounting.tasks_retried == 0


def test_failed_task_goes_on_behind_the_reported_records():
    queue = make_queue(training=[("a", 20)])
    lease = take(queue)
    queue.report_progress(1, lease.id, 10, 0.0)
    queue.report_failed(1, lease.id, "boom", "")
    assert take(queue).task.shard == Shard("a", 10, 20)


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


# ---------------------------------------------------------------- stopping


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


def test_stopping_twice_or_after_the_end_changes_nothing():
    queue = make_queue()
    drain(queue)
    queue.take_milestones()
    queue.stop_training("late")
    assert queue.stop_reason is None
    assert reached(queue) == []


def test_stopping_leaves_evaluation_tasks_alone():
    queue = make_queue()
    queue.add_evaluation(1, [("v", 40)])
    queue.stop_training("early")
    assert [t.type for t in drain(queue)] == [TaskType.EVALUATION] * 2


# ---------------------------------------------------------------- evaluation, TRAIN_END, the end


def test_evaluation_tasks_come_before_training_tasks():
    queue = make_queue()
    take(queue)
    assert queue.add_evaluation(3, [("v", 25), ("w", 5)]) == 3
    kinds = [t.type for t in drain(queue)]
    assert kinds == [TaskType.EVALUATION] * 3 + [TaskType.TRAINING]


def test_round_is_done_when_all_its_tasks_are():
    queue = make_queue(training=())
    queue.add_evaluation(3, [("v", 25)])
    first, second = take(queue), take(queue)
    assert first.task.evaluation_round == second.task.evaluation_round == 3
    queue.report_done(1, second.id)
    assert reached(queue) == []
    queue.report_done(1, first.id)
    assert reached(queue) == [(MilestoneKind.ROUND_DONE, 3)]


def test_round_without_records_is_done_at_once():
    queue = make_queue()
    assert queue.add_evaluation(1, [("v", 0)]) == 0
    assert queue.take_milestones() == [Milestone(MilestoneKind.ROUND_DONE, 1)]


def test_running_round_can_not_be_added_again():
    queue = make_queue()
    queue.add_evaluation(1, [("v", 1)])
    with pytest.raises(UsageError):
        queue.add_evaluation(1, [("v", 1)])


def test_train_end_waits_for_everything_else():
    queue = make_queue(training=[("a", 20)])
    queue.add_train_end()
    queue.finish()
    training = take(queue)
    assert queue.get_task(2, 0.0).kind is DecisionKind.WAIT
    queue.add_evaluation(1, [("v", 20)])
    evaluation = take(queue, 2)
    queue.report_done(1, training.id)
    decision = queue.get_task(1, 0.0)
    assert decision.kind is DecisionKind.WAIT
    assert "TRAIN_END" in decision.reason
    queue.report_done(2, evaluation.id)
    assert take(queue).task.type is TaskType.TRAIN_END


def test_there_is_one_train_end_task_and_another_worker_runs_it_when_the_first_dies():
    queue = make_queue(training=())
    queue.add_train_end()
    queue.add_train_end()
    lease = take(queue, 1)
    queue.worker_lost(1)
    again = take(queue, 2)
    assert again.task == lease.task
    queue.report_done(2, again.id)
    assert reached(queue) == [(MilestoneKind.TRAIN_END_DONE, 0)]
    queue.finish()
    assert queue.get_task(2, 0.0).kind is DecisionKind.FINISHED


def test_wait_becomes_finished_only_when_nothing_runs_and_nothing_will_come():
    queue = make_queue(training=[("a", 20)])
    lease = take(queue)
    queue.finish()
    assert queue.get_task(2, 0.0).kind is DecisionKind.WAIT
    queue.report_done(1, lease.id)
    assert queue.get_task(2, 0.0).kind is DecisionKind.FINISHED


def test_idle_queue_that_was_not_finished_answers_wait():
    queue = make_queue()
    drain(queue)
    assert queue.get_task(1, 0.0).kind is DecisionKind.WAIT


# ---------------------------------------------------------------- counting and saving


def test_counts_know_the_tasks_that_are_still_to_be_made():
    queue = make_queue(training=[("a", 100)], num_epochs=3)
    take(queue)
    counts = queue.counts()[TaskType.TRAINING]
    assert (counts[TaskState.TODO], counts[TaskState.DOING]) == (14, 1)
    capped = make_queue(training=[("a", 100)], num_epochs=3, max_batches=6)
    assert capped.counts()[TaskType.TRAINING][TaskState.TODO] == 3


def test_accounting_is_a_copy():
    queue = make_queue()
    queue.accounting.records_trained[0] = 99
    assert queue.accounting == Accounting()


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
    assert restored.accounting.records_handed_out_again == running.task.shard.records - 10
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
    assert queue.accounting.records_handed_out_again == queue.accounting.reports_refused - 1 == 0
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


# ---------------------------------------------------------------- size and the table


def test_a_million_tasks_are_queued_without_being_made():
    queue = TaskQueue(training=[("a", 64_000_000)], records_per_task=64, minibatch_size=64, num_epochs=100)
    lease = take(queue)
    assert queue.counts()[TaskType.TRAINING][TaskState.TODO] == 99_999_999
    assert lease.task.id == 1


def test_transition_that_is_not_in_the_table_is_refused_with_the_story_of_the_task():
    record = TaskRecord(Task(7, TaskType.TRAINING, Shard("data.csv", 0, 20)))
    with pytest.raises(IllegalTransitionError, match=r"task 7 .*data\.csv.* is TODO"):
        record.move(TaskEvent.REPORTED_DONE)


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
