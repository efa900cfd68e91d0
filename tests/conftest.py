"""What all tests share: the environment, data sets that are too big for the repository, and which skips CI allows."""

from __future__ import annotations

import contextlib
import functools
import gc
import multiprocessing
import os
import re
import signal
import time
from collections import Counter
from pathlib import Path

import hypothesis
import pytest

# Before anything imports Keras or TensorFlow; processes that tests start inherit it.
os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

# No test fails for the time that it takes.
hypothesis.settings.register_profile("elasticcb", deadline=None)
hypothesis.settings.load_profile("elasticcb")

# A shell makes what it starts in the background ignore SIGINT, and so would the jobs that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

_SHARED = Path(__file__).resolve().parents[2] / "shared"
_TIME_IS_UP = "the time for deep tests is over"
# Times as long as others take tests that start jobs as processes, or have a time limit of their own; and other jobs.
_PROCESSES, _JOB = 20, 4
# Folders and files with few tests, of which each takes as long as one that starts a job as processes.
_LONG = {
    "model_zoo", "test_exported_tables.py", "test_master_fuzzing.py", "test_notebooks.py",
    "test_ps_fuzzing.py", "test_ps_memory.py", "test_ps_moving.py", "test_ps_push_in_flight.py", "test_recipes.py",
    "test_tables_in_jobs.py",
}  # fmt: skip

# Reasons for which a test may be skipped where CI is set; with any other reason it fails there.
SKIPS_IN_CI = {
    r"root may write anywhere": "CI runs as root",
    r"kubectl is not installed": "Debian's is too old to know these files",
    r"Slurm is not installed": "PyPI has none",
    r"only root may start slurmd": "CI may run as another user",
    r"no file system can be mounted here": "a container may not be allowed to",
    r"no control group can be made here": "a container may not be allowed to",
}
SKIPS_IN_CI[_TIME_IS_UP] = "deep tests run as far as 75 minutes in all allow"
if os.environ.get("ELASTICCB_TEST_KUBERNETES") != "required":
    SKIPS_IN_CI[r"ELASTICCB_TEST_KUBECONFIG names no cluster"] = ".ci/run runs them by themselves, with a cluster"
if not _SHARED.is_dir():
    SKIPS_IN_CI[r"Real data sets are not at "] = "they are not part of the repository"


def pytest_addoption(parser):
    parser.addoption("--begin-within", type=float, metavar="SECONDS", help="leave out tests that would begin later")


_BEGUN = time.monotonic()


def pytest_runtest_setup(item):
    seconds = item.config.getoption("begin_within")
    if seconds is not None and item.get_closest_marker("deep") and time.monotonic() - _BEGUN > seconds:
        pytest.skip(_TIME_IS_UP)


def pytest_collection_modifyitems(config, items):
    """Puts the longest files first when several run at once (Makefile), so that none runs alone at the end."""
    if not hasattr(config, "workerinput"):
        return
    lengths = Counter()
    for item in items:
        lengths[item.path] += _length(item)
    items.sort(key=lambda item: -lengths[item.path])


def pytest_collection_finish(session):
    """What was imported for the tests stays. Roles in this process collect garbage after each job, and leave it out."""
    gc.collect()
    gc.freeze()


def _length(item):
    limit = item.get_closest_marker("timeout")
    if limit is not None:
        return max(_PROCESSES, limit.args[0] // 6)
    if {"start_job", "program"} & set(item.fixturenames) or _LONG & set(item.path.parts):
        return _PROCESSES
    return _JOB if "integration" in item.path.parts else 1


def fail_unless_allowed(report):
    """In CI, a skip whose reason is not in `SKIPS_IN_CI` is a failure."""
    if not report.skipped or not os.environ.get("CI") or hasattr(report, "wasxfail"):
        return
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    if not any(re.search(allowed, reason) for allowed in SKIPS_IN_CI):
        report.outcome = "failed"
        report.longrepr = f"{reason}\nThis is no reason in CI: those are SKIPS_IN_CI of tests/conftest.py."


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    fail_unless_allowed(outcome.get_result())


@pytest.hookimpl(hookwrapper=True)
def pytest_make_collect_report(collector):
    outcome = yield
    fail_unless_allowed(outcome.get_result())


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder with mnist/, census/, ml-100k/ and criteo/; the test is skipped where there is none.

    ELASTICCB_SHARED_DATA names it; else it is `shared/data` beside the repository.
    """
    folder = Path(os.environ.get("ELASTICCB_SHARED_DATA") or _SHARED / "data")
    if not folder.is_dir():
        pytest.skip(f"Real data sets are not at {folder}; ELASTICCB_SHARED_DATA can name their folder.")
    return folder


@pytest.fixture
def serve_and_connect():
    """Starts a server whose one method is the given function, and connects to it; gives both."""
    from echo_server import echo, start_server

    from elasticcb.rpc.connection import Connection
    from elasticcb.security.credentials import Access

    with contextlib.ExitStack() as stack:

        def start(answer=echo, token="", tls=None):
            server = start_server(answer, access=Access(token, tls))
            stack.callback(server.stop)
            connection = Connection(server.address, "the echo server", 5.0, Access(token, tls))
            stack.callback(connection.close)
            return server, connection

        yield start


@pytest.fixture(params=["one machine", "two machines", "two machines with TLS"])
def serve_and_connect_by_link(request, serve_and_connect, monkeypatch, tmp_path):
    """The same, where the link is what it is on one machine, or between two."""
    from elasticcb.rpc import shared_frames
    from elasticcb.security.tls import make_ca

    if request.param != "one machine":
        monkeypatch.setattr(shared_frames, "is_supported", lambda: False)
    tls = make_ca(str(tmp_path)) if "TLS" in request.param else None
    return functools.partial(serve_and_connect, tls=tls)


@pytest.fixture
def never_again(monkeypatch):
    """No call may be tried again."""
    from elasticcb.rpc import connection

    monkeypatch.setattr(connection.time, "sleep", lambda seconds: pytest.fail("the call was tried again"))


@pytest.fixture
def another_user():
    """Runs a function in a process of another user, which it gives one end of a pipe; gives the other end."""
    if os.getuid():
        pytest.skip("only root can become another user")
    processes, context = [], multiprocessing.get_context("spawn")

    def run(function, *args):
        pipe, other = context.Pipe()
        processes.append(context.Process(target=function, args=(*args, other)))
        processes[-1].start()
        return pipe

    yield run
    for process in processes:
        process.join()
