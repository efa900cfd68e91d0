"""Frames over memory that two processes share."""

import errno
import multiprocessing
import os
import tempfile
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from echo_server import ECHO, ask, echo, start_server
from waiting import wait_until

from elasticcb.errors import ConnectionLostError, WireError
from elasticcb.proto import elasticcb_pb2 as pb
from elasticcb.rpc import frame_service, shared_frames
from elasticcb.rpc.connection import Connection
from elasticcb.rpc.shared_frames import Segment
from elasticcb.rpc.stream import ClientStream
from elasticcb.rpc.tensors import Frame

RNG = np.random.default_rng(0)


@pytest.fixture
def folder(monkeypatch):
    """Where segments are: not where those of other jobs of this machine are."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        monkeypatch.setattr("elasticcb.rpc.shared_frames._FOLDER", folder)
        yield Path(folder)


@pytest.fixture
def serve():
    """Starts a server whose one method is the given function; returns a caller of it that shares memory."""
    opened = []

    def start(function, transient=False):
        server = start_server(function, replace(ECHO, transient=transient))
        connection = Connection(server.address, "the echo server", 5.0)
        opened.extend([connection.close, server.stop])
        start.connection = connection
        return lambda **tensors: ask(connection, **tensors)

    yield start
    for close in opened:
        close()


def test_what_a_server_keeps_of_a_request_is_not_changed_by_the_next_one(serve):
    kept = []

    def keep(request):
        kept.append(request.tensors["a"])
        return Frame(pb.ExchangeResponse(), {})

    call = serve(keep)
    arrays = [RNG.normal(size=50_000) for _ in range(3)]
    for array in arrays:
        call(a=array)
    for array, found in zip(arrays, kept, strict=True):
        np.testing.assert_array_equal(found, array)


def test_arrays_of_a_transient_method_are_not_copied(serve):
    seen = []

    def look(request):
        seen.append(request.tensors["a"].base is not None)
        return Frame(pb.ExchangeResponse(), {"large": np.zeros(100_000)})

    call = serve(look, transient=True)
    for _ in range(3):
        call(a=np.ones(50_000))
    assert seen[-1]


def test_no_name_is_left_in_memory_while_calls_go_on(serve, folder):
    call = serve(echo)
    for _ in range(3):
        call(a=np.ones(100_000))
    assert list(folder.iterdir()) == []


def test_arrays_travel_by_the_socket_where_there_is_no_room(serve, folder, monkeypatch, caplog):
    def full(descriptor, offset, size):
        raise OSError(errno.ENOSPC, "No space left on device")

    descriptors = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "posix_fallocate", full)
    for _ in range(2):
        with pytest.raises(OSError):
            Segment.create(4096)
    assert len(os.listdir("/proc/self/fd")) == descriptors
    call = serve(echo)
    for value in (1.0, 2.0, 3.0):
        np.testing.assert_array_equal(call(a=np.full(50_000, value)).tensors["a"], value)
    assert list(folder.iterdir()) == []
    assert caplog.text.count("No space left on device") == 1
    assert serve.connection.transport_of(ECHO).side.link is not None


def test_frames_travel_whole_on_a_system_that_can_not_reserve_memory(serve, monkeypatch):
    monkeypatch.delattr(os, "posix_fallocate")
    call = serve(echo)
    for value in (1.0, 2.0):
        np.testing.assert_array_equal(call(a=np.full(50_000, value)).tensors["a"], value)
    assert isinstance(serve.connection.transport_of(ECHO).side, ClientStream)


def test_a_segment_is_not_used_again_after_a_call_that_was_interrupted(serve, monkeypatch):
    call = serve(echo)
    call(a=np.ones(50_000))
    memory = serve.connection.transport_of(ECHO).side

    def interrupted(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(memory, "encode", interrupted)
        with pytest.raises(KeyboardInterrupt):
            call(a=np.ones(50_000))
    assert memory._segment is None
    np.testing.assert_array_equal(call(a=np.full(50_000, 2.0)).tensors["a"], 2.0)


def test_memory_is_shared_once_a_server_that_was_away_is_back():
    connection = Connection("127.0.0.1:1", "the echo server", 0.1)
    with pytest.raises(ConnectionLostError):
        ask(connection, a=np.ones(50_000))
    assert connection.transport_of(ECHO).side.usable
    connection.close()


def test_descriptors_of_a_segment_that_nobody_uses_are_closed():
    before = len(os.listdir("/proc/self/fd"))
    segment = Segment.create(4096)
    del segment
    assert len(os.listdir("/proc/self/fd")) == before


def test_answers_lie_where_tensorflow_takes_them_without_a_copy(serve):
    call = serve(echo)
    for _ in range(2):
        answer = call(a=np.ones(50_000), b=np.ones((3, 7))).tensors
    assert all(array.ctypes.data % 64 == 0 for array in answer.values())


@pytest.mark.parametrize("path", ["/etc/passwd", "/proc/1/fd/../../environ", "/proc/4194305/fd/1", "/proc/self/fd/1"])
def test_a_segment_that_is_none_is_refused(path):
    with pytest.raises(WireError, match="segment"):
        Segment.attach(path, 7, 4096)


def test_another_file_under_the_path_of_a_segment_and_another_size_are_refused(tmp_path):
    one, other = Segment.create(4096), Segment.create(4096)
    with pytest.raises(WireError, match="is not the shared segment"):
        Segment.attach(one.path, other.inode, 4096)
    with pytest.raises(WireError, match="bytes"):
        Segment.attach(one.path, one.inode, 8192)
    with (tmp_path / "file").open("wb+") as file:
        file.truncate(3 * 4096)
        path, inode = f"/proc/{os.getpid()}/fd/{file.fileno()}", os.fstat(file.fileno()).st_ino
        with pytest.raises(WireError, match="is not the shared segment"):
            Segment.attach(path, inode, 4096)
    one.close()
    other.close()


def descriptors_in(folder):
    """How many files of a folder this process has open, also those without a name."""
    with os.scandir("/proc/self/fd") as found:
        return sum(os.readlink(each.path).startswith(str(folder)) for each in list(found) if os.path.lexists(each.path))


def call_of_a_large_frame(address, folder):
    shared_frames._FOLDER = folder
    ask(Connection(address, "the echo server", 60.0), a=np.ones(1 << 20))


@pytest.mark.parametrize("reached", ["the server", "nobody"])
def test_nothing_is_left_of_a_client_that_is_killed_while_it_attaches(reached, folder, monkeypatch):
    attaching, killed, ended = threading.Event(), threading.Event(), threading.Event()
    attach, before = frame_service.attach, descriptors_in(folder)

    def slow(*args):
        if reached == "nobody":
            attaching.set()
            killed.wait(60)
            ended.set()
        return attach(*args)

    connect = shared_frames.connect

    def slowly_connected(name, key):  # the server has mapped the segment
        attaching.set()
        killed.wait(60)
        try:
            return connect(name, key)
        finally:
            ended.set()

    monkeypatch.setattr(frame_service, "attach", slow)
    if reached == "the server":
        monkeypatch.setattr(shared_frames, "connect", slowly_connected)
    server = start_server()
    client = multiprocessing.get_context("spawn").Process(
        target=call_of_a_large_frame, args=(server.address, str(folder))
    )
    client.start()
    assert attaching.wait(120)
    assert list(folder.iterdir()) == []  # a file without a name is freed with its last descriptor
    client.kill()
    client.join()
    killed.set()
    assert ended.wait(60)
    wait_until(lambda: descriptors_in(folder) == before)
    server.stop()
