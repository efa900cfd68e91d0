"""Real gRPC on loopback."""

import socket
import threading
from dataclasses import replace

import grpc
import numpy as np
import pytest
from echo_server import ECHO, ask, echo, link_threads, start_server

from elasticcb.clients.master import MasterClient
from elasticcb.errors import (
    ConnectionLostError,
    ElasticCBError,
    HandlerError,
    ModelFileError,
    NonFiniteError,
    UsageError,
    WireError,
)
from elasticcb.proto import elasticcb_pb2 as pb
from elasticcb.rpc.admission import PROTOCOL
from elasticcb.rpc.connection import Connection
from elasticcb.rpc.frame_service import FrameService
from elasticcb.rpc.server import Server
from elasticcb.rpc.services import PS_METHODS
from elasticcb.rpc.tensors import Frame
from elasticcb.security.credentials import Access


@pytest.fixture
def serve():
    """Starts a server whose one method is the given function; returns a caller of it."""
    opened = []

    def start(function, patience_seconds=5.0, shared=False):
        server = start_server(function)
        connection = Connection(server.address, "the echo server", patience_seconds)
        opened.extend([connection.close, server.stop])
        method = replace(ECHO, shared=shared)
        return lambda version=0, **tensors: ask(connection, version, method, **tensors)

    yield start
    for close in opened:
        close()


def test_a_large_frame_goes_there_and_back(serve):
    call = serve(lambda request: Frame(pb.ExchangeResponse(version=request.header.known_version + 1), request.tensors))
    weights = np.random.default_rng(0).normal(size=3_000_000).astype("float32")  # 12 MB; gRPC's default limit is 4
    answer = call(4, weights=weights)
    assert answer.header.version == 5
    np.testing.assert_array_equal(answer.tensors["weights"], weights)


def raising(error):
    def function(request):
        raise error

    return function


@pytest.mark.parametrize("shared", [False, True])
def test_a_refused_message_raises_a_wire_error_with_the_reason(serve, shared):
    with pytest.raises(WireError, match="refused a message: the shape is wrong"):
        serve(raising(WireError("the shape is wrong")), shared=shared)()


def test_an_error_of_the_server_arrives_in_its_own_words(serve):
    with pytest.raises(ElasticCBError, match=r"^the loss is NaN$"):
        serve(raising(NonFiniteError("the loss is NaN")))()


def test_a_long_error_of_the_server_is_cut_and_its_traceback_is_logged(serve, caplog):
    with pytest.raises(ElasticCBError, match=r"^the optimizer failedä{9000,}$"):
        serve(raising(ModelFileError("the optimizer failed" + 50_000 * "ä", "line 7 of their file")))()
    assert "line 7 of their file" in caplog.text


@pytest.mark.parametrize("shared", [False, True])
def test_a_defect_of_the_server_is_an_error_at_once_in_its_words(serve, shared, never_again):
    calls = []

    def answer(request):
        calls.append(request)
        raise ZeroDivisionError("by nothing")

    with pytest.raises(
        HandlerError, match=r"the echo server at \S+ failed to answer a call: by nothing\. .*the log of that process"
    ):
        serve(answer, shared=shared)()
    assert len(calls) == 1


@pytest.mark.parametrize("shared", [False, True])
def test_a_connection_that_was_closed_is_lost(shared):
    connection = Connection("127.0.0.1:1", "the server", patience_seconds=5.0)
    connection.close()
    with pytest.raises(ConnectionLostError, match=r"connection to the server at 127\.0\.0\.1:1 was closed"):
        ask(connection, method=replace(ECHO, shared=shared))


def test_a_server_out_of_reach_is_named():
    with socket.socket() as taken:  # nobody listens there, which is known at once
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        connection = Connection(address, "parameter server 3", patience_seconds=0.2)
        with pytest.raises(ConnectionLostError, match=f"parameter server 3 at {address} has not answered"):
            ask(connection)
        connection.close()


def test_a_call_waits_for_a_server_that_starts_late():
    server = Server()
    server.add(FrameService({ECHO: echo}))
    connection = Connection(server.address, "the echo server", patience_seconds=20)
    starter = threading.Timer(0.3, server.start)
    starter.start()
    ask(connection)
    connection.close()
    server.stop()


def test_a_port_that_is_taken_is_an_error_in_words():
    server = Server()
    server.start()
    with pytest.raises(UsageError, match="another process holds the port"):
        Server(port=server.port)
    server.stop()


@pytest.fixture
def dial():
    """Starts a server with a token, whose one method counts its calls; returns the counter and a caller of it, which
    says that it speaks the given protocol (None: nothing)."""
    opened = []

    def start(token, given_token, protocol, shared):
        calls = []
        server = start_server(lambda request: calls.append(request) or echo(request), access=Access(token))
        connection = Connection(server.address, "the echo server", patience_seconds=20.0, access=Access(given_token))
        opened.extend([connection.close, server.stop])
        others = [(key, value) for key, value in connection.metadata if key != "elasticcb-protocol"]
        assert len(others) == len(connection.metadata) - 1
        if protocol != PROTOCOL:
            connection.metadata = (*others, *([("elasticcb-protocol", str(protocol))] if protocol is not None else []))
        method = replace(ECHO, shared=shared)
        return calls, lambda: ask(connection, 7, method, a=np.arange(100_000))

    yield start
    for close in opened:
        close()


OTHER_PROTOCOL = PROTOCOL + 1
REFUSED = (
    rf"^The caller uses protocol {{}}, but this process uses {PROTOCOL}; run the same release of ElasticCB in all "
    r"processes of a job\.$"
)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(
    ("protocol", "shown"), [(OTHER_PROTOCOL, str(OTHER_PROTOCOL)), (None, "none"), ("", "none"), ("1" * 99, "1" * 20)]
)
def test_a_caller_of_another_protocol_is_refused_at_once_with_both_numbers(dial, never_again, protocol, shown, shared):
    calls, call = dial("secret", "secret", protocol, shared)
    with pytest.raises(ElasticCBError, match=REFUSED.format(shown)) as caught:
        call()
    assert type(caught.value) is ElasticCBError
    assert not calls
    assert link_threads() == []


@pytest.mark.parametrize("protocol", [PROTOCOL, OTHER_PROTOCOL, None])
@pytest.mark.parametrize("given_token", ["", "wrong"])
def test_a_caller_without_the_token_does_not_learn_the_protocol(dial, protocol, given_token):
    calls, call = dial("secret", given_token, protocol, shared=False)
    with pytest.raises(
        ConnectionLostError, match="UNAUTHENTICATED: the call does not carry this job's token"
    ) as caught:
        call()
    assert "protocol" not in str(caught.value)
    assert not calls


def test_calls_carry_the_protocol(monkeypatch):
    given = []

    class Listens(grpc.ServerInterceptor):
        def intercept_service(self, continuation, call):
            given.append((call.method.rpartition("/")[2], dict(call.invocation_metadata).get("elasticcb-protocol")))
            return continuation(call)

    monkeypatch.setattr("elasticcb.rpc.server.Gate", lambda *_: Listens())
    server = Server()
    server.add(FrameService({PS_METHODS["Exchange"]: lambda r: Frame(pb.ExchangeResponse(), {})}))
    server.start()
    master, other = MasterClient(server.address), Connection(server.address, "parameter server 0")
    with pytest.raises(ConnectionLostError, match="UNIMPLEMENTED"):
        master.register(pb.WORKER, 0)
    other.call(PS_METHODS["Exchange"], Frame(pb.ExchangeRequest(), {}))
    assert given == [("Register", str(PROTOCOL)), ("Attach", str(PROTOCOL))]  # `Exchange` goes by the link
    master.close()
    other.close()
    server.stop()
