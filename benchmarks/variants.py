"""Steps/s of jobs that differ in one thing: the threads of TensorFlow, or how many embedding tables hold the same rows.

    python benchmarks/variants.py threads [--quick]
    python benchmarks/variants.py tables [--quick]

`threads`: the mlp workload, where TF_NUM_INTRAOP_THREADS of all processes is 1, 2 and 4. `tables`: deepfm on
`elasticcb.layers.Embedding` with two tables, and with two for each of 26 columns; 100,000 ids in all. One worker, one
server; the jobs take turns, as in throughput.py.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from statistics import median

from contestants import Contestant, elastic
from report import machine
from throughput import FULL, QUICK, measure

THREADS = ("1", "2", "4")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["threads", "tables"])
    parser.add_argument("--batch_size", type=int, default=128)
    parser.add_argument("--quick", action="store_true", help="fewer and shorter windows")
    arguments = parser.parse_args()
    plan = QUICK if arguments.quick else FULL
    workload, contestants = threads() if arguments.what == "threads" else tables()
    runners = measure(workload, arguments.batch_size, contestants, plan)
    first = median(runners[0].rates)
    lines = [
        f"{machine()}; {workload}, batch {arguments.batch_size}; medians of {plan.windows} windows:\n",
        "| | steps/s (lowest - highest) | to the first | CPU ms a step, all processes |",
        "|---|---|---|---|",
    ]
    for runner in runners:
        lowest, middle, highest = (
            rate / runner.batch_size for rate in (min(runner.rates), median(runner.rates), max(runner.rates))
        )
        lines.append(
            f"| {runner.contestant.title} | {middle:,.0f} ({lowest:,.0f} - {highest:,.0f}) "
            f"| {median(runner.rates) / first:.2f}x | {median(runner.cpu) * runner.batch_size / 1e3:.1f} |"
        )
    print("\n" + "\n".join(lines), flush=True)


def threads() -> tuple[str, list[Contestant]]:
    return "mlp", [
        replace(
            elastic(f"threads{count}", 1),
            title=f"TF_NUM_INTRAOP_THREADS={count}",
            environment={"TF_NUM_INTRAOP_THREADS": count},
        )
        for count in THREADS
    ]


def tables() -> tuple[str, list[Contestant]]:
    few = replace(elastic("tables2", 1), title="2 tables", data="100000")
    many = replace(
        few, key="tables52", title="52 tables", command=lambda _, batch: few.command("deepfm_columns", batch)
    )
    return "deepfm_lazy", [few, many]


if __name__ == "__main__":
    main()
