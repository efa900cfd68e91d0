"""An exchange with a server of this machine: bytes per second, as a share of what copying memory reaches.

A client process pushes gradients of the given size and pulls weights of the same size; the server hands back an array
that it has, so that what is measured is the way of the bytes: `python -m benchmarks.exchange --megabytes 64`.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from typing import Any

import numpy as np

from elasticcb.proto import elasticcb_pb2 as pb
from elasticcb.rpc.connection import Connection
from elasticcb.rpc.frame_service import FrameService
from elasticcb.rpc.server import Server
from elasticcb.rpc.services import Method
from elasticcb.rpc.tensors import Frame

ECHO = Method("benchmark.Exchange", "Exchange", pb.ExchangeRequest, pb.ExchangeResponse, transient=True)


def serve(pipe: Any, size: int) -> None:
    weights = np.ones(size // 4, np.float32)

    def exchange(request: Frame[Any]) -> Frame[Any]:
        return Frame(pb.ExchangeResponse(), {"weights": weights} if request.header.pull else {})

    server = Server()
    server.add(FrameService({ECHO: exchange}))
    server.start()
    pipe.send(server.address)
    pipe.recv()
    server.stop()


def seconds_of(function: Any, repetitions: int) -> float:
    """The median."""
    found = []
    for _ in range(repetitions):
        begun = time.perf_counter()
        function()
        found.append(time.perf_counter() - begun)
    return statistics.median(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=64, help="of the gradients, and of the weights")
    parser.add_argument("--repetitions", type=int, default=50)
    given = parser.parse_args()
    size = given.megabytes << 20
    context = multiprocessing.get_context("spawn")
    pipe, other = context.Pipe()
    process = context.Process(target=serve, args=(other, size))
    process.start()
    connection = Connection(pipe.recv(), "the server")
    method = ECHO
    gradients = np.ones(size // 4, np.float32)

    def exchange(tensors: dict[str, Any], pull: bool = True) -> Any:
        return connection.call(method, Frame(pb.ExchangeRequest(pull=pull), tensors))

    for _ in range(3):  # the segment grows
        exchange({"gradients": gradients})
    whole = seconds_of(lambda: exchange({"gradients": gradients}), given.repetitions)
    control = seconds_of(lambda: exchange({}, pull=False), 20 * given.repetitions)
    target = np.empty_like(gradients)
    copying = seconds_of(lambda: np.copyto(target, gradients), given.repetitions)
    print(f"memcpy             {size / copying / 1e9:6.2f} GB/s")
    print(f"exchange           {2 * size / whole / 1e9:6.2f} GB/s, {2 * copying / whole:.0%} of memcpy")
    print(f"call without arrays{control * 1e6:6.0f} us")
    pipe.send(None)
    process.join()
    connection.close()


if __name__ == "__main__":
    main()
