"""Calls over a Unix socket, beside gRPC: real processes that are killed, keys that are wrong, sockets that can't be."""

import contextlib
import multiprocessing
import os
import signal
import socket
import struct
import threading

import grpc
import numpy as np
import pytest

from elasticcb.errors import ConnectionLostError, HandlerError, ModelFileError, WireError
from elasticcb.proto import elasticcb_pb2 as pb
from elasticcb.rpc.connection import Connection
from elasticcb.rpc.frame_service import FrameService
from elasticcb.rpc.server import Server
from elasticcb.rpc.services import Method
from elasticcb.rpc.tensors import Frame
from elasticcb.rpc.unix_socket import Listener, ServerLinks
from elasticcb.security.credentials import Access

ECHO = Method("test.Echo", "Echo", pb.ExchangeRequest, pb.ExchangeResponse)
CONTEXT = multiprocessing.get_context("spawn")


def echo(request):
    return Frame(pb.ExchangeResponse(version=request.header.version), request.tensors)


def serve(function, pipe=None, token=""):
    server = Server(access=Access(token))
    server.add(FrameService({ECHO: function}))
    server.start()
    if pipe is not None:  # a process of its own
        pipe.send(server.address)
        pipe.recv()
    return server


def link_of(connection):
    return connection.transport_of(ECHO).memory.link


@pytest.fixture
def connect():
    opened = []

    def connect(function=echo, **options):
        server = serve(function, **options)
        connection = Connection(server.address, "the echo server", 5.0, Access(options.get("token", "")))
        opened.extend([connection.close, server.stop])
        return server, connection

    yield connect
    for close in opened:
        close()


def call(connection, version=0, **tensors):
    return connection.call(ECHO, Frame(pb.ExchangeRequest(version=version), tensors))


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def links() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "link"]


def test_calls_go_by_the_link_from_the_first_one_on(connect, monkeypatch):
    _, connection = connect(token="secret")
    assert call(connection, 3).header.version == 3
    assert link_of(connection) is not None
    used = []
    inner = link_of(connection).call
    monkeypatch.setattr(link_of(connection), "call", lambda *args: used.append(args[0]) or inner(*args))
    np.testing.assert_array_equal(call(connection, a=np.arange(5)).tensors["a"], np.arange(5))
    assert used == ["Echo"]


def test_a_client_without_the_token_gets_no_link(connect):
    server, _ = connect(token="secret")
    stranger = Connection(server.address, "the echo server", 0.2, Access("wrong"))
    with pytest.raises(ConnectionLostError, match="UNAUTHENTICATED"):
        call(stranger)
    assert link_of(stranger) is None
    assert links() == []
    stranger.close()


def fail(request):
    raise ModelFileError("the optimizer failed", "line 7 of their file: ä")


def test_an_error_keeps_its_class_its_text_and_the_users_traceback(connect):
    _, connection = connect(fail)
    for _ in range(2):
        with pytest.raises(ModelFileError, match=r"^the optimizer failed$") as caught:
            call(connection)
        assert caught.value.user_traceback == "line 7 of their file: ä"
    assert link_of(connection) is not None  # the call is over: nothing has to begin anew


def refuse(request):
    raise WireError("the shape is wrong")


def test_a_refused_message_raises_a_wire_error(connect):
    _, connection = connect(refuse)
    with pytest.raises(WireError, match="refused a message: the shape is wrong"):
        call(connection)


def test_a_defect_of_the_server_is_an_error_in_its_words_as_with_grpc(connect):
    _, connection = connect(lambda request: 1 // 0)
    with pytest.raises(HandlerError, match="division or modulo by zero"):
        call(connection)


def serve_one_that_waits(pipe):
    def wait(request):
        if request.header.version:
            pipe.send("waits")
            threading.Event().wait()
        return Frame(pb.ExchangeResponse(), {})

    serve(wait, pipe)


def test_a_call_hears_at_once_of_a_server_that_is_killed():
    pipe, other = CONTEXT.Pipe()
    process = CONTEXT.Process(target=serve_one_that_waits, args=(other,))
    process.start()
    connection = Connection(pipe.recv(), "parameter server 1", patience_seconds=0.5)
    call(connection)
    errors = []

    def wait():
        try:
            call(connection, 1)  # its deadline is a minute
        except ConnectionLostError as error:
            errors.append(str(error))

    caller = threading.Thread(target=wait)
    caller.start()
    assert pipe.recv() == "waits"
    os.kill(process.pid, signal.SIGKILL)
    caller.join(20)
    assert not caller.is_alive()
    assert "parameter server 1" in errors[0]
    assert "has not answered" in errors[0]
    process.join()
    connection.close()


def call_once(address, pipe):
    connection = Connection(address, "the echo server")
    call(connection, a=np.ones(100_000))
    pipe.send(link_of(connection) is not None)
    pipe.recv()


def test_nothing_is_left_of_a_client_that_is_killed(connect):
    server, _ = connect()
    before = descriptors()
    pipe, other = CONTEXT.Pipe()
    process = CONTEXT.Process(target=call_once, args=(server.address, other))
    process.start()
    assert pipe.recv()
    (thread,) = links()
    os.kill(process.pid, signal.SIGKILL)
    thread.join(20)
    assert not thread.is_alive()
    process.join()
    process.close()
    pipe.close()
    other.close()
    assert server._frame_services[0]._memory._segments == {}
    assert descriptors() <= before + 1  # gRPC may hold the socket of its own for a moment


def test_a_server_that_stops_ends_its_links(connect):
    server, connection = connect()
    call(connection)
    server.stop()
    assert links() == []
    connection._patience = 0.2
    with pytest.raises(ConnectionLostError):
        call(connection)


def test_a_call_under_way_is_answered_while_the_server_stops(connect):
    begun, go_on = threading.Event(), threading.Event()

    def slow(request):
        begun.set()
        go_on.wait()
        return Frame(pb.ExchangeResponse(version=7), {})

    server, connection = connect(slow)
    answers = []
    caller = threading.Thread(target=lambda: answers.append(call(connection).header.version))
    caller.start()
    begun.wait()
    stopper = threading.Thread(target=server.stop, args=(20.0,))
    stopper.start()
    go_on.set()
    caller.join()
    stopper.join()
    assert answers == [7]


def test_a_closed_connection_ends_the_call_that_waits(connect):
    begun, go_on = threading.Event(), threading.Event()

    def slow(request):
        if request.header.version:
            begun.set()
            go_on.wait()
        return Frame(pb.ExchangeResponse(), {})

    _, connection = connect(slow)
    call(connection)
    errors = []

    def wait():
        try:
            call(connection, 1)
        except ConnectionLostError as error:
            errors.append(str(error))

    caller = threading.Thread(target=wait)
    caller.start()
    begun.wait()
    connection.close()
    caller.join(20)
    go_on.set()
    assert "CANCELLED" in errors[0]


def test_a_deadline_ends_a_call_and_the_next_one_is_not_confused_by_its_answer(connect):
    go_on = threading.Event()

    def slow(request):
        if request.header.version == 1:
            go_on.wait()
        return Frame(pb.ExchangeResponse(version=request.header.version), {})

    _, connection = connect(slow)
    call(connection)
    with pytest.raises(grpc.RpcError) as caught:
        connection.transport_of(ECHO).call(ECHO, Frame(pb.ExchangeRequest(version=1), {}), timeout=0.05)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    go_on.set()
    assert [call(connection, version).header.version for version in (2, 3)] == [2, 3]


def test_calls_go_by_grpc_where_there_are_no_sockets(connect, monkeypatch):
    def none(*args):
        raise OSError("Address family not supported by protocol")

    monkeypatch.setattr(Listener, "__init__", none)
    _, connection = connect()
    for value in (1.0, 2.0, 3.0):
        np.testing.assert_array_equal(call(connection, a=np.full(50_000, value)).tensors["a"], value)
    memory = connection.transport_of(ECHO).memory
    assert memory.link is None
    assert memory._segment is not None


def test_calls_go_by_grpc_where_the_server_can_not_connect(connect, monkeypatch):
    monkeypatch.setattr(ServerLinks, "connect", lambda *args: False)
    _, connection = connect()
    np.testing.assert_array_equal(call(connection, a=np.arange(9)).tensors["a"], np.arange(9))
    assert link_of(connection) is None


def test_a_listener_takes_nobody_without_the_key():
    listener = Listener()
    strangers = []
    for shown in (b"x" * 16, b"short"):
        stranger = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        stranger.connect(f"\0{listener.name}")
        stranger.sendall(shown)
        stranger.shutdown(socket.SHUT_WR)
        strangers.append(stranger)
    key = b"k" * 16
    servers = ServerLinks(lambda method, data: data.upper())
    connector = threading.Thread(target=servers.connect, args=(listener.name, key, lambda: None))
    connector.start()
    link = listener.accept(key, lambda: True)
    connector.join()
    assert link.call("any", b"abc", 10.0) == b"ABC"
    for each in (*strangers, link, listener):
        each.close()
    servers.stop(1.0)


def test_large_messages_go_whole_over_a_link():
    listener, key = Listener(), b"k" * 16
    servers = ServerLinks(lambda method, data: data + data)
    assert servers.connect(listener.name, key, lambda: None)
    link = listener.accept(key, lambda: True)
    data = os.urandom(3_000_000)
    assert link.call("any", data, 10.0) == data + data
    link.close()
    listener.close()
    servers.stop(1.0)


@pytest.mark.parametrize("announced", [2**40, 2**63, 2**64 - 1])  # more than the memory, and than an array can have
def test_a_link_by_which_too_many_bytes_are_announced_ends_without_a_traceback(announced, monkeypatch):
    raised = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    listener, ended = Listener(), threading.Event()
    servers = ServerLinks(lambda method, data: data)
    assert servers.connect(listener.name, b"k" * 16, ended.set)
    link = listener.accept(b"k" * 16, lambda: True)
    link._socket.sendall(struct.pack("<QB", announced, 4) + b"Echo, and what is not as much")
    link._socket.shutdown(socket.SHUT_WR)
    assert ended.wait(10)
    assert not raised
    listener.close()
    link.close()


def test_threads_that_share_a_connection_get_their_own_answers(connect):
    _, connection = connect()
    wrong = []

    def work(number):
        for turn in range(50):
            answer = call(connection, 100 * number + turn, a=np.full(1_000, number))
            if answer.header.version != 100 * number + turn or not (answer.tensors["a"] == number).all():
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_an_answer_that_is_kept_is_not_overwritten_and_others_come_all_the_same(connect):
    _, connection = connect()
    answers = [call(connection, a=np.full(100_000, float(value))).tensors["a"] for value in range(6)]
    for value, answer in enumerate(answers):
        assert (answer == value).all()


def test_an_answer_that_is_let_go_of_gives_its_memory_to_a_later_one(connect):
    _, connection = connect()
    places = set()
    for value in range(9):
        answer = call(connection, a=np.full(100_000, float(value))).tensors["a"]
        if value > 2:
            places.add(answer.ctypes.data)
    assert len(places) == 2


def connect_as_another_user(name, key, pipe):
    os.setuid(65534)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(f"\0{name}")
        with contextlib.suppress(OSError):
            connection.sendall(key)
        pipe.send("connected")
        answer = b""
        with contextlib.suppress(OSError):  # it was reset
            answer = connection.recv(1)
        pipe.send(answer)


def listen_as_another_user(name, pipe):
    os.setuid(65534)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"\0{name}")
        listening.listen()
        pipe.send("listening")
        connected, _ = listening.accept()
        pipe.send(connected.recv(16))


def test_another_user_who_knows_name_and_key_gets_no_link(another_user, monkeypatch):
    monkeypatch.setattr("elasticcb.rpc.unix_socket._HANDSHAKE_SECONDS", 0.5)
    listener, key = Listener(), b"k" * 16
    pipe = another_user(connect_as_another_user, listener.name, key)
    assert pipe.recv() == "connected"
    with pytest.raises(TimeoutError):
        listener.accept(key, lambda: True)
    assert pipe.recv() == b""
    listener.close()


def test_a_server_tells_no_key_to_a_listener_of_another_user(another_user):
    pipe = another_user(listen_as_another_user, "elasticcb-of-a-stranger")
    assert pipe.recv() == "listening"
    assert not ServerLinks(lambda method, data: b"").connect("elasticcb-of-a-stranger", b"k" * 16, lambda: None)
    assert pipe.recv() == b""
