"""What asynchronous training, staleness and 16-bit gradients do to a model, next to one process.

    python benchmarks/quality.py --data_dir=DIRECTORY [--models=census,movielens] [--repetitions=3]

The directory is the one of accuracy.py. Each model of the zoo is trained with the settings of its job.yaml by plain
Keras in one process, and by `elasticcb train` with 4 workers and 1 server: synchronously (4 gradients of a quarter of
the batch make an update), and asynchronously with staleness 0, 1 and 4, gradients travelling whole or as bfloat16.
Prints a Markdown table of the metrics over validation data, in points (hundredths): means over the repetitions, and
in brackets the difference to plain Keras, positive where it is better.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import yaml
from accuracy import CASES, ZOO, Case, Run, case_of, run_elastic, run_plain
from report import publish, table_parser

WORKERS = 4
TOLERANCE_POINTS = 0.3
_FOLDERS = tuple(dict.fromkeys(case.folder for case in CASES))


@dataclass(frozen=True)
class Setting:
    """A way to train on 4 workers."""

    title: str
    flags: tuple[str, ...]
    parts: int = 1  # a batch is cut into so many


SETTINGS = {
    "synchronous": Setting(
        "synchronous", ("--updates=sync", f"--grads_to_wait={WORKERS}", "--sync_version_tolerance=0"), WORKERS
    ),
    **{
        f"stale{staleness}{suffix}": Setting(
            f"asynchronous, staleness {staleness}{', bfloat16' if suffix else ''}",
            (f"--max_staleness={staleness}", f"--wire_dtype={'bfloat16' if suffix else 'same'}"),
        )
        for suffix in ("", "-bfloat16")
        for staleness in (0, 1, 4)
    },
}


def main() -> int:
    arguments = _arguments()
    data = arguments.data_dir.resolve()
    seeds = range(arguments.repetitions)
    cases = [case for case in CASES if case.folder in arguments.models]
    plain: dict[str, list[Run]] = {}
    runs: dict[tuple[str, str], list[Run]] = {}
    for folder in arguments.models:
        case = case_of(folder)
        plain[folder] = [run_plain(case, data, seed, arguments.epochs) for seed in seeds]
        for key in arguments.settings:
            flags = _flags(SETTINGS[key], folder)
            runs[folder, key] = [run_elastic(case, data, seed, arguments.epochs, flags) for seed in seeds]
    publish("quality", _table(cases, plain, runs, arguments.settings), arguments.into)
    return 0


def _flags(setting: Setting, folder: str) -> list[str]:
    job = yaml.safe_load((ZOO / folder / "job.yaml").read_text())
    size = max(job["minibatch_size"] // setting.parts, 1)
    # Tasks of as many records, so that the order of records is shuffled as much.
    tasks = job["num_minibatches_per_task"] * setting.parts
    return [
        f"--num_workers={WORKERS}",
        "--num_ps=1",
        *setting.flags,
        f"--minibatch_size={size}",
        f"--num_minibatches_per_task={tasks}",
    ]


def _table(
    cases: list[Case], plain: dict[str, list[Run]], runs: dict[tuple[str, str], list[Run]], settings: list[str]
) -> str:
    """Markdown; differences beyond the tolerance are bold."""
    lines = [f"| | {' | '.join(f'{case.folder}, {case.metric}' for case in cases)} |", "|---" * (len(cases) + 1) + "|"]
    means = [mean(100 * run.metrics[case.metric] for run in plain[case.folder]) for case in cases]
    lines.append(f"| plain Keras, one process | {' | '.join(f'{value:.2f}' for value in means)} |")
    for key in settings:
        cells = []
        for case, one in zip(cases, means, strict=True):
            value = mean(100 * run.metrics[case.metric] for run in runs[case.folder, key])
            difference = (value - one) * (1 if case.higher_is_better else -1)
            text = f"{difference:+.2f}"
            cells.append(f"{value:.2f} ({text if difference >= -TOLERANCE_POINTS else f'**{text}**'})")
        lines.append(f"| {SETTINGS[key].title} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _arguments() -> argparse.Namespace:
    parser = table_parser(__doc__)
    parser.add_argument(
        "--data_dir", type=Path, required=True, help="directory that holds mnist/, census/ and ml-100k/"
    )
    parser.add_argument("--models", default=",".join(_FOLDERS), help="some of: %(default)s")
    parser.add_argument("--settings", default=",".join(SETTINGS), help="some of: %(default)s")
    parser.add_argument("--repetitions", type=int, default=3, help="runs of each, with seeds 0, 1, 2, ...")
    parser.add_argument("--epochs", type=int, default=0, help="instead of those in each job.yaml")
    arguments = parser.parse_args()
    for name, known in (("models", _FOLDERS), ("settings", SETTINGS)):
        listed = getattr(arguments, name).split(",")
        if unknown := set(listed) - set(known):
            parser.error(f"--{name} names {', '.join(sorted(unknown))}; expected some of: {', '.join(known)}.")
        setattr(arguments, name, listed)
    return arguments


if __name__ == "__main__":
    sys.exit(main())
