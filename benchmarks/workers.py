"""How the throughput of ElasticCB holds with more workers, without shared memory, with TLS, over a network with a round
trip of 1 ms, and over one of 1 Gbit/s.

    python benchmarks/workers.py [--quick] [--workload=mlp] [--batch_size=128]
    python benchmarks/workers.py --workload=deepfm --workers=2,4,8 --networks="TCP with TLS, 1 Gbit/s" \\
        --updates="local;local, bfloat16"

1, 2 and 4 workers with one server on the cores of this machine: with shared memory, as processes of one machine have
it; by only Unix sockets; by TCP without TLS and with it; by TCP with a simulated delay of 1 ms in every call; and, for
root, in a network namespace whose loopback carries 1 Gbit/s, all directions together. Each with asynchronous updates of
staleness 0 and 1, and with local updates; --updates names others. The networks take turns, window by window. Prints a
Markdown table of examples/s, medians over windows as in throughput.py.
"""

from __future__ import annotations

import argparse
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from contestants import elastic
from report import machine
from throughput import FULL, QUICK, listed, measure

_DELAYED = str(Path(__file__).resolve().parent / "delayed")
_UNSHARED = {"BENCHMARK_DELAY_MS": "0"}
_TCP = {"BENCHMARK_HOST": "127.0.0.1"}
NETWORKS = {  # title: folders on Python's path, environment
    "shared memory": ((), {}),
    "Unix sockets": ((_DELAYED,), _UNSHARED),
    "TCP without TLS": ((_DELAYED,), _UNSHARED | _TCP | {"BENCHMARK_INSECURE": "1"}),
    "TCP with TLS": ((_DELAYED,), _UNSHARED | _TCP),
    "TCP with TLS, 1 ms": ((_DELAYED,), _TCP | {"BENCHMARK_DELAY_MS": "1"}),
}
_NAMESPACE = f"benchmark-{os.getpid()}"
if os.geteuid() == 0:
    NETWORKS["TCP with TLS, 1 Gbit/s"] = ((_DELAYED,), _UNSHARED | _TCP | {"BENCHMARK_NAMESPACE": _NAMESPACE})
UPDATES: dict[str, dict[str, Any]] = {
    "async": {},
    "async, staleness 1": {"max_staleness": 1},
    "local": {"updates": "local"},
}
MORE_UPDATES: dict[str, dict[str, Any]] = {  # measured when they are asked for
    f"local{staleness}{rounding}": {"updates": "local", **late, **rounded}
    for staleness, late in (("", {}), (", staleness 1", {"max_staleness": 1}))
    for rounding, rounded in (("", {}), (", bfloat16", {"wire_dtype": "bfloat16"}))
    if late or rounded
}


@contextmanager
def slow_link() -> Iterator[None]:
    """While it lasts, root has the namespace."""
    if os.geteuid():
        yield
        return
    inside = ("ip", "netns", "exec", _NAMESPACE)
    subprocess.run(("ip", "netns", "add", _NAMESPACE), check=True)
    try:
        subprocess.run((*inside, "ip", "link", "set", "lo", "up"), check=True)
        shape = "tc qdisc add dev lo root tbf rate 1gbit burst 256kb latency 100ms"
        subprocess.run((*inside, *shape.split()), check=True)
        yield
    finally:
        subprocess.run(("ip", "netns", "delete", _NAMESPACE), check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workload", default="mlp")
    parser.add_argument("--batch_size", type=int, default=128)
    parser.add_argument("--workers", default="1,2,4")
    updates = UPDATES | MORE_UPDATES
    parser.add_argument("--updates", default=";".join(UPDATES), help=f"some of, with semicolons: {'; '.join(updates)}")
    parser.add_argument("--networks", default=";".join(NETWORKS), help="some of, with semicolons: %(default)s")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter windows")
    arguments = parser.parse_args()
    workers = [int(count) for count in arguments.workers.split(",")]
    plan = QUICK if arguments.quick else FULL
    counts = "".join(f" {count} workers |" if count > 1 else " 1 worker |" for count in workers)
    lines = [f"{machine()}:\n", f"| {arguments.workload}, batch {arguments.batch_size} | updates |{counts}"]
    lines.append("|---|---|" + "---|" * len(workers))
    networks = listed(parser, "networks", arguments.networks, NETWORKS, ";")
    for title_of_updates in listed(parser, "updates", arguments.updates, updates, ";"):
        rates = dict.fromkeys(networks, "")
        for count in workers:
            contestant = elastic(f"elastic{count}", count, "", **updates[title_of_updates])
            contestants = [
                replace(contestant, key=f"elastic{count}-{number}", title=title, path=path, environment=environment)
                for number, (title, (path, environment)) in enumerate(NETWORKS.items())
                if title in networks
            ]
            with slow_link():
                runners = measure(arguments.workload, arguments.batch_size, contestants, plan)
            for runner in runners:
                rates[runner.contestant.title] += f" {median(runner.rates):,.0f} |"
        lines += [f"| {title} | {title_of_updates} |{measured}" for title, measured in rates.items()]
    print("\n" + "\n".join(lines), flush=True)


if __name__ == "__main__":
    main()
