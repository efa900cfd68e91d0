"""With `--updates=sync`, workers get tasks in turn, so that a round is of all of them."""

from __future__ import annotations

from task_queues import drain, make_queue, take

from elasticcb.master.gathering import START_SECONDS, Gathering

UP = (1, 2, 3)


def test_the_first_workers_of_a_job_wait_for_the_others_to_start_but_not_for_ever():
    gathering, queue = Gathering(), make_queue()
    assert gathering.asks(1, queue, UP, 3, 0.0)
    assert gathering.asks(2, queue, UP, 3, 5.0)
    assert not gathering.asks(2, queue, UP, 3, START_SECONDS)
    assert not Gathering().asks(1, queue, (1,), 1, 0.0)


def test_workers_get_tasks_in_turn():
    gathering, queue = Gathering(), make_queue(training=[("a", 200)])

    def asks(worker, up=UP):
        return gathering.asks(worker, queue, up, 3, START_SECONDS)

    def gets(worker):
        lease = take(queue, worker)
        gathering.gets(worker, queue)
        return lease

    for worker in UP:
        assert gathering.asks(worker, queue, UP, 3, 0.0) is (worker < 3)
    assert gathering.peers(queue, UP) == [1, 2, 3]
    first = gets(1)
    assert asks(1)  # the others have none
    assert not asks(2)
    gets(2)
    gets(3)
    assert not asks(1)
    gets(1)
    queue.report_done(1, first.id)
    assert asks(1)  # it holds as many as the others, and has had more
    assert not asks(1, up=(1,))  # these are lost
    gathering.has_none(2, queue)
    gathering.has_none(3, queue)
    assert not asks(1)
    assert gathering.peers(queue, UP) == [1]


def test_a_worker_that_comes_later_does_not_catch_up_and_a_new_epoch_is_for_all():
    gathering, queue = Gathering(), make_queue(training=[("a", 200)], num_epochs=2)
    gathering.asks(1, queue, UP, 1, 0.0)
    for _ in range(3):
        take(queue, 1)
        gathering.gets(1, queue)
    assert not gathering.asks(2, queue, UP, 1, 0.0)
    take(queue, 2)
    gathering.gets(2, queue)
    assert not gathering.asks(1, queue, UP, 1, 0.0)
    gathering.has_none(2, queue)
    queue.worker_lost(1)
    drain(queue, 3)
    assert gathering.peers(queue, UP) == [1, 2]  # it has asked for none in this epoch


def test_workers_that_evaluate_make_no_round_with_the_others():
    gathering, queue = Gathering(), make_queue()
    for worker in UP:
        gathering.asks(worker, queue, UP, 3, 0.0)
    queue.add_evaluation(1, [("v", 10)])
    take(queue, 1)
    assert gathering.peers(queue, UP) == [2, 3]
