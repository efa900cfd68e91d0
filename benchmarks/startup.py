"""Seconds from the command to the first training step, and where they go.

    python benchmarks/startup.py [--runs 5]

Starts `elasticcb train` on the digits (2 workers, 1 parameter server), each time anew, and reads the
times at which each process logged that it got somewhere. Medians over the runs.
"""

from __future__ import annotations

import argparse
import datetime
import re
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
            found = re.search(rf"^(\S+ \S+),(\d+) {role} I \S+: {text}", log, re.MULTILINE)
            if found is None:
                raise SystemExit(f"{role}.log has no line {text!r}:\n{log}")
            at = datetime.datetime.strptime(found[1], "%Y-%m-%d %H:%M:%S").timestamp() + int(found[2]) / 1000
            seconds[role, text] = at - started
        return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args()
    run_once()  # file caches
    runs = [run_once() for _ in range(arguments.runs)]
    print(f"| after so many seconds (median of {len(runs)}, lowest - highest) | |\n|---|---|")
    for role, text, meaning in MILESTONES:
        values = sorted(run[role, text] for run in runs)
        print(f"| {statistics.median(values):.1f} ({values[0]:.1f} - {values[-1]:.1f}) | {meaning} |")


if __name__ == "__main__":
    main()
