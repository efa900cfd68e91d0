"""Milliseconds of short calls on a running cluster, compared with Keras.

    python benchmarks/small_calls.py [--rounds 30] [--into docs/benchmarks.md]

A Sequential model of two layers: `fit` of one epoch of 8 batches, `evaluate` of the same records, `predict` of one
record. Keras and the cluster take turns; medians of the rounds, and the fastest.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
from report import machine, publish, table_parser

import elasticcb

WARM_UP = 3  # rounds


def make_model() -> keras.Model:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, activation="relu"), keras.layers.Dense(1)])
    model.compile("adam", "mse", metrics=["mae"])
    return model


def milliseconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return (time.perf_counter() - started) * 1000


def measure(rounds: int) -> dict[str, dict[str, list[float]]]:
    """Milliseconds of all rounds, by method and contestant."""
    x = np.random.default_rng(0).random((256, 8), dtype=np.float32)
    y = x.sum(axis=1, keepdims=True)
    alone, served = make_model(), make_model()
    found: dict[str, dict[str, list[float]]] = {}
    with elasticcb.Cluster() as cluster:
        calls: dict[str, dict[str, Callable[[], object]]] = {
            "fit, 8 batches": {
                "Keras": lambda: alone.fit(x, y, verbose=0),
                "Cluster": lambda: cluster.fit(served, x, y, verbose=0),
            },
            "evaluate, 8 batches": {
                "Keras": lambda: alone.evaluate(x, y, verbose=0),
                "Cluster": lambda: cluster.evaluate(served, x, y, verbose=0),
            },
            "predict, 1 record": {
                "Keras": lambda: alone.predict(x[:1], verbose=0),
                "Cluster": lambda: cluster.predict(served, x[:1], verbose=0),
            },
        }
        for number in range(WARM_UP + rounds):
            for method, contestants in calls.items():
                for name, call in contestants.items():
                    taken = milliseconds(call)
                    if number >= WARM_UP:
                        found.setdefault(method, {}).setdefault(name, []).append(taken)
    return found


def main() -> None:
    parser = table_parser(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=30)
    arguments = parser.parse_args()
    rows = [
        f"| {method} | "
        + " | ".join(f"{statistics.median(taken):.0f} ({min(taken):.0f})" for taken in contestants.values())
        + " |"
        for method, contestants in measure(arguments.rounds).items()
    ]
    header = f"{machine()}; medians of {arguments.rounds} rounds, in ms (fastest):"
    table = ["| | Keras | `Cluster`, 1 worker and 1 server |", "|---|---|---|", *rows]
    publish("small_calls", "\n".join([header, "", *table]), arguments.into)


if __name__ == "__main__":
    main()
