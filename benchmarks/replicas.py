"""What `--ps_replicas=1` costs: pushes per second that two servers take from one client that does nothing else.

    python benchmarks/replicas.py [--rounds=15] [--into=docs/reliability.md]

A step pushes gradients and pulls weights as a worker does. `dense`: 2 million weights in two variables, Adam; `tables`:
128 rows of each of two embedding tables of 16 columns, 10,000 dense weights, Adagrad. Servers with and without replicas
run at the same time, each in a process, and take turns: a round is some steps with one pair and some with the other.
Prints a Markdown table. A job pays less, since its workers compute between two pushes.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from statistics import median
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import keras
import numpy as np
from report import machine, publish, table_parser

from elasticcb.clients.ps import PSClient
from elasticcb.clients.ps_places import Places, ServerPlace
from elasticcb.clients.ps_servers import ServerGroup
from elasticcb.master.initial_model import InitialModel
from elasticcb.master.ps_admin import PSControl
from elasticcb.ps.server import PSServer
from elasticcb.settings import ClusterSettings, Command, JobSettings
from elasticcb.sharding.bucket_map import even
from elasticcb.sharding.partition import VariableSpec, block_sizes
from elasticcb.sharding.push import Movement
from elasticcb.sharding.table_spec import TableSpec

ZEROS = json.dumps(keras.saving.serialize_keras_object(keras.initializers.Zeros()))
TABLE = TableSpec(None, ZEROS, 7).to_json()
TABLES = [VariableSpec(f"{name}/rows", (0, 16), "float32", True, table=TABLE) for name in "ab"]
DENSE = [VariableSpec(f"{name}/kernel", (1000, 1000), "float32", True) for name in "ab"]
SMALL = [VariableSpec("c/kernel", (100, 100), "float32", True)]
WORKLOADS: dict[str, tuple[list[VariableSpec], str, int]] = {  # variables, optimizer, steps of a turn
    "dense": (DENSE, "adam", 15),
    "tables": ([*SMALL, *TABLES], "adagrad", 100),
}


def main() -> None:
    parser = table_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    lines = [
        f"{machine()}; {arguments.rounds} rounds:",
        "",
        "| pushes a second, median | without replicas | with replicas | ratio, median of the rounds | its quartiles |",
        "|---|---|---|---|---|",
    ]
    for workload in WORKLOADS:
        lines.append(measured(workload, arguments.rounds))
    publish("replicas", "\n".join(lines), arguments.into)


def measured(workload: str, rounds: int) -> str:
    """A line of the table."""
    _, _, steps = WORKLOADS[workload]
    rates: dict[int, list[float]] = {0: [], 1: []}
    with tempfile.TemporaryDirectory() as folder:
        pairs = {replicas: Pair(workload, os.path.join(folder, str(replicas)), replicas) for replicas in rates}
        try:
            for pair in pairs.values():
                pair.run(steps)  # compiles
            for number in range(rounds):
                for replicas in (0, 1) if number % 2 else (1, 0):
                    rates[replicas].append(pairs[replicas].run(steps))
        finally:
            for pair in pairs.values():
                pair.close()
    ratios = sorted(on / off for off, on in zip(rates[0], rates[1], strict=True))
    quartiles = f"{ratios[len(ratios) // 4]:.2f}, {ratios[3 * len(ratios) // 4]:.2f}"
    return f"| {workload} | {median(rates[0]):,.0f} | {median(rates[1]):,.0f} | {median(ratios):.2f} | {quartiles} |"


class Pair:
    """Two servers, and the client that pushes to them."""

    def __init__(self, workload: str, folder: str, replicas: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._specs = WORKLOADS[workload][0]
        self._started = []
        for _ in range(2):
            here, there = context.Pipe()
            process = context.Process(target=serve, args=(there, workload, folder, replicas), daemon=True)
            process.start()
            self._started.append((process, here))
        servers = [ServerPlace(pipe.recv(), 0) for _, pipe in self._started]
        places = Places(servers, even(len(servers)))
        self._control = PSControl(PSClient(ServerGroup(places, self._specs, True)), "training")
        self._control.initialize(InitialModel([np.zeros(spec.shape, "f4") for spec in self._specs]))
        self._client = PSClient(ServerGroup(places, self._specs, True), client_id=1)
        self._client.pull()
        self._step = self._make_step()

    def _make_step(self) -> Callable[[], Any]:
        generator = np.random.default_rng(0)
        sizes = [block_sizes(self._specs, slices, True) for slices in self._client.servers.partition]
        moved = [{dtype: np.full(size, 1e-3, dtype) for dtype, size in each.items()} for each in sizes]
        tables = [index for index, spec in enumerate(self._specs) if spec.table]
        values = np.full((128, 16), 1e-3, np.float32)

        def step() -> None:
            ids = {index: np.unique(generator.integers(0, 10_000, 128)) for index in tables}
            rows = {index: (each, values[: len(each)]) for index, each in ids.items()}
            push = Movement(1, self._client.servers.partition, moved, [{}, {}], [{}, {}], rows)
            self._client.push(push, self._client.versions, ids)

        return step

    def run(self, steps: int) -> float:
        """Steps per second."""
        begun = time.perf_counter()
        for _ in range(steps):
            self._step()
        return steps / (time.perf_counter() - begun)

    def close(self) -> None:
        self._client.servers.close()
        self._control.servers.close()
        for process, _ in self._started:
            process.kill()
            process.join()


def serve(pipe: Any, workload: str, folder: str, replicas: int) -> None:
    cluster = ClusterSettings(num_ps=2, ps_replicas=replicas)
    settings = JobSettings(command=Command.TRAIN, name="replicas", directory=folder, cluster=cluster)
    optimizer = WORKLOADS[workload][1]
    server = PSServer(settings, lambda count: [keras.optimizers.get(optimizer) for _ in range(count)])
    server.start()
    pipe.send(server.address)
    pipe.recv()  # which nothing comes by


if __name__ == "__main__":
    main()
