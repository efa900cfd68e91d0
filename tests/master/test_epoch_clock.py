"""How long epochs take, and the speed that the time left is estimated by."""

from __future__ import annotations

import itertools

import pytest

from elasticcb.master.job_driver import EpochClock
from elasticcb.master.speeds import Speed


def test_an_epoch_counts_from_the_end_of_the_one_before():
    clock = EpochClock(minibatch_size=10)
    clock.begin(0, 100.0, 0)
    clock.trained(0, 104.0, 205)  # of which some belong to the next epoch, and the last batch is a small one
    clock.trained(1, 107.0, 400)
    assert clock.take(0) == (4.0, 21)
    assert clock.take(1) == (3.0, 20)


def test_what_passes_before_an_epoch_begins_is_left_out():
    clock = EpochClock(minibatch_size=10)
    clock.begin(0, 0.0, 0)
    clock.trained(0, 5.0, 100)
    clock.begin(1, 65.0, 100)  # a minute of hooks
    clock.trained(1, 70.0, 200)
    assert clock.take(1) == (5.0, 10)


def smoothed(*rates):
    """The smoothed speed after each of 100 half seconds at each of `rates`, whose workers took 20 s to start."""
    speed, done, now, found = Speed(), 0.0, 20.0, []
    speed.note(0.0, 0)
    for rate in rates:
        for _ in range(100):
            speed.note(now, round(done))
            found.append(speed.smoothed)
            now, done = now + 0.5, done + rate / 2
    return found


def test_time_that_workers_take_to_start_does_not_count():
    found = smoothed(1000)
    assert found[:3] == [0.0, 0.0, 0.0]  # nothing to judge by
    assert found[10:] == pytest.approx([1000.0] * 90, rel=1e-3)


def test_smoothed_speed_follows_a_worker_that_joins_without_a_jump():
    found = smoothed(1000, 1000, 2000, 2000)
    steps = [after / before for before, after in itertools.pairwise(found[100:])]
    assert max(steps) < 1.03
    assert found[-1] > 1800
