"""Batches that a worker gets from the process that calls `fit`: of a generator, by the number of bytes in a batch.

A worker's process reads them one after another and does nothing else: `python -m benchmarks.served_batches`.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np

from elasticcb.clients.master import MasterClient
from elasticcb.data.batch_sources.adapt import adapt
from elasticcb.data.batch_sources.service import DataService
from elasticcb.rpc.server import Server
from elasticcb.security.credentials import Access

ACCESS = Access("the token of the benchmark")


def generated(size: int) -> Iterator[Any]:
    features, labels = np.ones((32, max(size // 128, 1)), np.float32), np.zeros(32, np.float32)
    while True:
        yield features, labels


def read(address: str, data: bytes, counts: list[int], pipe: Any) -> None:
    client, source = MasterClient(address, access=ACCESS), cloudpickle.loads(data)
    source.connect(client.next_batch)
    for epoch, count in enumerate(counts):
        begun = time.perf_counter()
        assert sum(1 for _ in source.batches(epoch, 0, count)) == count
        pipe.send(count / (time.perf_counter() - begun))
    client.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kilobytes", type=int, nargs="+", default=[4, 256, 16_384])
    parser.add_argument("--seconds", type=float, default=2.0, help="of a repetition, about")
    parser.add_argument("--repetitions", type=int, default=5)
    given = parser.parse_args()
    service, server = DataService(), Server(access=ACCESS)
    server.add(service.frames())
    server.start()
    context = multiprocessing.get_context("spawn")
    for size in given.kilobytes:
        count = max(int(given.seconds * min(2_000, 1e6 / size)), 20)
        with tempfile.TemporaryDirectory() as folder:
            source = adapt(
                generated(size << 10), purpose="fit", steps=count, folder=Path(folder), seed=1, service=service
            )
        pipe, other = context.Pipe()
        counts = [count] * (given.repetitions + 1)
        process = context.Process(target=read, args=(server.address, cloudpickle.dumps(source), counts, other))
        process.start()
        rates = [pipe.recv() for _ in counts][1:]  # after a warm-up
        process.join()
        source.close()
        print(f"{size:7,} KiB {statistics.median(rates):9,.0f} batches/s, of {min(rates):,.0f} to {max(rates):,.0f}")
    server.stop(0.0)


if __name__ == "__main__":
    main()
