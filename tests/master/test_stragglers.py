"""Who is a straggler, and what it should give to others."""

from __future__ import annotations

import re

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


def train(paces: Paces, reports: int, **seconds: float) -> list[str]:
    """The verdicts on so many reports of each worker, of a batch each."""
    verdicts = []
    for _ in range(reports):
        for name, each in seconds.items():
            verdict = paces.note(int(name[1:]), 1, each)
            if verdict:
                verdicts.append(f"{name} {verdict}")
    return verdicts


def test_worker_that_takes_more_than_twice_the_median_of_the_others_is_a_straggler_once() -> None:
    paces = Paces()
    told = train(paces, 60, w1=0.5, w2=2.1, w3=0.52, w4=1.0)
    assert len(told) == 1
    assert re.match("w2 is a straggler.* 2.1 s .* 0.52 s", told[0])
    assert paces.stragglers == {2}


def test_nobody_is_a_straggler_before_there_is_evidence() -> None:
    paces = Paces()
    # The first batches compile: they count for nothing, however long they take.
    assert not train(paces, 5, w1=0.1, w2=90.0, w3=0.1)
    assert paces.usual is None
    assert not train(paces, 60, w1=0.1, w2=0.15, w3=0.1)
    # Slow for a moment, for many short batches, and for few long ones.
    assert not train(paces, 20, w1=0.1, w2=1.0, w3=0.1)
    assert not train(paces, 20, w1=0.1, w2=0.15, w3=0.1)
    paces = Paces()
    assert not train(paces, 100, w1=0.01, w2=0.2, w3=0.01)
    assert not train(Paces(), 15, w1=0.1, w2=30.0, w3=0.1)
    assert len(train(Paces(), 20, w1=0.1, w2=30.0, w3=0.1)) == 1


def test_of_two_workers_none_is_a_straggler() -> None:
    paces = Paces()
    assert not train(paces, 100, w1=0.1, w2=9.0)
    # Nor when a third has just come.
    assert not train(paces, 9, w1=0.1, w2=9.0, w3=0.1)
    assert len(train(paces, 20, w1=0.1, w2=9.0, w3=0.1)) == 1


def test_a_straggler_that_recovers_is_none_after_a_while() -> None:
    paces = Paces()
    train(paces, 60, w1=1.0, w2=5.0, w3=1.0)
    assert paces.stragglers == {2}
    assert not train(paces, 20, w1=1.0, w2=1.7, w3=1.0)
    assert not train(paces, 20, w1=1.0, w2=1.2, w3=1.0)
    told = train(paces, 20, w1=1.0, w2=1.2, w3=1.0)
    assert [verdict.partition(":")[0] for verdict in told] == ["w2 is no longer a straggler"]


def test_worker_without_enough_reports_has_no_pace() -> None:
    paces = Paces()
    assert not train(paces, 20, w1=100.0)
    assert not train(paces, 9, w2=500.0)
    assert paces.of(2) is None
    assert paces.usual == 100.0
    assert paces.knows(2)
    assert not paces.knows(3)


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
    assert re.match("12 batches.* 9.6 s", split.reason)


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
