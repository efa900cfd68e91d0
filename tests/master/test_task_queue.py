"""What the task queue hands out, in which order, until which end."""

from __future__ import annotations

import pytest
from task_queues import EPOCH_DONE, TRAINING_DONE, drain, make_queue, reached, records_of, take

from elasticcb.errors import UsageError
from elasticcb.master.accounting import Accounting
from elasticcb.master.decisions import DecisionKind, Milestone, MilestoneKind
from elasticcb.master.queue_settings import QueueSettings
from elasticcb.master.task import TaskState, TaskType
from elasticcb.master.task_queue import TaskQueue


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


def test_a_million_tasks_are_queued_without_being_made():
    queue = TaskQueue(
        QueueSettings(records_per_task=64, minibatch_size=64, num_epochs=100), training=[("a", 64_000_000)]
    )
    lease = take(queue)
    assert queue.counts()[TaskType.TRAINING][TaskState.TODO] == 99_999_999
    assert lease.task.id == 1


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
    assert "epoch 0 has not been released" in decision.reason
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


# ---------------------------------------------------------------- counting


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
