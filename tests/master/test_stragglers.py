"""Who is a straggler, and what it should give to others."""

from __future__ import annotations

import pytest

from elasticcb.master.stragglers import Paces, plan_split
from elasticcb.master.task import BatchesLeft, TaskType


def paces_of(**seconds: float) -> Paces:
    """Workers w1, w2, … that take so many seconds per batch."""
    paces = Paces()
    for _ in range(11):
        for name, each in seconds.items():
            paces.note(int(name[1:]), 4, 4 * each)
    return paces


def left(records: int, reported: int, lease: int = 7, kind: TaskType = TaskType.TRAINING) -> BatchesLeft:
    return BatchesLeft(lease, kind, records, reported, batch=10)


def test_worker_that_takes_more_than_twice_the_median_of_the_others_is_a_straggler_once() -> None:
    paces, verdicts = Paces(), []
    for _ in range(20):
        for worker, seconds in ((1, 0.2), (2, 0.84), (3, 0.21), (4, 0.4)):
            verdicts.append(paces.note(worker, 2, 2 * seconds))
    told = [verdict for verdict in verdicts if verdict is not None]
    assert [(verdict.worker, verdict.slow) for verdict in told] == [(2, True)]
    assert told[0].reason == "is a straggler: 0.84 s per batch, the median of the others is 0.2 s"
    assert paces.stragglers == {2}


def test_few_slow_reports_make_no_straggler_and_a_straggler_that_recovers_is_none() -> None:
    paces = paces_of(w1=0.2, w2=0.2)
    assert [paces.note(2, 1, 9.0) for _ in range(5)] == [None] * 5
    verdict = paces.note(2, 1, 9.0)
    assert verdict is not None
    assert verdict.slow
    verdicts = [paces.note(2, 1, seconds) for seconds in [0.35] * 6 + [0.2] * 6]
    assert [verdict.slow for verdict in verdicts if verdict is not None] == [False]
    assert "no straggler any more" in next(verdict.reason for verdict in verdicts if verdict is not None)


def test_worker_alone_and_worker_without_enough_reports_are_no_stragglers() -> None:
    paces = Paces()
    assert all(paces.note(1, 1, 100.0) is None for _ in range(20))
    assert all(paces.note(2, 1, 500.0) is None for _ in range(4))
    assert paces.of(2) is None
    assert paces.usual == 100.0


@pytest.mark.parametrize(("batches", "seconds"), [(0, 1.0), (-3, 1.0), (1, -1.0), (1, float("nan")), (1, float("inf"))])
def test_report_that_can_not_be_is_passed_over(batches: int, seconds: float) -> None:
    paces = Paces()
    for _ in range(10):
        paces.note(1, batches, seconds)
    assert paces.of(1) is None


def test_worker_that_is_gone_is_compared_with_no_longer() -> None:
    paces = paces_of(w1=0.2, w2=0.9, w3=0.2)
    paces.forget(2)
    assert (paces.stragglers, paces.of(2)) == (set(), None)


# ------------------------------------------------------------ what is given


def test_straggler_keeps_what_it_does_until_the_other_has_done_the_rest() -> None:
    paces = paces_of(w1=0.2, w2=0.8)
    split = plan_split(2, {2: [left(200, 50)]}, {1}, paces)  # 15 batches: 12 s
    assert split is not None
    assert (split.lease, split.end) == (7, 50 + 30)  # 3 batches in 2.4 s, the other's 12 as well
    assert split.reason == "12 batches, for which it would need 9.6 s, go to another"


def test_task_that_is_not_begun_is_given_before_a_part_of_the_one_that_runs() -> None:
    paces = paces_of(w1=0.2, w2=0.8)
    split = plan_split(2, {2: [left(200, 50), left(200, 0, lease=8)]}, {1}, paces)
    assert split is not None
    assert (split.lease, split.end) == (8, 0)


@pytest.mark.parametrize(
    ("why", "worker", "tasks", "idle"),
    [
        ("nobody waits", 2, {2: [left(200, 50)]}, set()),
        ("it would save little", 2, {2: [left(70, 50)]}, {1}),
        ("it has reported nothing, as where records are shuffled", 2, {2: [left(200, 0)]}, {1}),
        ("another has more to do", 2, {2: [left(200, 50)], 3: [left(900, 10)]}, {1}),
        ("its pace is not known", 9, {9: [left(200, 50)]}, {1}),
        ("it is a round's task", 2, {2: [left(200, 50, kind=TaskType.EVALUATION)]}, {1}),
        ("it holds nothing", 2, {3: [left(200, 50)]}, {1}),
    ],
)
def test_nothing_is_given_where(why: str, worker: int, tasks: dict[int, list[BatchesLeft]], idle: set[int]) -> None:
    assert plan_split(worker, tasks, idle, paces_of(w1=0.2, w2=0.8, w3=0.7)) is None, why


def test_as_many_give_as_there_are_workers_that_wait() -> None:
    paces = paces_of(w1=0.2, w2=0.8, w3=0.8, w4=0.8)
    tasks = {2: [left(200, 50)], 3: [left(300, 50)], 4: [left(900, 50)]}
    assert [plan_split(worker, tasks, {1}, paces) is not None for worker in (2, 3, 4)] == [False, False, True]
    assert [plan_split(worker, tasks, {1, 5}, paces) is not None for worker in (2, 3, 4)] == [False, True, True]


def test_idle_worker_that_is_slow_itself_gets_little() -> None:
    paces = paces_of(w1=0.2, w2=0.8)
    split = plan_split(1, {1: [left(1000, 10)]}, {2}, paces)
    assert split is not None
    assert split.end == 10 + 790  # 79 batches in 15.8 s, the other's 20 in 16 s
