"""Calls that come again: while the first one runs, and after its answer got lost."""

from __future__ import annotations

import functools
import threading
from concurrent.futures import wait

import numpy as np
import pytest

from elasticcb.checkpoint import shard_file
from elasticcb.checkpoint.shard_file import write_part
from elasticcb.clients.ps_servers import Link
from elasticcb.errors import CheckpointError
from elasticcb.proto import elasticcb_pb2 as pb
from elasticcb.ps import holder
from elasticcb.ps.servicer import Once
from elasticcb.rpc.tensors import Frame
from helpers_ps import SPECS, initial_values, movements, push_frame


@pytest.fixture
def cluster(start_servers):
    return functools.partial(start_servers, split=False)


class Gate:
    """Holds those who come through up until it is opened."""

    def __init__(self):
        self.entered, self.opened, self.count = threading.Event(), threading.Event(), 0

    def __call__(self):
        self.count += 1
        self.entered.set()
        assert self.opened.wait(30)


def save(cluster, folder, call):
    return cluster.call(0, "Save", Frame(pb.SaveRequest(path=str(folder / "file"), call=call), {})).header


def test_save_that_comes_again_while_the_first_one_writes_joins_it(cluster, pool, monkeypatch, tmp_path):
    gate, write = Gate(), write_part
    monkeypatch.setattr(shard_file, "write_part", lambda *given: (gate(), write(*given))[1])
    servers = cluster()
    servers.initialize(initial_values())
    first = pool.submit(save, servers, tmp_path, 5)
    assert gate.entered.wait(30)
    servers.push(movements(0), sequence=1)
    again = pool.submit(save, servers, tmp_path, 5)
    assert not wait([first, again], timeout=0.3).done
    gate.opened.set()
    assert first.result() == again.result() == save(servers, tmp_path, 5)
    assert (gate.count, first.result().version) == (1, 0)
    assert save(servers, tmp_path, 6).version == 1


def test_initialize_that_comes_again_does_not_undo_what_was_trained(cluster):
    servers = cluster()
    request = pb.InitializeRequest(variables=[spec.to_message() for spec in SPECS], num_ps=1, call=3)
    frame = push_frame({}, servers.slices[0], pull=True)
    values = initial_values()
    servers.initialize(values)
    exported = servers.call(0, "Export", Frame(pb.ExportRequest(), {})).tensors
    tensors = {name: array for name, array in exported.items() if name.startswith(("weights/", "state/"))}
    first = servers.call(0, "Initialize", Frame(request, tensors)).header
    servers.push(movements(0), sequence=1)
    assert servers.call(0, "Initialize", Frame(request, tensors)).header == first
    assert servers.call(0, "Exchange", frame).header.version == 1
    request.call = 4
    servers.call(0, "Initialize", Frame(request, tensors))
    assert servers.call(0, "Exchange", frame).header.version == 0


def test_one_model_is_begun_at_a_time(cluster, pool, monkeypatch):
    gate, make = Gate(), holder.Parameters
    monkeypatch.setattr(holder, "Parameters", lambda *given: (gate(), make(*given))[1])
    servers = cluster()
    first = pool.submit(servers.initialize, initial_values())
    assert gate.entered.wait(30)
    second = pool.submit(servers.initialize, initial_values())
    assert not wait([first, second], timeout=0.3).done
    assert gate.count == 1
    gate.opened.set()
    first.result(), second.result()
    assert gate.count == 2


def test_link_sends_the_same_frame_as_the_same_call(cluster):
    servers = cluster()
    link = Link(0, servers.servers[0].address, 1, 5.0, servers.servers[0]._access)
    frames = [Frame(pb.SetLearningRateRequest(learning_rate=0.1), {}) for _ in range(2)]
    for frame in (*frames, frames[0]):
        with pytest.raises(Exception, match="has no model yet"):
            link.call("SetLearningRate", frame)
    numbers = {frame.header.call for frame in frames}
    assert len(numbers) == 2
    assert 0 not in numbers
    link.close()


def test_call_that_failed_is_done_again():
    once, answers = Once(), iter([CheckpointError("the disk is full"), Frame(pb.SaveResponse(file="a"), {})])

    def function():
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    with pytest.raises(CheckpointError, match="full"):
        once.do(1, function)
    assert once.do(1, function).header.file == once.do(1, function).header.file == "a"


def test_answers_with_arrays_and_old_ones_are_not_kept():
    once = Once()
    arrays = iter(range(9))
    for expected in (0, 1):
        given = once.do(1, lambda: Frame(pb.ExportResponse(), {"a": np.array(next(arrays))}))
        assert given.tensors["a"] == expected
    for call in range(1, 400):
        once.do(call, lambda call=call: Frame(pb.ExportResponse(version=call), {}))
    assert len(once._calls) < 300
    assert once.do(399, lambda: pytest.fail("it is done again")).header.version == 399
