"""An exchange with a server: bytes per second, as a share of what copying memory reaches.

A client process pushes gradients of the given size and pulls weights of the same size; the server hands back an array
that it has, so that what is measured is the way of the bytes: `python -m benchmarks.exchange --megabytes 64`. The ways
take turns: memory that both share, its own connections without TLS and with it, and gRPC without TLS and with it.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import tempfile
import time
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np

from elasticcb.proto import elasticcb_pb2 as pb
from elasticcb.rpc import shared_frames
from elasticcb.rpc.connection import Connection
from elasticcb.rpc.frame_service import FrameService
from elasticcb.rpc.server import Server
from elasticcb.rpc.services import Method
from elasticcb.rpc.tensors import Frame
from elasticcb.security.credentials import Access
from elasticcb.security.tls import make_ca

ECHO = Method("benchmark.Exchange", "Exchange", pb.ExchangeRequest, pb.ExchangeResponse, transient=True)


def serve(pipe: Any, size: int, accesses: list[Access]) -> None:
    weights = np.ones(size // 4, np.float32)

    def exchange(request: Frame[Any]) -> Frame[Any]:
        return Frame(pb.ExchangeResponse(), {"weights": weights} if request.header.pull else {})

    servers = [Server(access=access) for access in accesses]
    for server in servers:
        server.add(FrameService({ECHO: exchange}))
        server.start()
    pipe.send([server.address for server in servers])
    pipe.recv()
    for server in servers:
        server.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=float, default=64, help="of the gradients, and of the weights")
    parser.add_argument("--repetitions", type=int, default=50)
    given = parser.parse_args()
    size = int(given.megabytes * (1 << 20)) // 4 * 4
    accesses = [Access("token"), Access("token", make_ca(tempfile.mkdtemp()))]
    context = multiprocessing.get_context("spawn")
    pipe, other = context.Pipe()
    process = context.Process(target=serve, args=(other, size, accesses))
    process.start()
    addresses = pipe.recv()
    gradients, target = np.ones(size // 4, np.float32), np.empty(size // 4, np.float32)
    whole = replace(ECHO, shared=False)
    connections: dict[str, tuple[Connection, Method]] = {}

    def connect(title: str, server: int, method: Method = ECHO) -> None:
        connections[title] = Connection(addresses[server], "the server", access=accesses[server]), method
        for _ in range(3):  # the memory grows
            exchange(title)

    def exchange(title: str, pull: bool = True) -> float:
        connection, method = connections[title]
        frame = Frame(pb.ExchangeRequest(pull=pull), {"gradients": gradients} if pull else {})
        begun = time.perf_counter()
        connection.call(method, frame)
        return time.perf_counter() - begun

    connect("shared memory", 0)
    with mock.patch.object(shared_frames, "is_supported", return_value=False):  # as on another machine
        connect("stream", 0)
        connect("stream with TLS", 1)
        connect("gRPC", 0, whole)
        connect("gRPC with TLS", 1, whole)
    seconds: dict[str, list[float]] = {title: [] for title in connections}
    empty: dict[str, list[float]] = {title: [] for title in connections}
    copying = []
    for _ in range(given.repetitions):
        begun = time.perf_counter()
        np.copyto(target, gradients)
        copying.append(time.perf_counter() - begun)
        for title in connections:
            seconds[title].append(exchange(title))
            empty[title] += [exchange(title, pull=False) for _ in range(10)]
    copy = statistics.median(copying)
    print(f"{'memcpy':16} {size / copy / 1e9:6.2f} GB/s")
    for title in connections:
        middle, call = statistics.median(seconds[title]), statistics.median(empty[title])
        print(
            f"{title:16} {2 * size / middle / 1e9:6.2f} GB/s, {middle * 1e3:7.2f} ms an exchange, "
            f"{2 * copy / middle:.0%} of memcpy; without arrays {call * 1e6:4.0f} us"
        )
    pipe.send(None)
    process.join()
    for connection, _ in connections.values():
        connection.close()


if __name__ == "__main__":
    main()
