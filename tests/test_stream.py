"""Connections beside gRPC between machines: who gets one, and what happens where there can be none."""

import contextlib
import json
import logging
import socket
import ssl
import threading

import numpy as np
import pytest
from echo_server import ECHO, ask, link_of, link_threads
from waiting import wait_until

from elasticcb.rpc import shared_frames, stream
from elasticcb.security.tls import make_ca


@pytest.fixture(autouse=True)
def _two_machines(monkeypatch):
    monkeypatch.setattr(shared_frames, "is_supported", lambda: False)


def offered(connection):
    given = json.loads(connection._attach(ECHO.attach_path, stream.ASKED))
    return given["port"], bytes.fromhex(given["key"])


def shown(port, key, context=None):
    """What a server says to a key: b"" when it ends the connection."""
    with socket.create_connection(("127.0.0.1", port), 20) as connected, contextlib.ExitStack() as stack:
        if context is not None:
            connected = stack.enter_context(context.wrap_socket(connected))
        with contextlib.suppress(ConnectionError):
            connected.sendall(key)
            connected.settimeout(20)
            return connected.recv(1)
        return b""


def test_a_key_is_good_for_one_connection_and_for_a_while(serve_and_connect, monkeypatch):
    server, connection = serve_and_connect(token="secret")
    port, key = offered(connection)
    assert shown(port, bytes(32)) == b""
    assert shown(port, key[:31] + b"?") == b""
    assert shown(port, key) == b"+"
    assert shown(port, key) == b""
    monkeypatch.setattr(stream, "_KEY_SECONDS", -1.0)
    assert shown(*offered(connection)) == b""
    wait_until(lambda: not link_threads())
    assert server._frame_services[0]._streams._strangers == 0


def test_strangers_who_say_nothing_are_a_few_and_end(serve_and_connect, monkeypatch):
    monkeypatch.setattr(stream, "_HANDSHAKE_SECONDS", 1.0)
    _, connection = serve_and_connect(token="secret")
    port, _ = offered(connection)
    with contextlib.ExitStack() as stack:
        for _ in range(200):
            stack.enter_context(socket.create_connection(("127.0.0.1", port), 20))
        wait_until(lambda: 1 < len(link_threads()) <= stream._MOST_STRANGERS)
        assert ask(connection, 3).header.version == 3
        wait_until(lambda: len(link_threads()) <= 1)
    connection.transport_of(ECHO).side._ask_at = 0.0
    assert ask(connection, 4).header.version == 4
    assert link_of(connection) is not None


def test_where_the_job_has_tls_so_have_streams(serve_and_connect, tmp_path):
    tls, others = (make_ca(str(tmp_path / name)) for name in ("job", "other"))
    _, connection = serve_and_connect(token="secret", tls=tls)
    port, key = offered(connection)
    assert shown(port, key) == b""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # without a certificate
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with contextlib.suppress(ssl.SSLError):
        assert shown(port, key, context) == b""
    with socket.create_connection(("127.0.0.1", port), 20) as connected, pytest.raises(ssl.SSLCertVerificationError):
        others.connected(connected, "127.0.0.1")
    ask(connection, a=np.arange(9))
    assert isinstance(link_of(connection)._socket, ssl.SSLSocket)


def test_where_the_other_port_is_not_reached_frames_go_by_grpc(serve_and_connect, monkeypatch, caplog):
    _, connection = serve_and_connect()

    def refused(address, timeout):
        raise ConnectionRefusedError(111, "Connection refused")

    with monkeypatch.context() as patch, caplog.at_level(logging.INFO):
        patch.setattr(stream.socket, "create_connection", refused)
        for value in (1.0, 2.0, 3.0):
            np.testing.assert_array_equal(ask(connection, a=np.full(50_000, value)).tensors["a"], value)
    assert caplog.text.count("could not open a direct connection to 127.0.0.1") == 1
    assert link_of(connection) is None
    connection.transport_of(ECHO).side._ask_at = 0.0  # a while later
    ask(connection)
    assert link_of(connection) is not None


def test_a_server_in_a_folder_has_no_other_port(serve_and_connect):
    server, connection = serve_and_connect()
    server._frame_services[0].listen_at("", None)
    np.testing.assert_array_equal(ask(connection, a=np.arange(9)).tensors["a"], np.arange(9))
    assert link_of(connection) is None


def test_a_server_that_stops_takes_no_streams(serve_and_connect):
    server, connection = serve_and_connect()
    port, _ = offered(connection)
    server.stop()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), 20)
    assert not [thread for thread in threading.enumerate() if thread.name == "streams"]


def test_memory_of_streams_is_freed_when_it_is_asked_for(serve_and_connect):
    _, connection = serve_and_connect()
    ask(connection, a=np.ones(1 << 20))
    assert len(link_threads()) == 1
    connection.free_memory()
    wait_until(lambda: not link_threads())
    np.testing.assert_array_equal(ask(connection, a=np.arange(5)).tensors["a"], np.arange(5))
