"""Real gRPC on loopback."""

import threading

import numpy as np
import pytest

from elasticcb.errors import ConnectionLostError, ElasticCBError, ModelFileError, NonFiniteError, WireError
from elasticcb.proto import elasticcb_pb2 as pb
from elasticcb.rpc import Connection, FrameService, Server
from elasticcb.tensors import Frame

SERVICE = "test.Echo"


@pytest.fixture
def serve():
    """Starts a server whose one method is the given function; returns a caller of it."""
    opened = []

    def start(function, patience_seconds=5.0):
        server = Server()
        server.add(FrameService(SERVICE, {"Echo": (pb.ExchangeRequest, function)}))
        server.start()
        connection = Connection(server.address, "the echo server", patience_seconds)
        opened.extend([connection.close, server.stop])
        method = connection.frame_call(SERVICE, "Echo", pb.ExchangeResponse)
        return lambda frame: connection.call(method, frame)

    yield start
    for close in opened:
        close()


def frame(version=0, **tensors):
    return Frame(pb.ExchangeRequest(version=version), tensors)


def test_a_large_frame_goes_there_and_back(serve):
    call = serve(lambda request: Frame(pb.ExchangeResponse(version=request.header.version + 1), request.tensors))
    weights = np.random.default_rng(0).normal(size=3_000_000).astype("float32")  # 12 MB; gRPC's default limit is 4
    answer = call(frame(4, weights=weights))
    assert answer.header.version == 5
    np.testing.assert_array_equal(answer.tensors["weights"], weights)


def raising(error):
    def function(request):
        raise error

    return function


def test_a_refused_message_raises_a_wire_error_with_the_reason(serve):
    with pytest.raises(WireError, match="refused a message: the shape is wrong"):
        serve(raising(WireError("the shape is wrong")))(frame())


def test_an_error_of_the_server_arrives_in_its_own_words(serve):
    with pytest.raises(ElasticCBError, match=r"^the loss is NaN$"):
        serve(raising(NonFiniteError("the loss is NaN")))(frame())


def test_a_long_error_of_the_server_is_cut_and_its_traceback_is_logged(serve, caplog):
    with pytest.raises(ElasticCBError, match=r"^the optimizer failedä{9000,}$"):
        serve(raising(ModelFileError("the optimizer failed" + 50_000 * "ä", "line 7 of their file")))(frame())
    assert "line 7 of their file" in caplog.text


def test_a_defect_of_the_server_does_not_look_like_a_lost_connection_for_long(serve):
    with pytest.raises(ConnectionLostError, match="UNKNOWN"):
        serve(raising(ZeroDivisionError()))(frame())


def test_a_server_out_of_reach_is_named():
    server = Server()
    address = server.address
    server.stop()
    connection = Connection(address, "parameter server 3", patience_seconds=0.2)
    with pytest.raises(ConnectionLostError, match=f"parameter server 3 at {address} has not answered"):
        connection.call(connection.frame_call(SERVICE, "Echo", pb.ExchangeResponse), frame())
    connection.close()


def test_a_call_waits_for_a_server_that_starts_late():
    server = Server()
    server.add(FrameService(SERVICE, {"Echo": (pb.ExchangeRequest, lambda r: Frame(pb.ExchangeResponse(), {}))}))
    connection = Connection(server.address, "the echo server", patience_seconds=20)
    starter = threading.Timer(0.3, server.start)
    starter.start()
    connection.call(connection.frame_call(SERVICE, "Echo", pb.ExchangeResponse), frame())
    connection.close()
    server.stop()


def test_a_port_that_is_taken_is_an_error_in_words():
    server = Server()
    server.start()
    with pytest.raises(ConnectionLostError, match="Another process may hold the port"):
        Server(port=server.port)
    server.stop()
