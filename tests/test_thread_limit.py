"""TensorFlow computes with as many threads as a process may use cores."""

from __future__ import annotations

import os

import pytest

from elasticcb.roles.processes import _limit_threads
from elasticcb.settings import ClusterKind, ClusterSettings, Command, JobSettings

VARIABLE = "TF_NUM_INTRAOP_THREADS"


def limit_on(cores, role, kind, workers=1):
    """What the limit becomes on some of the cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        cluster = ClusterSettings(kind=kind, num_workers=workers, num_ps=1)
        _limit_threads(role, JobSettings(command=Command.TRAIN, name="job", directory="/", cluster=cluster))
    finally:
        os.sched_setaffinity(0, before)
    return int(os.environ[VARIABLE])


@pytest.fixture(autouse=True)
def unset(monkeypatch):
    monkeypatch.setenv(VARIABLE, "0")  # so that it is as before afterwards
    del os.environ[VARIABLE]


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs CPU affinity")
@pytest.mark.parametrize("kind", ClusterKind)
@pytest.mark.parametrize("role", ["worker", "ps"])
def test_threads_follow_the_affinity_of_the_process(kind, role):
    from loky import cpu_count

    cores = os.sched_getaffinity(0)
    if cpu_count() < 2:
        pytest.skip("needs two cores")
    assert limit_on({min(cores)}, role, kind) == 1
    del os.environ[VARIABLE]
    shared = 2 if (kind, role) == (ClusterKind.LOCAL, "ps") else 1
    assert limit_on(cores, role, kind) == cpu_count() // shared


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs CPU affinity")
def test_limit_of_the_user_goes_before():
    os.environ[VARIABLE] = "7"
    assert limit_on({min(os.sched_getaffinity(0))}, "worker", ClusterKind.EXTERNAL) == 7
