"""Whether a job's processes stay as they are: memory, file descriptors and threads of each, for an hour.

    python benchmarks/soak.py [--minutes=60] [--data_dir=DIR]

Trains the recommender of benchmarks/chaos.py, with evaluation passes, checkpoints and recovery files, samples each
process, and ends the job by Ctrl-C. Prints a Markdown table: the median of the second tenth of the time, when all is
compiled and every file is open, against that of the last tenth. Ends with 1 when a process has grown by more than 5 %
and 20 MB, or has more files open.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from statistics import median

import psutil
from chaos import start, write_data
from report import machine, publish, table_parser

ROLES = {"master": "master", "worker": "worker", "ps": "parameter server"}
MB = 1_000_000
GROWTH, SLACK_MB = 1.05, 20


def main() -> int:
    parser = table_parser(__doc__)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--interval", type=float, default=10, help="seconds between two samples")
    parser.add_argument(
        "--data_dir", type=Path, help="directory that holds ml-100k/u.data; without it ratings are made"
    )
    arguments = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell makes what it starts in the background ignore it
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_data(folder, arguments.data_dir)
        # An hour would be some hundred epochs.
        job = start(folder, folder, 100_000, f"--checkpoint_dir={folder / 'checkpoints'}", "--checkpoint_steps=2000")
        samples = watch(job, folder / "output", 60 * arguments.minutes, arguments.interval)
        text, wrong = table(samples)
        job.send_signal(signal.SIGINT)
        code = job.wait()
        output = (folder / "output").read_text()
    if code != 128 + signal.SIGINT:
        print(output[-5000:])
        wrong.append(f"The job ended with {code}")
    versions = re.findall(r"version ([\d,]+)", output)[-1]
    about = f"{machine()}; {arguments.minutes:g} minutes, {versions} updates, a sample each {arguments.interval:g} s:"
    publish("soak", f"{about}\n\n{text}", arguments.into)
    for line in wrong:
        print(f"WRONG: {line}")
    return 1 if wrong else 0


def watch(job: subprocess.Popen[bytes], output: Path, seconds: float, interval: float) -> dict[str, list[list[float]]]:
    """Memory in MB (its own, and resident), descriptors and threads of each process, from epoch 1 on."""
    while "epoch 1" not in output.read_text():
        if job.poll() is not None:
            raise SystemExit(output.read_text()[-5000:])
        time.sleep(1)
    processes = [psutil.Process(job.pid), *psutil.Process(job.pid).children(recursive=True)]
    names = [f"{name(process, job.pid)} ({process.pid})" for process in processes]
    samples = defaultdict(list)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for label, process in zip(names, processes, strict=True):
            with process.oneshot():
                memory = process.memory_info().rss / MB
                samples[label].append([own_memory(process.pid), memory, process.num_fds(), process.num_threads()])
        time.sleep(interval)
    return samples


def own_memory(pid: int) -> float:
    """MB that the process has written to and shares with nobody. Pages of libraries, which count as its own as soon as
    the last other program that has them open ends, are left out."""
    found = re.search(r"Private_Dirty: +(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text())
    assert found
    return int(found[1]) * 1024 / MB


def name(process: psutil.Process, launcher: int) -> str:
    if process.pid == launcher:
        return "launcher"
    return ROLES.get(process.name().partition("-")[0], "zygote")


def table(samples: dict[str, list[list[float]]]) -> tuple[str, list[str]]:
    """The Markdown, and what has grown, in words."""
    lines = ["| process | memory of its own, MB | resident, MB | file descriptors | threads |", "|---" * 5 + "|"]
    wrong = []
    for label, rows in samples.items():
        tenth = max(1, len(rows) // 10)
        before = [median(column) for column in zip(*rows[tenth : 2 * tenth], strict=True)]
        after = [median(column) for column in zip(*rows[-tenth:], strict=True)]
        cells = [f"{old:,.0f} -> {new:,.0f}" for old, new in zip(before, after, strict=True)]
        lines.append(f"| {' | '.join([label, *cells])} |")
        if after[0] > max(GROWTH * before[0], before[0] + SLACK_MB):
            wrong.append(f"{label} has grown from {before[0]:.0f} MB to {after[0]:.0f} MB")
        if after[2] > before[2]:
            wrong.append(f"{label} has {after[2]:.0f} files open, and had {before[2]:.0f}")
    return "\n".join(lines), wrong


if __name__ == "__main__":
    sys.exit(main())
