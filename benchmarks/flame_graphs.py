"""Flame graphs of a worker and of a parameter server at steady state, by py-spy.

    python benchmarks/flame_graphs.py [--workload=mlp] [--batch_size=128] [--seconds=10]

Writes docs/images/flame-worker.svg and flame-server.svg: time on the processor by Python's stacks, sampled 100 times
a second in one worker and in the server of a cluster of one each. py-spy needs the right to look into processes that
it has not started: run it as root, or with the capability SYS_PTRACE.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path

from contestants import elastic
from throughput import QUICK, started

IMAGES = Path(__file__).resolve().parent.parent / "docs" / "images"
# What tells a role in a command line.
ROLES = {"worker": "worker-", "server": "ps-"}  # by the beginning of the process's name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workload", default="mlp")
    parser.add_argument("--batch_size", type=int, default=128)
    parser.add_argument("--staleness", type=int, default=1)
    parser.add_argument("--seconds", type=int, default=10)
    parser.add_argument("--native", action="store_true", help="with the stacks of C and C++; larger files")
    parser.add_argument("--output", type=Path, default=IMAGES)
    arguments = parser.parse_args()
    spy = shutil.which("py-spy", path=str(Path(sys.executable).parent)) or shutil.which("py-spy")
    if spy is None:
        parser.error('py-spy is not installed: pip install -e ".[bench]"')
    arguments.output.mkdir(parents=True, exist_ok=True)
    contestant = elastic("elastic1", 1, max_staleness=arguments.staleness)
    with started(arguments.workload, arguments.batch_size, [contestant], QUICK) as (runner,):
        runner.gate.open()
        for role, begin in ROLES.items():
            pids = [pid for name, pid in runner.tree.names() if name.startswith(begin)]
            if len(pids) != 1:
                raise SystemExit(f"{len(pids)} processes look like a {role}; one was expected.")
            target = arguments.output / f"flame-{role}.svg"
            command = [spy, "record", "--pid", str(pids[0]), "--output", str(target), "--format", "flamegraph"]
            command += ["--duration", str(arguments.seconds), "--rate", "100", "--threads"]
            subprocess.run([*command, *(["--native"] if arguments.native else [])], check=True)
            # The title is py-spy's command line, with paths of this machine.
            title = f"{role}: {arguments.workload}, batch {arguments.batch_size}"
            svg = re.sub(r'(id="title"[^>]*>)[^<]*', rf"\g<1>{title}", target.read_text())
            target.write_text(svg)
            print(f"{target}: {target.stat().st_size / 1024:.0f} KiB", flush=True)


if __name__ == "__main__":
    main()
