"""What an update costs workers and parameter servers: the numbers that docs/operations.md sizes a job by.

    python benchmarks/sizing.py [--seconds=10] [--servers=1,2]

Trains with one worker. Prints a Markdown table of updates/s, processor time of an update and memory by role, and of
how many workers one server can do with, by the formula of that page.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import psutil
from contestants import elastic
from report import machine, publish, table_parser
from throughput import QUICK, Runner, started
from workloads import WORKLOADS

_SETTLING_SECONDS = 3.0
_ROLES = ("worker", "ps")
_WORKERS, _SERVERS = 1.2, 2.0  # times as many as their processors could do with


@dataclass
class Cost:
    """Of a job with one worker."""

    updates: float  # a second
    cpu: dict[str, float]  # seconds of an update, by role, of all its processes
    memory: dict[str, float]  # resident bytes of one process


def main() -> None:
    parser = table_parser(__doc__)
    parser.add_argument("--batch_sizes", default="128,1024")
    parser.add_argument("--servers", default="1,2")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement")
    arguments = parser.parse_args()
    servers = [int(count) for count in arguments.servers.split(",")]
    contestants = [elastic(f"servers{count}", 1, num_ps=count) for count in servers]
    titles: tuple[str, ...] = ("model, batch", "servers", "updates/s")
    titles += ("worker, ms of an update", "servers, ms of an update")
    titles += ("worker, MB", "each server, MB", "workers for each server")
    lines = [f"{machine()}; one worker, {arguments.seconds:g} s each:\n", f"| {' | '.join(titles)} |"]
    lines.append("|---" * len(titles) + "|")
    for workload in WORKLOADS:
        for batch_size in map(int, arguments.batch_sizes.split(",")):
            with started(workload, batch_size, contestants, QUICK) as runners:
                for count, runner in zip(servers, runners, strict=True):
                    cost = measure(runner, arguments.seconds)
                    ratio = _WORKERS * cost.cpu["worker"] / (_SERVERS * cost.cpu["ps"])
                    lines.append(
                        f"| {workload}, {batch_size} | {count} | {cost.updates:,.0f} | {1e3 * cost.cpu['worker']:.1f} "
                        f"| {1e3 * cost.cpu['ps']:.1f} | {cost.memory['worker'] / 1e6:,.0f} "
                        f"| {cost.memory['ps'] / 1e6:,.0f} | {ratio:.1f} |"
                    )
    publish("sizing", "\n".join(lines), arguments.into)


def measure(runner: Runner, seconds: float) -> Cost:
    """Of a runner that is warm and held; it is held again afterwards."""
    processes = {role: _processes(runner, role) for role in _ROLES}
    runner.gate.open()
    time.sleep(_SETTLING_SECONDS)
    begin, steps, cpu = time.monotonic(), runner.steps, _cpu_seconds(processes)
    time.sleep(seconds)
    end, steps, after = time.monotonic(), runner.steps - steps, _cpu_seconds(processes)
    runner.gate.close()
    runner.check()
    memory = {role: float(max(each.memory_info().rss for each in found)) for role, found in processes.items()}
    return Cost(steps / (end - begin), {role: (after[role] - cpu[role]) / steps for role in _ROLES}, memory)


def _processes(runner: Runner, role: str) -> list[psutil.Process]:
    return [psutil.Process(number) for name, number in runner.tree.names() if name.startswith(f"{role}-")]


def _cpu_seconds(processes: dict[str, list[psutil.Process]]) -> dict[str, float]:
    times = {role: [each.cpu_times() for each in found] for role, found in processes.items()}
    return {role: sum(each.user + each.system for each in found) for role, found in times.items()}


if __name__ == "__main__":
    main()
