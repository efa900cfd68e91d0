"""Seconds from the command to the first training step, and where they go.

    python benchmarks/startup.py [--runs 5]

Starts `elasticcb train` on the digits (2 workers, 1 parameter server), each time from scratch, and reads the
times at which each process logged that it got somewhere. Then the same for a Python program, from
`Cluster()` to the end of its first epoch of two batches. Medians over the runs.

CPU seconds are those of all processes, to the end of the job: unlike the times, they say the same on a busy machine.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
MILESTONES = (
    ("master", "Started", "the command line is checked"),
    ("worker-0", "Started", "worker 0 runs"),
    ("worker-0", "TensorFlow is imported", "worker 0 has imported TensorFlow"),
    ("ps-0", "TensorFlow is imported", "the parameter server has imported TensorFlow"),
    ("master", "The model is built", "the master has imported TensorFlow and built the model"),
    ("worker-0", "The model is built", "worker 0 has built the model"),
    ("master", "The servers hold the model", "the parameter server holds the model"),
    ("worker-0", "The first step is done", "worker 0 has compiled and done its first step"),
)


def run_once() -> dict[tuple[str, str], float]:
    """Seconds after the start of the command, by milestone."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "elasticcb", "train", f"--config={REPOSITORY / 'model_zoo/digits/job.yaml'}"]
        started = time.time()
        subprocess.run(
            [*command, f"--job_dir={folder}/job", f"--output={folder}/model", "--num_epochs=1"],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        seconds = {}
        for role, text, _ in MILESTONES:
            log = Path(folder, "job", "logs", f"{role}.log").read_text(errors="replace")
            found = re.search(rf"^(\S+)\.(\d+)Z {role} I \S+: {text}", log, re.MULTILINE)
            if found is None:
                raise SystemExit(f"{role}.log has no line {text!r}:\n{log}")
            at = (
                datetime.datetime.strptime(found[1], "%Y-%m-%dT%H:%M:%S")
                .replace(tzinfo=datetime.timezone.utc)
                .timestamp()
                + int(found[2]) / 1000
            )
            seconds[role, text] = at - started
        return seconds


PROGRAM = """
import time
import keras, numpy as np
import elasticcb
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
x = np.ones((64, 4), "float32")
started = time.perf_counter()
with elasticcb.Cluster() as cluster:
    cluster.fit(model, x, x[:, :1], verbose=0)
    print(time.perf_counter() - started)
"""


def run_program() -> float:
    """Seconds from `Cluster()` to the end of the first epoch."""
    command = [sys.executable, "-c", PROGRAM]
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
        result = subprocess.run(command, check=True, capture_output=True, text=True, cwd=folder, env=environment)
    return float(result.stdout.split()[-1])


def cpu_seconds() -> float:
    """Of all processes up to now."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args()
    run_once()  # file caches
    runs, programs, cpu = [], [], []
    for _ in range(arguments.runs):
        before = cpu_seconds()
        runs.append(run_once())
        cpu.append(cpu_seconds() - before)
        programs.append(run_program())
    print(f"| seconds from the start (median of {len(runs)}, lowest - highest) | |\n|---|---|")
    for role, text, meaning in MILESTONES:
        print(f"| {spread([run[role, text] for run in runs])} | {meaning} |")
    print(f"| {spread(cpu)} | CPU seconds of the whole job, one epoch |")
    print(f"| {spread(programs)} | a Python program: from `Cluster()` to the end of the first epoch |")


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.1f} ({min(values):.1f} - {max(values):.1f})"


if __name__ == "__main__":
    main()
