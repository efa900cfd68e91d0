"""What several workers do to a model, by the way in which their work becomes one, next to plain Keras.

    python benchmarks/quality.py --data_dir=DIRECTORY --results=FILE [--cases=mnist] [--workers=4,8] [--seeds=5]

The cases are in quality_cases.py; DIRECTORY holds mnist/t10k-*-ubyte.gz, census/adult.data, ml-100k/u.data and
criteo/criteo_sample.txt. All settings train on the same records, in batches of the same size, for as many epochs, but
for those whose title says otherwise. A cluster of processes, with one parameter server, does all cases of a setting.
Each run is a line of FILE as it ends, and is not done again. Prints a Markdown table for each number of workers: the
mean of all seeds in FILE, and their standard deviation. Bold are means beyond the goal (`Case.is_reached`).
`--workers=` only prints.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from quality_cases import CASES, Case, Examples
from report import publish, table_parser

PLAIN = "plain"


@dataclass(frozen=True)
class Setting:
    """A way to train with several workers."""

    title: str
    cluster: Callable[[int], dict[str, Any]]  # arguments of `Cluster`, by the number of workers
    rate: Callable[[int], float] = lambda workers: 1.0  # what the learning rate is multiplied with
    epochs: int = 1  # what the epochs are multiplied with


def _local(steps: int | str) -> Callable[[int], dict[str, Any]]:
    return lambda workers: {"updates": "local", "local_steps": steps}


def _sync(workers: int) -> dict[str, Any]:
    return {"updates": "sync"}


def _async(workers: int, **exchange: Any) -> dict[str, Any]:
    import elasticcb

    return {"updates": "async", "exchange": elasticcb.ExchangeOptions(**exchange)}


def _wire(dtype: str) -> dict[str, Any]:
    import elasticcb
    from elasticcb.settings import WireDtype

    return {"exchange": elasticcb.ExchangeOptions(wire_dtype=WireDtype(dtype))}


def _root(workers: int) -> float:
    return math.sqrt(workers)


SETTINGS = {
    "async": Setting("async", _async),
    "stale1": Setting("async, `max_staleness=1`", lambda workers: _async(workers, max_staleness=1)),
    "stale4": Setting("async, `max_staleness=4`", lambda workers: _async(workers, max_staleness=4)),
    "bfloat16": Setting("async, `wire_dtype=bfloat16`", lambda workers: _async(workers, wire_dtype="bfloat16")),
    "sync": Setting("sync", _sync),
    "sync-rate": Setting("sync, √workers times the learning rate", _sync, rate=_root),
    "sync-epochs": Setting("sync, twice the epochs", _sync, epochs=2),
    "local": Setting("local", _local("auto")),
    "local-bfloat16": Setting(
        "local, `wire_dtype=bfloat16`", lambda workers: _local("auto")(workers) | _wire("bfloat16")
    ),
    "local1": Setting("local, `local_steps=1`", _local(1)),
    "local4": Setting("local, `local_steps=4`", _local(4)),
    "local16": Setting("local, `local_steps=16`", _local(16)),
    "local-rate": Setting("local, `local_steps=16`, √workers times the learning rate", _local(16), rate=_root),
    "local-epochs": Setting("local, `local_steps=16`, twice the epochs", _local(16), epochs=2),
    "auto-epochs": Setting("local, twice the epochs", _local("auto"), epochs=2),
    "local-both": Setting(
        "local, twice the epochs, √workers times the learning rate",
        _local("auto"),
        rate=_root,
        epochs=2,
    ),
}
DEFAULT_SETTINGS = ("async", "sync", "local", "local1", "local4", "local16", "local-rate", "local-epochs", "local-both")


class Results:
    """Runs that are done, as lines of a file: by case, setting, workers and seed, None for a run that met NaN."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._values: dict[tuple[str, str, int, int], float | None] = {}
        for line in file.read_text().splitlines() if file.exists() else []:
            run = json.loads(line)
            self._values[run["case"], run["setting"], run["workers"], run["seed"]] = run["value"]

    def __contains__(self, key: tuple[str, str, int, int]) -> bool:
        return key in self._values

    def add(self, case: str, setting: str, workers: int, seed: int, value: float | None, seconds: float) -> None:
        run = {"case": case, "setting": setting, "workers": workers, "seed": seed}
        self._values[case, setting, workers, seed] = value
        with self._file.open("a") as file:
            file.write(json.dumps(run | {"value": value, "seconds": round(seconds, 1)}) + "\n")

    def of(self, case: str, setting: str, workers: int) -> list[float | None]:
        return [value for key, value in self._values.items() if key[:3] == (case, setting, workers)]

    def workers(self) -> list[int]:
        return sorted({workers for _, setting, workers, _ in self._values if setting != PLAIN})


def main() -> int:
    arguments = _arguments()
    os.environ |= {"TF_CPP_MIN_LOG_LEVEL": "3", "KERAS_BACKEND": "tensorflow"}
    results = Results(arguments.results)
    seeds = range(1, arguments.seeds + 1)
    data: dict[str, tuple[Examples, Examples]] = {}
    for workers, key in _parts(arguments):
        missing = [
            (name, seed) for seed in seeds for name in arguments.cases if (name, key, workers, seed) not in results
        ]
        if not missing:
            continue
        with _fitting(key, workers) as (fit, setting):
            for name, seed in missing:
                if name not in data:
                    data[name] = CASES[name].load(arguments.data_dir)
                started = time.monotonic()
                value = train(CASES[name], data[name], seed, fit, setting.rate(workers), setting.epochs)
                results.add(name, key, workers, seed, value, time.monotonic() - started)
    publish("quality", _table(results), arguments.into)
    return 0


def _parts(arguments: argparse.Namespace) -> Iterator[tuple[int, str]]:
    """Numbers of workers and settings, plain Keras first."""
    if arguments.workers:
        yield 1, PLAIN
    for key in arguments.settings:
        for workers in arguments.workers:
            yield workers, key


@contextlib.contextmanager
def _fitting(key: str, workers: int) -> Iterator[tuple[Callable[..., Any], Setting]]:
    """What trains a model: `fit(model, x, y, **more)`."""
    import elasticcb

    if key == PLAIN:
        yield lambda model, *args, **more: model.fit(*args, **more), Setting("plain Keras", lambda workers: {})
        return
    setting = SETTINGS[key]
    with elasticcb.Cluster(workers, 1, log_level="ERROR", **setting.cluster(workers)) as cluster:
        yield cluster.fit, setting


def train(
    case: Case, data: tuple[Examples, Examples], seed: int, fit: Callable[..., Any], rate: float, epochs: int
) -> float | None:
    """The metric over validation data, evaluated in this process; None when a value was not finite."""
    import keras

    from elasticcb.errors import JobFailedError

    keras.backend.clear_session()
    keras.utils.set_random_seed(seed)
    model = case.model()
    model.optimizer.learning_rate = rate * float(model.optimizer.learning_rate)
    training, validation = data
    try:
        fit(model, *training, batch_size=case.batch_size, epochs=epochs * case.epochs, verbose=0)
    except JobFailedError as error:
        if not any(words in str(error) for words in ("holds NaN or infinity", "The loss is")):
            raise
        return None
    value = float(model.evaluate(*validation, batch_size=250, return_dict=True, verbose=0)[case.metric])
    return value if math.isfinite(value) else None


def _table(results: Results) -> str:
    """One for all numbers of workers."""
    names = [name for name in CASES if results.of(name, PLAIN, 1)]
    titles = [f"{name}, {CASES[name].metric}" for name in names]
    lines = [f"| workers | | {' | '.join(titles)} |", "|---" * (len(names) + 2) + "|"]
    rows = [("", "plain Keras", PLAIN, 1)]
    rows += [(str(workers), it.title, key, workers) for workers in results.workers() for key, it in SETTINGS.items()]
    for workers, title, key, number in rows:
        cells = [_cell(name, key, number, results) for name in names]
        if any(cells):
            lines.append(f"| {workers} | {title} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(name: str, key: str, workers: int, results: Results) -> str:
    """Mean and standard deviation over the seeds; bold where the goal is missed, "" where there is no run.

    In brackets the number of runs, where it is not that of plain Keras.
    """
    case = CASES[name]
    values, plain_values = results.of(name, key, workers), results.of(name, PLAIN, 1)
    found = [case.shown(value) for value in values if value is not None]
    if not values:
        return ""
    runs = "" if len(values) == len(plain_values) else f" ({len(values)})"
    if not found:
        return f"**NaN**{runs}"
    text = f"{mean(found):.{case.digits}f}"
    plain = mean(case.shown(value) for value in plain_values if value is not None)
    if not case.is_reached(mean(found), plain, workers):
        text = f"**{text}**"
    if len(found) > 1:
        text += f" ± {stdev(found):.{case.digits}f}"
    failed = len(values) - len(found)
    return text + (f"; **{failed} NaN**" if failed else "") + runs


def _arguments() -> argparse.Namespace:
    parser = table_parser(__doc__)
    parser.add_argument("--data_dir", type=Path, required=True, help="directory of the data sets")
    parser.add_argument("--results", type=Path, required=True, help="file of the runs, which is continued")
    parser.add_argument("--cases", default=",".join(CASES), help="some of: %(default)s")
    parser.add_argument("--settings", default=",".join(DEFAULT_SETTINGS), help=f"some of: {','.join(SETTINGS)}")
    parser.add_argument("--workers", default="4,8", help="numbers of workers; default: %(default)s")
    parser.add_argument("--seeds", type=int, default=5, help="runs of each, with seeds 1, 2, 3, ...")
    arguments = parser.parse_args()
    arguments.data_dir = arguments.data_dir.resolve()
    arguments.workers = [int(number) for number in arguments.workers.split(",") if number]
    for name, known in (("cases", CASES), ("settings", SETTINGS)):
        listed = getattr(arguments, name).split(",")
        if unknown := set(listed) - set(known):
            parser.error(f"--{name} names {', '.join(sorted(unknown))}; expected some of: {', '.join(known)}.")
        setattr(arguments, name, listed)
    return arguments


if __name__ == "__main__":
    sys.exit(main())
