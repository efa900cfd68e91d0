"""TensorFlow computes with as many threads as a process may use cores."""

from __future__ import annotations

import os

import pytest

from elasticcb.process.devices import limit_threads, usable_cores

VARIABLE = "TF_NUM_INTRAOP_THREADS"


def limit_on(cores, sharing):
    """What the limit becomes on some of the cores."""
    environment = {}
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        limit_threads(environment, sharing)
    finally:
        os.sched_setaffinity(0, before)
    return int(environment[VARIABLE])


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs CPU affinity")
@pytest.mark.parametrize("sharing", [1, 2])
def test_threads_follow_the_affinity_of_the_process(sharing):
    cores = os.sched_getaffinity(0)
    if usable_cores() < 2:
        pytest.skip("needs two cores")
    assert limit_on({min(cores)}, sharing) == 1
    assert limit_on(cores, sharing) == usable_cores() // sharing


def test_limit_of_the_user_goes_before():
    environment = {VARIABLE: "7"}
    limit_threads(environment)
    assert environment[VARIABLE] == "7"
