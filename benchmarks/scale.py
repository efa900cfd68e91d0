"""How many workers one parameter server carries, in each mode of updates.

    python benchmarks/scale.py [--workers=8,64] [--into=docs/updates.md]

One real server on TCP without TLS gets the pushes of the mlp, round by round. Where workers wait for each other,
each asks for the weights then. What the server's process spends on a push is measured; what it would be with more
workers, and where a core or the link of the server is full, is calculated. Prints a Markdown table.
"""

from __future__ import annotations

import multiprocessing
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np
from report import machine, publish, table_parser

from elasticcb.proto import elasticcb_pb2 as pb
from elasticcb.rpc.connection import Connection
from elasticcb.rpc.services import PS_METHODS
from elasticcb.rpc.tensors import Frame
from elasticcb.settings import Command, JobSettings, ModelSettings, TrainingSettings
from elasticcb.sharding.partition import VariableSpec

MODES = ("async", "sync", "local")
SHAPES = ((784, 512), (512,), (512, 512), (512,), (512, 10), (10,))  # benchmarks/models/mlp.py
SPECS = [VariableSpec(f"layer_{place}/weight", shape, "float32", True) for place, shape in enumerate(SHAPES)]
WEIGHTS = sum(spec.elements for spec in SPECS)
BATCH, LOCAL_STEPS = 128, 16
MOST_WORKERS = 512
_LINKS = (1e9, 1e10)  # bits a second
_WARM_UP = 2  # rounds
_CALL = replace(PS_METHODS["Exchange"], shared=False)


def main() -> None:
    parser = table_parser(__doc__)
    parser.add_argument("--workers", default="8,64")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    workers = [int(count) for count in arguments.workers.split(",")]
    titles: tuple[str, ...] = ("", "workers", "bytes per example", "server, CPU us per example", "a core is full at")
    titles += ("1 Gbit/s is full at", "10 Gbit/s is full at", "of each worker, with a core and 10 Gbit/s")
    lines = [f"{machine()}; mlp of {4 * WEIGHTS / 1e6:.1f} MB, batch {BATCH}, windows of {LOCAL_STEPS}; examples/s:\n"]
    lines += [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    context = multiprocessing.get_context("spawn")
    pipe, other = context.Pipe()
    process = context.Process(target=serve, args=(other,), daemon=True)
    process.start()
    other.close()
    address = pipe.recv()
    for mode in MODES:
        costs = {count: cost(pipe, address, mode, count, arguments.rounds) for count in workers}
        costs[MOST_WORKERS] = costs[max(costs)]
        lines += [line(mode, count, *found) for count, found in costs.items()]
    process.kill()
    publish("scale", "\n".join(lines), arguments.into)


def line(mode: str, workers: int, cpu: float, size: float) -> str:
    """Of the table; `cpu` and `size` as `cost` gives them."""
    full = [1 / cpu, *(speed / 8 / (size / 2) for speed in _LINKS)]  # a link carries as much each way at once
    rates = " | ".join(f"{rate:,.0f}" for rate in [*full, min(full[0], full[-1]) / workers])
    return f"| {mode} | {workers} | {size:,.0f} | {1e6 * cpu:.1f} | {rates} |"


def cost(pipe: Any, address: str, mode: str, workers: int, rounds: int) -> tuple[float, float]:
    """Of an example: seconds of the server's processors, and bytes both ways."""
    pipe.send(mode)
    pipe.recv()
    connections = [Connection(address, "the server") for _ in range(workers)]
    job = Job(mode, workers, connections)
    sizes, seconds = [], []
    for _ in range(_WARM_UP + rounds):
        before = cpu_seconds(pipe)
        sizes.append(job.run_round())
        seconds.append(cpu_seconds(pipe) - before)
    for connection in connections:
        connection.close()
    examples = workers * BATCH * (LOCAL_STEPS if mode == "local" else 1)
    return median(seconds[_WARM_UP:]) / examples, sizes[-1] / examples


def cpu_seconds(pipe: Any) -> float:
    """Of the server, up to now."""
    pipe.send(None)
    return float(pipe.recv())


class Job:
    """The calls of all workers of a job."""

    def __init__(self, mode: str, workers: int, connections: list[Connection]) -> None:
        self._mode, self._workers, self._connections = mode, workers, connections
        self._pool = ThreadPoolExecutor(workers)  # each waits for the others
        self._movement = {"moved/float32": np.full(WEIGHTS, 1e-6, np.float32)}
        self._version = self._newest = self._sequence = 0
        header = pb.InitializeRequest(variables=[spec.to_message() for spec in SPECS], num_ps=1, split=True)
        weights = Frame(header, {"weights/float32": np.zeros(WEIGHTS, np.float32)})
        connections[0].call(replace(PS_METHODS["Initialize"], shared=False), weights)
        for worker in range(1, workers + 1):
            self._exchange(worker, Frame(self._header(worker, joins=True), {}))

    def run_round(self) -> int:
        """Each worker pushes once, and has the weights in the end. Returns the bytes of arrays that went and came."""
        self._sequence += 1
        size = sum(self._pool.map(self._push, range(1, self._workers + 1)))
        self._version = self._newest
        return size

    def _push(self, worker: int) -> int:
        batches = LOCAL_STEPS if self._mode == "local" else 1
        header = self._header(worker, sequence=self._sequence, base=self._version, batches=batches)
        return self._exchange(worker, Frame(header, self._movement))

    def _header(self, worker: int, **fields: Any) -> Any:
        return pb.ExchangeRequest(worker_id=worker, pull=True, known_version=self._version, **fields)

    def _exchange(self, worker: int, request: Frame[Any]) -> int:
        answer = self._connections[worker - 1].call(_CALL, request)
        self._newest = max(self._newest, answer.header.version)
        return sum(array.nbytes for array in (*request.tensors.values(), *answer.tensors.values()))


def serve(pipe: Any) -> None:
    """Begins a job for each mode that comes, and answers None with the seconds of its processors."""
    import keras

    from elasticcb.ps.server import PSServer
    from elasticcb.ps.update_policy import Rounds

    Rounds.LEAST_SECONDS = 60.0  # however long it takes to make the calls of all workers here
    jobs: dict[str, Any] = {"command": Command.TRAIN, "name": "scale", "directory": "", "model": ModelSettings()}

    def make_optimizers(count: int) -> list[Any]:
        return [keras.optimizers.Adam() for _ in range(count)]

    server = PSServer(JobSettings(**jobs), make_optimizers)
    server.start()
    pipe.send(server.address)
    while True:
        job = pipe.recv()
        if job is not None:
            training = TrainingSettings(updates=job)
            server.begin_job(JobSettings(**jobs, training=training), make_optimizers)
        pipe.send(time.process_time())


if __name__ == "__main__":
    main()
