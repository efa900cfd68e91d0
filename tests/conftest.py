"""What all tests share: the environment, and data sets that are too big to stand in the repository."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

# Before anything imports Keras or TensorFlow; processes that tests start inherit it.
os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

# A shell makes what it starts in the background ignore SIGINT, and so would the jobs that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


_BEGUN = time.monotonic()
_LONG = 20  # times as long as others take tests that start jobs as processes, or have a time limit of their own


def pytest_collection_modifyitems(config, items):
    """Puts the longest files first when several run at once (Makefile), so that none runs alone at the end."""
    if not hasattr(config, "workerinput"):
        return
    lengths = Counter()
    for item in items:
        starts_jobs = {"start_job", "program"} & set(item.fixturenames)
        lengths[item.path] += _LONG if starts_jobs or item.get_closest_marker("timeout") else 1
    items.sort(key=lambda item: -lengths[item.path])


def pytest_runtest_setup(item):
    """Skips what is left when ELASTICCB_TEST_MINUTES are over, so that a slow machine has a result, too."""
    minutes = os.environ.get("ELASTICCB_TEST_MINUTES")
    if minutes and time.monotonic() - _BEGUN > 60 * float(minutes):
        pytest.skip(f"ELASTICCB_TEST_MINUTES={minutes} are over.")


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder with mnist/, census/, ml-100k/ and criteo/; the test is skipped where there is none.

    ELASTICCB_SHARED_DATA names it; else it is `shared/data` beside the repository.
    """
    beside = Path(__file__).resolve().parents[2] / "shared" / "data"
    folder = Path(os.environ.get("ELASTICCB_SHARED_DATA") or beside)
    if not folder.is_dir():
        pytest.skip(f"Real data sets are not at {folder}; ELASTICCB_SHARED_DATA can name their folder.")
    return folder
