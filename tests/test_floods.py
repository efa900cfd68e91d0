"""Connections of strangers who say nothing, or half of something: others are served all the same."""

from __future__ import annotations

import contextlib
import multiprocessing
import resource
import socket
import threading
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from echo_server import ask, start_server
from health_probe import SERVING, check

from elasticcb.cluster.external import ExternalCluster
from elasticcb.master import prometheus
from elasticcb.master.master import Master
from elasticcb.rpc import server as rpc_server
from elasticcb.rpc.connection import Connection
from elasticcb.rpc.server import HealthServer
from elasticcb.security.credentials import Access
from elasticcb.settings import ClusterSettings
from metrics_scrapes import Scrape

ACCESS = Access("secret")


def serve_with_few_descriptors(pipe: Any) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    rpc_server._HANDSHAKE = (rpc_server._HANDSHAKE[0], 2_000)  # ms; it is what strangers keep their descriptors for
    server = start_server(access=ACCESS)
    pipe.send(server.address)
    pipe.recv()


@contextlib.contextmanager
def connected(address: str, count: int, said: bytes = b"") -> Iterator[list[socket.socket]]:
    host, _, port = address.rpartition(":")
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_connection((host, int(port)), 60.0)) for _ in range(count)]
        for each in sockets:
            with contextlib.suppress(OSError):  # it may have been ended already
                each.sendall(said)
        yield sockets


def test_idle_connections_of_strangers_do_not_end_a_server_with_few_descriptors() -> None:
    context = multiprocessing.get_context("spawn")
    pipe, other = context.Pipe()
    process = context.Process(target=serve_with_few_descriptors, args=(other,))
    process.start()
    address = pipe.recv()
    for said in (b"", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"):
        with connected(address, 400, said):
            connection = Connection(address, "the server", 120.0, ACCESS)
            assert ask(connection, 7).header.version == 7
            connection.close()
    pipe.send(None)
    process.join()
    assert process.exitcode == 0


def test_half_sent_checks_do_not_block_the_health_service() -> None:
    health = HealthServer("127.0.0.1", 0, "elasticcb.Master", lambda: True)
    end = threading.Event()

    def half_of_a_request() -> Iterator[bytes]:
        end.wait()
        yield b""

    with contextlib.ExitStack() as stack:
        stack.callback(health.stop)
        stack.callback(end.set)
        for number in range(20):
            options = [("grpc.use_local_subchannel_pool", 1), ("number", number)]
            channel = stack.enter_context(grpc.insecure_channel(health.address, options))
            for _ in range(8):
                channel.stream_unary("/grpc.health.v1.Health/Check").future(half_of_a_request())
            grpc.channel_ready_future(channel).result(60.0)
        assert check(health.address, "") == SERVING


def test_half_sent_scrapes_do_not_block_the_metrics() -> None:
    lines: list[str] = []
    master = Master(ClusterSettings(metrics_port=0), ExternalCluster(lines.append), lines.append, ACCESS)
    try:
        with connected(master.metrics_address, 4 * prometheus._MOST_CONNECTIONS, b"GET /metrics HTTP/1.1\r\n") as found:
            assert Scrape(master.metrics_address).find("elasticcb_ready") == 0
            assert found[0].recv(1) == b""  # the oldest has been ended
    finally:
        master.stop()


def test_a_connection_to_the_metrics_that_is_quiet_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prometheus._Handler, "timeout", 0.1)
    lines: list[str] = []
    master = Master(ClusterSettings(metrics_port=0), ExternalCluster(lines.append), lines.append, ACCESS)
    try:
        with connected(master.metrics_address, 1, b"GET /met") as found:
            assert found[0].recv(1) == b""
    finally:
        master.stop()
