"""Whether training slows down as the vocabulary grows: deepfm on `elasticcb.layers.Embedding`, rows made on first use.

    python benchmarks/vocabulary.py [--quick] [--ids=100000,1000000,10000000,100000000]

Prints a Markdown table of examples/s and memory by the number of ids, with one worker and one server; ids of each
column follow zipf(1.2) up to a 26th of the vocabulary.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import median

from contestants import elastic
from report import machine, publish, table_parser
from throughput import FULL, QUICK, measure


def main() -> None:
    parser = table_parser(__doc__)
    parser.add_argument("--ids", default="100000,1000000,10000000,100000000")
    parser.add_argument("--batch_size", type=int, default=128)
    parser.add_argument("--staleness", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="fewer and shorter windows")
    arguments = parser.parse_args()
    contestants = [
        replace(
            elastic(f"ids{ids}", 1, max_staleness=arguments.staleness),
            title=f"{int(ids):,}",
            data=ids,
        )
        for ids in arguments.ids.split(",")
    ]
    runners = measure("deepfm_lazy", arguments.batch_size, contestants, QUICK if arguments.quick else FULL)
    first = median(runners[0].rates)
    lines = [
        f"{machine()}; batch {arguments.batch_size}, staleness {arguments.staleness}:\n",
        "| ids | examples/s | to the smallest | memory of all processes, MiB |",
        "|---|---|---|---|",
    ]
    for runner in runners:
        rate = median(runner.rates)
        lines.append(
            f"| {runner.contestant.title} | {rate:,.0f} | {rate / first:.2f}x | {runner.memory / 2**20:,.0f} |"
        )
    publish("vocabulary", "\n".join(lines), arguments.into)


if __name__ == "__main__":
    main()
