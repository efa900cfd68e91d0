"""Whole epochs of `Cluster.fit` on arrays: what their end costs, and their speed next to `fit`.

    python benchmarks/epochs.py [--workloads=mlp,deepfm] [--batch_size=128] [--workers=2] [--rounds=3] [--next_to_fit]

The same records are trained as several epochs of 200 steps, and as one epoch of as many; the end of an epoch costs the
difference, by epoch. Calls take turns; medians, without the first call, which builds and traces.

With `--next_to_fit`: examples/s of epochs of 400 steps with what lies between them, in one process of `tf_keras` and on
the workers, in turns, each in a process of its own. (Keras 3 is as fast without embeddings, far slower with them.)
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import subprocess
import sys
import time
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
from report import machine, publish, table_parser
from workloads import compiled_model, module_of

import elasticcb

STEPS, EPOCHS = 200, 6
STEPS_NEXT = 400
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


def rate(contestant: str, workload: str, batch_size: int, workers: int) -> float:
    """Examples/s in whole epochs, without the first: the time of several epochs less that of one."""
    number = STEPS_NEXT * batch_size
    rows, labels = first(records(workload, number), number)
    model = compiled_model(workload, legacy=contestant == "tf_keras")
    cluster = elasticcb.Cluster(workers) if contestant == "elasticcb" else None
    seconds = {}
    for epochs in (1, 1, 1 + EPOCHS):  # the first call builds and traces
        fit = model.fit if cluster is None else functools.partial(cluster.fit, model)
        started = time.perf_counter()
        fit(rows, labels, batch_size=batch_size, epochs=epochs, verbose=0)
        seconds[epochs] = time.perf_counter() - started
    if cluster is not None:
        cluster.close()
    return EPOCHS * number / (seconds[1 + EPOCHS] - seconds[1])


def next_to_fit(workload: str, batch_size: int, workers: int, rounds: int) -> str:
    """A line of the table."""
    found: dict[str, list[float]] = {"tf_keras": [], "elasticcb": []}
    for _ in range(rounds):
        for contestant, rates in found.items():
            command = [sys.executable, __file__, f"--one={contestant}", f"--workloads={workload}"]
            command += [f"--batch_size={batch_size}", f"--workers={workers}"]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            rates.append(float(done.stdout.split()[-1]))
    medians = {name: statistics.median(rates) for name, rates in found.items()}
    shown = " | ".join(f"{value:,.0f}" for value in medians.values())
    return f"| {workload} {batch_size} | {shown} | {medians['elasticcb'] / medians['tf_keras']:.2f} |"


def main() -> None:
    parser = table_parser(__doc__ or "")
    parser.add_argument("--workloads", default="mlp,deepfm")
    parser.add_argument("--batch_size", type=int, default=128)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--next_to_fit", action="store_true")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(rate(given.one, given.workloads, given.batch_size, given.workers))
        return
    if given.next_to_fit:
        header = f"| {STEPS_NEXT} steps an epoch, examples/s | `tf_keras` | {given.workers} workers | ratio |"
        lines = [f"{machine()}:", "", header, "|---|---|---|---|"]
        for workload in given.workloads.split(","):
            lines.append(next_to_fit(workload, given.batch_size, given.workers, given.rounds))
        publish("epochs next to fit", "\n".join(lines), given.into)
        return
    header = f"| {given.workers} workers | validation | examples/s, whole epochs | end of an epoch, ms |"
    lines = [f"{machine()}:", "", header, "|---|---|---|---|"]
    for workload in given.workloads.split(","):
        for validates in (False, True):
            lines.append(measure(workload, given.batch_size, given.workers, validates, given.rounds))
    publish("epochs", "\n".join(lines), given.into)


if __name__ == "__main__":
    main()
