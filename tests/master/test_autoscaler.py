"""The autoscaler on synthetic jobs, whose throughput is a curve over the number of workers."""

from __future__ import annotations

import random
import re
from collections.abc import Callable

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from elasticcb.master.autoscaler import Autoscaler, Scaling, Sight


class Job:
    """A job whose workers come at once; `noise` is the spread of its throughput over half a second."""

    def __init__(
        self, curve: Callable[[int], float], least: int, most: int, workers: int, noise: float = 0.0, seed: int = 0
    ) -> None:
        self.curve, self.noise = curve, noise
        self.scaler = Autoscaler(least, most, workers)
        self.generator = random.Random(seed)
        self.now, self.records = 0.0, 0.0
        self.busy: Callable[[float], bool] = lambda now: True
        self.left = 1e12
        self.decisions: list[Scaling] = []

    def run(self, seconds: float) -> list[Scaling]:
        """What was decided within so many seconds."""
        before = len(self.decisions)
        for _ in range(int(seconds * 2)):
            self.now += 0.5
            if self.busy(self.now):
                speed = self.curve(self.scaler.workers) * self.generator.gauss(1.0, self.noise)
                self.records += 0.5 * max(0.0, speed)
            sight = Sight(int(self.records), int(self.left - self.records), self.busy(self.now))
            decision = self.scaler.observe(self.now, sight)
            if decision is not None:
                assert decision.workers == self.scaler.workers
                self.decisions.append(decision)
        return self.decisions[before:]

    def numbers(self, seconds: float) -> list[int]:
        return [decision.workers for decision in self.run(seconds)]


def linear(workers: int) -> float:
    return 1000.0 * workers


def saturating_at(knee: int) -> Callable[[int], float]:
    return lambda workers: 1000.0 * min(workers, knee)


def falling(workers: int) -> float:
    return 1000.0 / workers


@pytest.mark.parametrize(
    ("curve", "begin", "expected"),
    [
        (linear, 3, [6, 8, 8]),
        (saturating_at(5), 1, [2, 4, 8, 6, 5, 5]),
        (saturating_at(3), 8, [4, 2, 3, 3]),
        (falling, 4, [8, 2, 1, 1]),
    ],
)
def test_search_over_a_curve_ends_at_its_knee(curve, begin, expected):
    assert Job(curve, 1, 8, begin).numbers(600) == expected


def test_each_decision_says_why():
    reasons = [decision.reason for decision in Job(saturating_at(2), 1, 8, 1).run(600)]
    words = ["1 -> 2 .*1,000", "2 -> 4 .*2,000 .*2.00 times", "4 -> 2 .*1.00 times .*not enough"]
    assert all(re.match(*each) for each in zip(words, reasons, strict=True))
    assert re.match("stays with 2 .*2,000", Job(linear, 2, 2, 2).run(60)[0].reason)


def test_nothing_is_measured_while_the_job_does_something_else():
    job = Job(linear, 1, 8, 1)
    job.busy = lambda now: False
    assert job.run(600) == []
    job.busy = lambda now: now % 60 > 40  # evaluation takes two thirds of the time
    assert job.numbers(600)[-1] == 8


def test_no_worker_is_added_when_the_job_is_almost_done():
    job = Job(linear, 1, 8, 1)
    job.left = 35_000
    assert job.run(300) == []


def test_it_looks_again_when_the_load_is_another_and_after_a_long_time():
    job = Job(saturating_at(2), 1, 8, 1)
    assert job.numbers(300)[-1] == 2
    assert job.run(500) == []
    job.curve = lambda workers: 500.0 * workers
    again = job.run(300)
    assert "throughput changed from 2,000 to 1,112" in again[0].reason
    assert again[-1].workers == 8
    job.curve = lambda workers: 1500.0  # all the same to it
    assert job.numbers(300)[-1] == 1
    assert job.run(500) == []
    assert "periodic check" in job.run(500)[0].reason
    assert job.scaler.workers == 1
    assert job.run(1200) == []  # twice as long after a search that changed nothing


@settings(max_examples=150)
@given(
    least=st.integers(1, 6),
    more=st.integers(0, 30),
    at=st.floats(0, 1),
    knee=st.integers(1, 40),
    tail=st.sampled_from([1.0, 0.97, 1.01]),
    noise=st.sampled_from([0.0, 0.05, 0.2]),
    seed=st.integers(0, 1000),
)
def test_it_stays_within_its_bounds_and_comes_to_rest(least, more, at, knee, tail, noise, seed):
    most = least + more
    begin = least + round(at * more)

    def curve(workers: int) -> float:
        return 1000.0 * min(workers, knee) * tail ** max(0, workers - knee)

    job = Job(curve, least, most, begin, noise, seed)
    found = job.numbers(800)
    assert all(least <= number <= most for number in found)
    assert found, "nothing was decided"
    assert job.decisions[-1].workers == job.scaler.workers
    assert len(found) <= 16
    assert job.run(80) == []  # it is at rest
    if noise == 0.0:
        best = max(least, min(knee, most))
        assert curve(job.scaler.workers) >= 0.75 * curve(best)
        assert tail > 1.0 or job.scaler.workers <= max(least, 1.5 * best)  # else it still grows beyond the knee
