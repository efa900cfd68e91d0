"""Whether training slows down as the vocabulary grows: deepfm on `elasticcb.layers.Embedding`, rows made on first use.

    python benchmarks/vocabulary.py [--quick] [--ids=100000,1000000,10000000,100000000]

Prints a Markdown table of examples/s and memory by the number of ids, with one worker and one server. Ids of a column
lie below a 26th of the vocabulary, and are drawn in three ways. "constant": a batch has as many different ids whatever
the vocabulary: those of zipf(1.2) below 100,000 / 26, which each block of 1,024 examples shifts to another place of the
vocabulary. "zipf": zipf(1.2) up to the vocabulary, of which a batch has more different ids the larger that is.
"uniform": uniform ids. All examples are seen once before the windows, so no rows are made in these.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from statistics import mean, median

import numpy as np
from contestants import elastic
from models import deepfm
from report import machine
from throughput import FULL, QUICK, Plan, listed, measure
from workloads import module_of

WORKLOAD = "deepfm_lazy"
KINDS = ("constant", "zipf", "uniform")
_WARM_UP_SECONDS = 120.0  # at most, for one pass over the examples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ids", default="100000,1000000,10000000,100000000")
    parser.add_argument("--distinct", default=",".join(KINDS), help="some of: %(default)s")
    parser.add_argument("--batch_size", type=int, default=128)
    parser.add_argument("--staleness", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="fewer and shorter windows")
    arguments = parser.parse_args()
    steps = deepfm.ROWS // arguments.batch_size
    plan = replace(QUICK if arguments.quick else FULL, warm_up_steps=steps, warm_up_seconds=_WARM_UP_SECONDS)
    lines = [
        f"{machine()}; batch {arguments.batch_size}, staleness {arguments.staleness}:\n",
        "| different ids a batch | ids | examples/s | to the smallest | memory of all processes, MiB |",
        "|---|---|---|---|---|",
    ]
    for kind in listed(parser, "distinct", arguments.distinct, KINDS):
        lines += measured(kind, arguments.ids.split(","), arguments.batch_size, arguments.staleness, plan)
    print("\n" + "\n".join(lines), flush=True)


def measured(kind: str, vocabularies: list[str], batch_size: int, staleness: int, plan: Plan) -> list[str]:
    """The lines of a way."""
    contestants = [
        replace(elastic(f"ids{ids}", 1, max_staleness=staleness), title=f"{int(ids):,}", data=f"{kind}-{ids}")
        for ids in vocabularies
    ]
    runners = measure(WORKLOAD, batch_size, contestants, plan)
    first = median(runners[0].rates)
    return [
        f"| {kind}: {distinct(runner.contestant.data, batch_size):,.0f} | {runner.contestant.title} "
        f"| {median(runner.rates):,.0f} | {median(runner.rates) / first:.2f}x | {runner.memory / 2**20:,.0f} |"
        for runner in runners
    ]


def distinct(data: str, batch_size: int) -> float:
    """Different ids of a batch, a mean over 50 of them."""
    ids = module_of(WORKLOAD).arrays(np.random.default_rng(0), data)["ids"]
    return mean(len(np.unique(ids[batch_size * number : batch_size * (number + 1)])) for number in range(50))


if __name__ == "__main__":
    main()
