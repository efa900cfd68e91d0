"""What a model reaches with ElasticCB, next to plain Keras in one process with the same model file.

    python benchmarks/accuracy.py --data_dir=DIRECTORY

The directory holds mnist/t10k-*-ubyte.gz, census/adult.data and ml-100k/u.data. Each model of the zoo is
trained with the settings of its job.yaml: (a) by `keras.Model.fit`, on shuffled records; (b) by
`elasticcb train --updates=async` with two workers and one parameter server, each a process. Prints a Markdown
table of the metrics over validation data, in points (hundredths), as mean and range over the repetitions.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from types import ModuleType
from typing import Any

import yaml

ZOO = Path(__file__).resolve().parent.parent / "model_zoo"
TOLERANCE_POINTS = 0.5
_SHUFFLE_RECORDS = 200_000  # more than any of the files holds: records come in a fully random order


@dataclass(frozen=True)
class Case:
    """A model of the zoo and its data; `metric` is the one that is compared."""

    folder: str
    training_data: str  # below the data directory
    validation_data: str
    metric: str
    higher_is_better: bool = True


CASES = (
    Case(
        "mnist",
        "mnist/t10k-images-idx3-ubyte.gz[:8000]",
        "mnist/t10k-images-idx3-ubyte.gz[8000:]",
        "accuracy",
    ),
    Case("census", "census/adult.data", "census/adult.data", "accuracy"),
    Case("census", "census/adult.data", "census/adult.data", "auc"),
    Case("movielens", "ml-100k/u.data", "ml-100k/u.data", "rmse", higher_is_better=False),
)


@dataclass(frozen=True)
class Run:
    """Metrics of the last evaluation, and how long it all took."""

    metrics: dict[str, float]
    seconds: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data_dir", type=Path, help="directory that holds mnist/, census/ and ml-100k/")
    parser.add_argument("--models", default="mnist,census,movielens", help="some of them, with commas between")
    parser.add_argument("--repetitions", type=int, default=3, help="runs of each, with seeds 0, 1, 2, ...")
    parser.add_argument("--epochs", type=int, default=0, help="instead of those in each job.yaml")
    parser.add_argument("--plain", nargs=2, metavar=("MODEL", "SEED"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.data_dir is None:
        parser.error("Give --data_dir, the directory that holds mnist/, census/ and ml-100k/.")
    data = arguments.data_dir.resolve()
    if arguments.plain:
        folder, seed = arguments.plain
        case = case_of(folder)
        print(json.dumps(train_plain(case, data, int(seed), arguments.epochs)))
        return 0

    chosen = arguments.models.split(",")
    known = list(dict.fromkeys(case.folder for case in CASES))
    if unknown := set(chosen) - set(known):
        parser.error(f"--models names {', '.join(sorted(unknown))}; expected some of: {', '.join(known)}.")
    runs: dict[str, tuple[list[Run], list[Run]]] = {}
    for folder in chosen:
        case = case_of(folder)
        plain = [run_plain(case, data, seed, arguments.epochs) for seed in range(arguments.repetitions)]
        elastic = [run_elastic(case, data, seed, arguments.epochs) for seed in range(arguments.repetitions)]
        runs[folder] = plain, elastic
    print(table([case for case in CASES if case.folder in chosen], runs))
    return 0


def case_of(folder: str) -> Case:
    return next(case for case in CASES if case.folder == folder)


def run_plain(case: Case, data: Path, seed: int, epochs: int) -> Run:
    """Plain Keras in a fresh process, as the other side has."""
    command = [sys.executable, __file__, f"--data_dir={data}", f"--epochs={epochs}"]
    started = time.monotonic()
    output = _call([*command, "--plain", case.folder, str(seed)])
    run = Run(json.loads(output.splitlines()[-1]), time.monotonic() - started)
    print(f"{case.folder}, plain Keras, seed {seed}: {run}", file=sys.stderr, flush=True)
    return run


def run_elastic(case: Case, data: Path, seed: int, epochs: int) -> Run:
    """`elasticcb train`, each process a real one."""
    with tempfile.TemporaryDirectory() as job:
        command = [sys.executable, "-m", "elasticcb", "train", f"--config={ZOO / case.folder / 'job.yaml'}"]
        command += [f"--training_data={data / case.training_data}", f"--job_dir={job}/job"]
        command += [f"--validation_data={data / case.validation_data}", f"--output={job}/saved_model"]
        command += ["--num_workers=2", "--num_ps=1", "--updates=async", f"--shuffle_seed={seed}"]
        if epochs:
            command.append(f"--num_epochs={epochs}")
        started = time.monotonic()
        output = _call(command)
    run = Run(metrics_of_summary(output), time.monotonic() - started)
    print(f"{case.folder}, ElasticCB, seed {seed}: {run}", file=sys.stderr, flush=True)
    return run


def metrics_of_summary(output: str) -> dict[str, float]:
    """The figures below "Metrics of the last evaluation:" in what `elasticcb train` prints."""
    _, _, after = output.partition("Metrics of the last evaluation:\n")
    found = re.findall(r"^  (\w+) +([-+.\de]+)$", after.partition("\n\n")[0], re.MULTILINE)
    if not found:
        raise RuntimeError(f"`elasticcb train` printed no metrics:\n{output[-2000:]}")
    return {name: float(value) for name, value in found}


def train_plain(case: Case, data: Path, seed: int, epochs: int) -> dict[str, float]:
    """Trains the model file with `compile` and `fit`; returns the metrics over validation data."""
    import keras

    keras.utils.set_random_seed(seed)
    job, module = model_file(case.folder)
    model = compiled_model(job, module)
    training = records(module, str(data / case.training_data), "training", job)
    training = training.shuffle(_SHUFFLE_RECORDS, seed=seed, reshuffle_each_iteration=True)
    validation = records(module, str(data / case.validation_data), "evaluation", job)
    size = job["minibatch_size"]
    model.fit(training.batch(size).prefetch(2), epochs=epochs or job["num_epochs"], verbose=0)
    results: dict[str, float] = model.evaluate(validation.batch(size), verbose=0, return_dict=True)
    return results


def model_file(folder: str) -> tuple[dict[str, Any], ModuleType]:
    """The settings of a folder's job.yaml, and its model file."""
    job = yaml.safe_load((ZOO / folder / "job.yaml").read_text())
    _, name, _ = job["model_def"].split(".")
    return job, _import(ZOO / folder / f"{name}.py")


def compiled_model(job: dict[str, Any], module: ModuleType) -> Any:
    """A model file's model, for `fit`."""
    model = getattr(module, job["model_def"].split(".")[-1])()
    model.compile(optimizer=module.optimizer(), loss=module.loss, metrics=list(_named(module.eval_metrics_fn())))
    return model


def records(module: ModuleType, origin: str, mode: str, job: dict[str, Any]) -> Any:
    """All records of a data origin through the file's `feed`, read as the workers read them."""
    import tensorflow as tf

    from elasticcb.data import Records, open_reader

    custom = getattr(module, "custom_data_reader", None)
    reader = open_reader(origin, job.get("data_reader_params"), custom=custom)
    (source,) = reader.sources()
    given = Records(reader, getattr(module, "feed", None), getattr(module, "feed_batch", None))
    batches = given.batches(mode, job["minibatch_size"], joins=False).batches([(source.name, 0, source.count)])
    whole = tf.nest.map_structure(lambda *parts: tf.concat(parts, 0), *batches)
    return tf.data.Dataset.from_tensor_slices(whole)


def _named(metrics: dict[str, Any]) -> Any:
    for name, metric in metrics.items():
        metric.name = name
        yield metric


def _import(path: Path) -> ModuleType:
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _call(command: list[str]) -> str:
    environment = {**os.environ, "KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    return done.stdout


def table(cases: list[Case], runs: dict[str, tuple[list[Run], list[Run]]]) -> str:
    """Markdown; the difference is positive where ElasticCB is better."""
    columns = ["model", "metric", "plain Keras", "ElasticCB, 2 workers + 1 server", "difference in points"]
    columns.append(f"within {TOLERANCE_POINTS}")
    rows = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for case in cases:
        plain, elastic = runs[case.folder]
        left = [100 * run.metrics[case.metric] for run in plain]
        right = [100 * run.metrics[case.metric] for run in elastic]
        difference = (mean(right) - mean(left)) * (1 if case.higher_is_better else -1)
        rows.append(
            f"| {case.folder} | {case.metric} | {_range(left)} | {_range(right)} | {difference:+.2f} "
            f"| {'yes' if difference >= -TOLERANCE_POINTS else 'no'} |"
        )
    return "\n".join(rows)


def _range(values: list[float]) -> str:
    return f"{mean(values):.2f} ({min(values):.2f} to {max(values):.2f})"


if __name__ == "__main__":
    sys.exit(main())
