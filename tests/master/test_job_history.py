"""What the master keeps of a job's past, by a clock of the test's."""

import itertools
import json
import math

import pytest

from elasticcb.clients import history as history_module
from elasticcb.clients.history import Event, History, Point
from elasticcb.master.job_history import JobHistory
from elasticcb.master.shards import Shard
from elasticcb.master.snapshot import JobSnapshot, ProcessCounts
from elasticcb.master.task import Lease, Task, TaskType

NO_PUSHES = (0, 0.0)


class Clock:
    """Gives the time that a test has set."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def past(clock):
    return JobHistory(clock)


def point(time: float) -> Point:
    return Point(time, 0, None, 0, 0.0, 0, 0, None)


def lease(number: int, task: int = 0, records: int = 10) -> Lease:
    return Lease(number, Task(task or number, TaskType.TRAINING, Shard("a", 0, records)), worker=7)


def runs(past: JobHistory) -> list:
    return [values for _, values in past.after(0)["tasks"]]


def test_when_there_are_too_many_points_every_other_one_goes_and_half_as_many_come(monkeypatch):
    monkeypatch.setattr(history_module, "_MOST_POINTS", 8)
    history = History()
    for second in range(100):
        history.add(point(second))
    times = [values[0] for _, values in history.after(0)["points"]]
    assert times[0] == 0
    assert len(times) <= 8
    assert history.interval == 16
    assert {later - earlier for earlier, later in itertools.pairwise(times)} == {16}


def test_points_come_no_more_often_than_the_interval_but_after_a_clock_that_was_set_back():
    history = History()
    for time in (10.0, 10.5, 11.0, 3.0):
        history.add(point(time))
    assert [values[0] for _, values in history.after(0)["points"]] == [10.0, 11.0, 3.0]


def test_a_history_is_filled_from_another_ones_news_and_keeps_the_newest_events():
    mine, theirs = History(), History()
    for number in range(1_500):
        mine.add(Event(float(number), "note", str(number)))
        if number == 700:
            news = json.loads(json.dumps(mine.after(0)))
            theirs.extend(news)
    theirs.extend(mine.after(0), after=news["number"])
    assert [values[2] for _, values in theirs.after(0)["events"]] == [str(number) for number in range(500, 1_500)]
    assert mine.after(mine.number)["events"] == []


def test_a_task_runs_from_the_end_of_the_one_before_on_the_same_worker(past, clock):
    past.began(lease(1), 0)
    clock.now += 1
    past.began(lease(2), 0)  # fetched ahead
    past.began(lease(3), 1)
    clock.now += 4
    past.ended(1, "done")
    assert [values[:3] for values in past.after(0)["running"]] == [[0, 1005.0, None], [1, 1001.0, None]]
    clock.now += 2
    past.ended(2, "done", Task(2, TaskType.TRAINING, Shard("a", 0, 6)))  # the rest was split off
    assert [(run[1], run[2], run[4], run[6]) for run in runs(past)] == [
        (1000.0, 1005.0, "done", 10),
        (1005.0, 1007.0, "done", 6),
    ]


def test_a_task_whose_worker_is_gone_goes_back_and_is_done_again(past, clock):
    past.began(lease(1, task=5), 0)
    past.began(lease(2, task=6), 1)
    clock.now += 1
    past.left(0)
    past.note(JobSnapshot(), [2], NO_PUSHES)
    past.began(lease(3, task=5), 1)
    past.ended(2, "failed")
    past.ended(3, "done")
    past.ended(99, "done")  # of another master's time
    past.began(lease(4, task=5), 0)
    past.note(JobSnapshot(), [], NO_PUSHES)  # it has hung
    assert [(run[5], run[4], run[7]) for run in runs(past)] == [
        (5, "back", False),
        (6, "failed", False),
        (5, "done", True),
        (5, "back", False),
    ]


def test_points_are_json_whatever_the_loss_and_have_the_pushes_since_the_one_before(past, clock):
    up = ProcessCounts(planned=2, up=2)
    past.note(JobSnapshot(loss=math.nan, workers=up, metrics={"auc": math.inf}), [], (10, 5.0))
    clock.now += 1
    past.note(JobSnapshot(loss=0.5, workers=up, metrics={"auc": math.inf}), [], (30, 6.0))
    clock.now += 1
    past.note(JobSnapshot(loss=0.5, workers=up, metrics={"auc": 0.7}), [], (30, 6.0))
    found = json.loads(json.dumps(past.after(0), allow_nan=False))
    assert [(values[2], values[5], values[7]) for _, values in found["points"]] == [
        (None, 2, 0.5),
        (0.5, 2, pytest.approx(0.05)),
        (0.5, 2, None),
    ]
    assert [values[2] for _, values in found["evaluations"]] == [{"auc": None}, {"auc": 0.7}]


def test_the_past_that_another_release_has_kept_is_left_out(clock):
    assert JobHistory(clock, {"points": [[1, ["of", "another", "release"]]]}).after(0)["points"] == []


def test_an_evaluation_is_in_the_history_before_the_next_look():
    history = JobHistory(lambda: 5.0)
    history.evaluated(7, {"auc": 0.5, "bad": float("nan")})
    history.note(JobSnapshot(version=9, metrics={"auc": 0.5, "bad": float("nan")}), [], (0, 0.0))
    assert [entry for _, entry in history.after(0)["evaluations"]] == [[5.0, 7, {"auc": 0.5, "bad": None}]]
