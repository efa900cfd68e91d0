"""Calls to parameter servers, while Ctrl-C comes at any moment."""

from __future__ import annotations

import signal
import threading

import pytest
from interrupted import interrupted_at
from ps_clients import places_at

from elasticcb.clients.ps_servers import KnownServer, ServerGroup
from elasticcb.process.signals import interrupt
from elasticcb.rpc.tensors import Frame
from elasticcb.sharding.partition import VariableSpec


@pytest.fixture
def group(monkeypatch):
    before = signal.signal(signal.SIGINT, interrupt)
    group = ServerGroup(places_at(["127.0.0.1:1"]), [VariableSpec("w", (2,), "float32", True)], False, 1.0)
    yield group
    group.close()
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_at_any_moment_leaves_the_locks_of_calls_to_others(group):
    for operation in range(1, 10_000):
        if not interrupted_at(operation, lambda: group.each(abs, [-1, -2])):
            break
        answers = []
        other = threading.Thread(target=lambda answers=answers: answers.extend(group.each(abs, [-3])), daemon=True)
        other.start()
        other.join(10.0)
        assert answers == [3], f"not after Ctrl-C before operation {operation}"
    assert operation > 100


def test_no_call_runs_in_the_main_thread_where_ctrl_c_comes(group):
    threads = []

    class Link:
        def call(self, method, frame, patience):
            threads.append(threading.current_thread())
            return frame

    server = KnownServer(0, [], Link())
    assert group.send(server, Frame("asked", {}), "Snapshot").header == "asked"
    assert threads
    assert threading.main_thread() not in threads


def test_a_call_that_raises_a_timeout_of_its_own_raises_it(group):
    def late():
        raise TimeoutError("mine")

    with pytest.raises(TimeoutError, match="mine"):
        group.each(lambda _: late(), [1])
