"""Calls over links when a process is killed, stops or closes its connection, or the time is over."""

import multiprocessing
import os
import signal
import threading

import grpc
import numpy as np
import pytest
from echo_server import ECHO, ask, echo, link_of, link_threads, start_server

from elasticcb.errors import ConnectionLostError
from elasticcb.proto import elasticcb_pb2 as pb
from elasticcb.rpc import shared_frames
from elasticcb.rpc.connection import Connection
from elasticcb.rpc.tensors import Frame

CONTEXT = multiprocessing.get_context("spawn")


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def serve_one_that_waits(pipe):
    def wait(request):
        if request.header.known_version:
            pipe.send("waits")
            threading.Event().wait()
        return echo(request)

    server = start_server(wait)
    pipe.send(server.address)
    pipe.recv()


def waiting_caller(connection):
    """A thread whose call waits; and its error, once the connection is lost."""
    errors = []

    def wait():
        try:
            ask(connection, 1)  # its deadline is a minute
        except ConnectionLostError as error:
            errors.append(str(error))

    caller = threading.Thread(target=wait)
    caller.start()
    return caller, errors


@pytest.mark.parametrize("shares", [True, False])
def test_a_call_hears_at_once_of_a_server_that_is_killed(shares, monkeypatch):
    monkeypatch.setattr(shared_frames, "is_supported", lambda: shares)
    pipe, other = CONTEXT.Pipe()
    process = CONTEXT.Process(target=serve_one_that_waits, args=(other,))
    process.start()
    connection = Connection(pipe.recv(), "parameter server 1", patience_seconds=0.5)
    ask(connection)
    caller, errors = waiting_caller(connection)
    assert pipe.recv() == "waits"
    os.kill(process.pid, signal.SIGKILL)
    caller.join(20)
    assert not caller.is_alive()
    assert "parameter server 1" in errors[0]
    assert "has not answered" in errors[0]
    process.join()
    connection.close()


def call_once(address, pipe, shares):
    shared_frames.is_supported = lambda: shares
    connection = Connection(address, "the echo server")
    ask(connection, a=np.ones(100_000))
    pipe.send(link_of(connection) is not None)
    pipe.recv()


@pytest.mark.parametrize("shares", [True, False])
def test_nothing_is_left_of_a_client_that_is_killed(serve_and_connect, shares):
    server, _ = serve_and_connect()
    before = descriptors()
    pipe, other = CONTEXT.Pipe()
    process = CONTEXT.Process(target=call_once, args=(server.address, other, shares))
    process.start()
    assert pipe.recv()
    (thread,) = link_threads()
    os.kill(process.pid, signal.SIGKILL)
    thread.join(20)
    assert not thread.is_alive()
    process.join()
    process.close()
    pipe.close()
    other.close()
    # gRPC may hold the socket of its own for a moment; a server goes on listening for streams.
    assert descriptors() <= before + 1 + (not shares)


def test_a_server_that_stops_ends_its_links(serve_and_connect_by_link):
    server, connection = serve_and_connect_by_link()
    ask(connection)
    server.stop()
    assert link_threads() == []
    connection._patience = 0.2
    with pytest.raises(ConnectionLostError):
        ask(connection)


def test_a_call_under_way_is_answered_while_the_server_stops(serve_and_connect_by_link):
    begun, go_on = threading.Event(), threading.Event()

    def slow(request):
        begun.set()
        go_on.wait()
        return echo(request)

    server, connection = serve_and_connect_by_link(slow)
    answers = []
    caller = threading.Thread(target=lambda: answers.append(ask(connection, 7).header.version))
    caller.start()
    begun.wait()
    stopper = threading.Thread(target=server.stop, args=(20.0,))
    stopper.start()
    go_on.set()
    caller.join()
    stopper.join()
    assert answers == [7]


def test_a_closed_connection_ends_the_call_that_waits(serve_and_connect_by_link):
    begun, go_on = threading.Event(), threading.Event()

    def slow(request):
        if request.header.known_version:
            begun.set()
            go_on.wait()
        return echo(request)

    _, connection = serve_and_connect_by_link(slow)
    ask(connection)
    caller, errors = waiting_caller(connection)
    begun.wait()
    connection.close()
    caller.join(20)
    go_on.set()
    assert "CANCELLED" in errors[0]


def test_a_deadline_ends_a_call_and_the_next_one_is_not_confused_by_its_answer(serve_and_connect_by_link):
    go_on = threading.Event()

    def slow(request):
        if request.header.known_version == 1:
            go_on.wait()
        return echo(request)

    _, connection = serve_and_connect_by_link(slow)
    ask(connection)
    with pytest.raises(grpc.RpcError) as caught:
        connection.transport_of(ECHO).call(ECHO, Frame(pb.ExchangeRequest(known_version=1), {}), timeout=0.05)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    go_on.set()
    assert [ask(connection, version).header.version for version in (2, 3)] == [2, 3]
