"""What an update takes on a parameter server with 1, 2 and 4 threads, and how long its first ones take to compile.

    python benchmarks/server_threads.py [--before=DIR] [--into=docs/benchmarks.md]

No network: each measurement is a process of its own that applies the same push again and again, and reads the weights
after it, as a server does. `--before` names another checkout of the project; its processes take turns with those of
this one, and the table has a line of each.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

MODELS = ("mlp, Adam", "mlp, Lamb", "300 variables, Adam")
_WARM = 12  # updates; the eleventh is the first one that XLA compiles


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2, 4], help="TF_NUM_INTRAOP_THREADS")
    parser.add_argument("--updates", type=int, default=200, help="in each measurement")
    parser.add_argument("--repetitions", type=int, default=3, help="measurements of each; their median counts")
    parser.add_argument("--before", type=Path, help="another checkout to compare with")
    parser.add_argument("--into", type=Path, help="page that gets the table between its markers")
    parser.add_argument("--only", help=argparse.SUPPRESS)  # what a process measures
    arguments = parser.parse_args()
    if arguments.only:
        print(json.dumps(measure(arguments.only, arguments.updates)))
        return
    from report import machine, publish

    here = Path(__file__).resolve().parents[1]
    trees = {"before": arguments.before, "now": here} if arguments.before else {"now": here}
    lines = [f"{machine()}; medians of {arguments.repetitions} processes of {arguments.updates} updates:\n"]
    lines += ["| model | | threads | ms an update | CPU ms | s to compile |", "|---|---|---|---|---|---|"]
    for model in arguments.models:
        for threads in arguments.threads:
            found: dict[str, list[dict[str, float]]] = {name: [] for name in trees}
            for _ in range(arguments.repetitions):
                for name, tree in trees.items():
                    found[name].append(run(tree, model, threads, arguments.updates))
            for name, each in found.items():
                wall, cpu, compiling = (median(one[key] for one in each) for key in ("wall", "cpu", "compiling"))
                lines.append(f"| {model} | {name} | {threads} | {1e3 * wall:.2f} | {1e3 * cpu:.2f} | {compiling:.1f} |")
                print(lines[-1], flush=True)
    publish("server_threads", "\n".join(lines), arguments.into)


def run(tree: Path, model: str, threads: int, updates: int) -> dict[str, float]:
    """Measures `tree` in a process of its own."""
    environment = os.environ | {
        "PYTHONPATH": str(tree),
        "TF_NUM_INTRAOP_THREADS": str(threads),
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "CUDA_VISIBLE_DEVICES": "-1",
    }
    command = [sys.executable, __file__, "--only", model, "--updates", str(updates)]
    done = subprocess.run(command, env=environment, cwd=tree, stdout=subprocess.PIPE, text=True, check=True)
    measured: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return measured


def measure(model: str, updates: int) -> dict[str, float]:
    """Seconds of an update, its processor time, and the seconds of the calls that compile."""
    import keras
    import numpy as np

    from elasticcb.ps.parameters import Parameters
    from elasticcb.sharding.partition import VariableSpec, pack, partition
    from elasticcb.sharding.push import Push

    kind, optimizer = model.split(", ")
    sizes = [784, 512, 512, 10] if kind == "mlp" else [32] * 151
    specs = []
    for place, (inputs, units) in enumerate(itertools.pairwise(sizes)):
        specs.append(VariableSpec(f"dense_{place}/kernel", (inputs, units), "float32", True))
        specs.append(VariableSpec(f"dense_{place}/bias", (units,), "float32", True))
    random = np.random.default_rng(0)
    values = [random.normal(size=spec.shape).astype(np.float32) for spec in specs]
    slices = partition(specs, 1, True)[0]

    def make_optimizers(count: int) -> list[Any]:
        return [getattr(keras.optimizers, optimizer)(0.001)]

    parameters = Parameters(specs, slices, make_optimizers, dict(enumerate(values)))
    numbers = tuple(range(len(specs)))
    push = Push(numbers, pack(values, specs, slices, True), {}, updated=frozenset(numbers))

    def update() -> None:
        parameters.apply(push)
        parameters.weights()

    firsts = []
    for _ in range(_WARM):
        begun = time.perf_counter()
        update()
        firsts.append(time.perf_counter() - begun)
    walls = []
    cpu = time.process_time()
    for _ in range(updates):
        begun = time.perf_counter()
        update()
        walls.append(time.perf_counter() - begun)
    cpu = time.process_time() - cpu
    return {"wall": median(walls), "cpu": cpu / updates, "compiling": sum(firsts) - _WARM * median(walls)}


if __name__ == "__main__":
    main()
