"""Calls to parameter servers, while Ctrl-C comes at any moment."""

from __future__ import annotations

import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from interrupted import interrupted_at

from elasticcb.clients.ps_servers import Link
from elasticcb.process.signals import each, in_other_thread, interrupt
from elasticcb.proto import elasticcb_pb2 as pb
from elasticcb.rpc.tensors import Frame
from elasticcb.security.credentials import OPEN


@pytest.fixture(autouse=True)
def interrupts():
    before = signal.signal(signal.SIGINT, interrupt)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def pool():
    with ThreadPoolExecutor(4) as pool:
        yield pool


def test_ctrl_c_at_any_moment_leaves_the_locks_of_calls_to_others(pool):
    for operation in range(1, 10_000):
        if not interrupted_at(operation, lambda: each(pool, abs, [-1, -2])):
            break
        answers = []
        other = threading.Thread(target=lambda answers=answers: answers.extend(each(pool, abs, [-3])), daemon=True)
        other.start()
        other.join(10.0)
        assert answers == [3], f"not after Ctrl-C before operation {operation}"
    assert operation > 100


def test_no_call_runs_in_the_main_thread_where_ctrl_c_comes(monkeypatch):
    threads = []

    def call(*arguments):
        threads.append(threading.current_thread())
        return "answer"

    link = Link(0, "127.0.0.1:1", 1, 1.0, OPEN)
    monkeypatch.setattr(link._connection, "call", call)
    assert link.call("Snapshot", Frame(pb.SnapshotRequest(), {})) == "answer"
    link.close()
    assert len(threads) == 1
    assert threading.main_thread() not in threads


def test_a_call_that_raises_a_timeout_of_its_own_raises_it(pool):
    def late(*_):
        raise TimeoutError("mine")

    for call in (lambda: each(pool, late, [1]), lambda: in_other_thread(late)):
        with pytest.raises(TimeoutError, match="mine"):
            call()
