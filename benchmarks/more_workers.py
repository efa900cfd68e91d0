"""What more workers do to a model, by the way in which their work becomes one: `--updates=async`, `sync` and `local`.

    python benchmarks/more_workers.py --data_dir=DIRECTORY [--models=convnet] [--workers=4,8] [--repetitions=5]

Two models that plain Keras trains in seconds, on equal records: a regression on three numbers (Adam 0.01, 12 epochs of
313 batches; its noise allows a loss of 25), and a convolutional net with BatchNormalization on 8,000 of MNIST's test
images (SGD 0.05 with momentum 0.9, 3 epochs of 125 batches). DIRECTORY holds mnist/t10k-*-ubyte.gz. Each run is a job
of processes of its own, with one parameter server. Prints a Markdown table: the mean over the repetitions, and behind
it the lowest and the highest; of the regression the validation loss, of the convolutional net the accuracy in points.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
from report import publish, table_parser

BATCH = 64
Data = tuple[Any, Any, tuple[Any, Any]]  # x, y, (validation x, validation y)


@dataclass(frozen=True)
class Case:
    """A model, and which of its metrics is reported."""

    make: Callable[[float], Any]  # by what its learning rate is multiplied with
    load: Callable[[Path], Data]
    epochs: int
    metric: str
    scale: float = 1.0  # that the metric is multiplied with


def houses(rows: int, seed: int) -> tuple[Any, Any]:
    """Size, rooms and age of houses, and their price with a noise of variance 25."""
    random = np.random.default_rng(seed)
    size, rooms, age = random.uniform(30, 200, rows), random.integers(1, 8, rows), random.uniform(0, 30, rows)
    price = 2.5 * size + 10 * rooms - 1.5 * age + random.normal(0, 5, rows)
    return np.stack([size, rooms, age], 1).astype("float32"), price.astype("float32")[:, None]


def images(directory: Path) -> Data:
    """MNIST's test images, between 0 and 1; the last 2,000 to validate on."""

    def read(kind: str, offset: int) -> Any:
        with gzip.open(directory / "mnist" / f"t10k-{kind}-ubyte.gz") as file:
            return np.frombuffer(file.read(), np.uint8, offset=offset)

    x, y = read("images-idx3", 16).reshape(-1, 28, 28, 1).astype("float32") / 255, read("labels-idx1", 8)
    return x[:8000], y[:8000], (x[8000:], y[8000:])


def regression(rate: float) -> Any:
    import keras

    layers = keras.layers
    normalized = layers.Normalization(mean=[115.0, 4.0, 15.0], variance=[2400.0, 4.0, 75.0])
    hidden = [layers.Dense(32, activation="relu") for _ in range(2)]
    model = keras.Sequential([keras.Input((3,)), normalized, *hidden, layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.01 * rate), "mse")
    return model


def convnet(rate: float) -> Any:
    import keras

    layers = keras.layers
    model = keras.Sequential([keras.Input((28, 28, 1))])
    for filters in (8, 16):
        model.add(layers.Conv2D(filters, 3, activation="relu"))
        model.add(layers.BatchNormalization())
        model.add(layers.MaxPooling2D())
    model.add(layers.Flatten())
    model.add(layers.Dense(10))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.05 * rate, momentum=0.9), loss, metrics=["accuracy"])
    return model


CASES = {
    "regression": Case(regression, lambda directory: (*houses(20_000, 0), houses(2_000, 1)), 12, "val_loss"),
    "convnet": Case(convnet, images, 3, "val_accuracy", 100.0),
}
# By title: arguments of `Cluster`, by the number of workers, and by what the learning rate is multiplied with.
SETTINGS: dict[str, tuple[Callable[[int], dict[str, Any]], Callable[[int], float]]] = {
    "async": (lambda workers: {"updates": "async"}, lambda workers: 1.0),
    "sync": (lambda workers: {"updates": "sync", "grads_to_wait": workers}, lambda workers: 1.0),
    "local": (lambda workers: {"updates": "local"}, lambda workers: 1.0),
    "local with √workers times the learning rate": (lambda workers: {"updates": "local"}, lambda workers: workers**0.5),
}


def main() -> int:
    arguments = _arguments()
    if arguments.one:
        name, setting, workers, seed = arguments.one
        print(json.dumps(train(CASES[name], setting, int(workers), int(seed), arguments.data_dir)))
        return 0
    parts = [_table(name, arguments) for name in arguments.models]
    publish("more workers", "\n\n".join(parts), arguments.into)
    return 0


def train(case: Case, setting: str, workers: int, seed: int, directory: Path) -> float:
    """Trains it in this process, or by a cluster; the metric of the last epoch, or of the first that is not finite."""
    import keras

    import elasticcb

    keras.utils.set_random_seed(seed)
    x, y, validation = case.load(directory)
    fit = {"batch_size": BATCH, "epochs": case.epochs, "validation_data": validation, "verbose": 0}
    if setting == "keras":
        history = case.make(1.0).fit(x, y, **fit).history
    else:
        arguments, rate = SETTINGS[setting]
        with elasticcb.Cluster(workers, 1, log_level="ERROR", **arguments(workers)) as cluster:
            history = cluster.fit(case.make(rate(workers)), x, y, **fit).history
    return float(history[case.metric][-1]) * case.scale


def _table(name: str, arguments: argparse.Namespace) -> str:
    case, seeds = CASES[name], range(1, arguments.repetitions + 1)
    lines = [f"| {name} | {' | '.join(f'{workers} workers' for workers in arguments.workers)} |"]
    lines.append("|---" * (len(arguments.workers) + 1) + "|")
    plain = _shown([_run(name, "keras", 1, seed, arguments) for seed in seeds])
    lines.append(f"| plain Keras, one process | {' | '.join([plain] + [''] * (len(arguments.workers) - 1))} |")
    for setting in arguments.settings:
        cells = [
            _shown([_run(name, setting, workers, seed, arguments) for seed in seeds]) for workers in arguments.workers
        ]
        lines.append(f"| {setting} | {' | '.join(cells)} |")
    title = "Validation loss" if case.scale == 1 else "Accuracy on validation data, in points"
    return f"{title}; the mean of {len(seeds)} runs (lowest to highest):\n\n" + "\n".join(lines)


def _shown(values: Sequence[float | None]) -> str:
    found = [value for value in values if value is not None]
    failed = f"; {len(values) - len(found)} failed by NaN" if len(found) < len(values) else ""
    return f"{mean(found):.1f} ({min(found):.1f} to {max(found):.1f}){failed}" if found else "failed by NaN"


def _run(name: str, setting: str, workers: int, seed: int, arguments: argparse.Namespace) -> float | None:
    """In a process of its own; None when the job ended because a value was not finite."""
    command = [sys.executable, __file__, f"--data_dir={arguments.data_dir}", "--one", name, setting]
    environment = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3", "KERAS_BACKEND": "tensorflow"}
    done = subprocess.run(
        [*command, str(workers), str(seed)], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode and not any(word in done.stderr for word in ("NaN", "The loss is", "loss is nan")):
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    value = None if done.returncode else float(done.stdout.splitlines()[-1])
    print(f"{name}, {setting}, {workers} workers, seed {seed}: {value}", file=sys.stderr, flush=True)
    return value


def _arguments() -> argparse.Namespace:
    parser = table_parser(__doc__)
    parser.add_argument("--data_dir", type=Path, required=True, help="directory that holds mnist/")
    parser.add_argument("--models", default=",".join(CASES), help="some of: %(default)s")
    parser.add_argument("--settings", default=",".join(SETTINGS), help="some of: %(default)s")
    parser.add_argument("--workers", default="2,4,8", help="numbers of workers; default: %(default)s")
    parser.add_argument("--repetitions", type=int, default=3, help="runs of each, with seeds 1, 2, 3, ...")
    parser.add_argument("--one", nargs=4, metavar=("MODEL", "SETTING", "WORKERS", "SEED"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.data_dir = arguments.data_dir.resolve()
    arguments.workers = [int(number) for number in arguments.workers.split(",")]
    arguments.settings = arguments.settings.split(",")
    arguments.models = arguments.models.split(",")
    for name, known in (("models", CASES), ("settings", SETTINGS)):
        if unknown := set(getattr(arguments, name)) - set(known):
            parser.error(f"--{name} names {', '.join(sorted(unknown))}; expected some of: {', '.join(known)}.")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
