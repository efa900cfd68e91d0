"""Milliseconds that the end of an epoch costs in `Cluster.fit` on arrays.

    python benchmarks/epochs.py [--workloads=mlp,deepfm] [--batch_size=128] [--workers=2] [--rounds=3]

The same records are trained as several epochs of 200 steps, and as one epoch of as many; the end of an epoch costs the
difference, by epoch. Calls take turns; medians, without the first call, which builds and traces.
"""

from __future__ import annotations

import os
import statistics
import time
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
from report import machine, publish, table_parser
from workloads import compiled_model, module_of

import elasticcb

STEPS, EPOCHS = 200, 6
VALIDATED = 10  # batches


def records(workload: str, number: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """That many records of the workload's arrays, again and again."""
    arrays = module_of(workload).arrays(np.random.default_rng(0))
    rows = {name: np.resize(array, (number, *array.shape[1:])) for name, array in arrays.items()}
    labels = rows.pop("labels")
    return rows, labels


def first(data: tuple[dict[str, np.ndarray], np.ndarray], number: int) -> tuple[Any, np.ndarray]:
    """The first records, as `fit` takes them."""
    rows = {name: array[:number] for name, array in data[0].items()}
    return (next(iter(rows.values())) if len(rows) == 1 else rows), data[1][:number]


def measure(workload: str, batch_size: int, workers: int, validates: bool, rounds: int) -> str:
    """A line of the table."""
    records_of_all = EPOCHS * STEPS * batch_size
    data = records(workload, records_of_all)
    options: dict[str, Any] = {"batch_size": batch_size, "verbose": 0}
    if validates:
        options["validation_data"] = first(data, VALIDATED * batch_size)
    model = compiled_model(workload, legacy=False)
    found: list[tuple[float, float]] = []
    with elasticcb.Cluster(workers) as cluster:
        for _ in range(rounds + 1):
            seconds = []
            for epochs in (EPOCHS, 1):
                started = time.perf_counter()
                cluster.fit(model, *first(data, records_of_all // epochs), epochs=epochs, **options)
                seconds.append(time.perf_counter() - started)
            found.append((seconds[0], seconds[1]))
    speed = statistics.median(records_of_all / several for several, _ in found[1:])
    end = statistics.median((several - one) / (EPOCHS - 1) * 1000 for several, one in found[1:])
    return f"| {workload} {batch_size} | {'yes' if validates else 'no'} | {speed:,.0f} | {end:.0f} |"


def main() -> None:
    parser = table_parser(__doc__ or "")
    parser.add_argument("--workloads", default="mlp,deepfm")
    parser.add_argument("--batch_size", type=int, default=128)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    header = f"| {given.workers} workers | validation | examples/s, whole epochs | end of an epoch, ms |"
    lines = [f"{machine()}:", "", header, "|---|---|---|---|"]
    for workload in given.workloads.split(","):
        for validates in (False, True):
            lines.append(measure(workload, given.batch_size, given.workers, validates, given.rounds))
    publish("epochs", "\n".join(lines), given.into)


if __name__ == "__main__":
    main()
