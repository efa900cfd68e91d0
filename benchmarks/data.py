"""What reading files costs: epochs next to plain Keras, checksums, indexes, and the time to the first step.

    python benchmarks/data.py epochs [--rows 204800] [--formats csv tfrecord parquet]
    python benchmarks/data.py checksums
    python benchmarks/data.py index
    python benchmarks/data.py first_step [--sizes 10 300 1200] [--formats csv csv.gz]

`epochs` trains a small model on files with 8 features and a label, with batches of 512: by plain Keras, whose input is
a tf.data pipeline that parses batches (for Parquet a generator of PyArrow's batches), by `elasticcb train`, and by
`Cluster.fit` with `elasticcb.data.read`. All parse by the same function. It prints the seconds of the shortest epoch of
three after the first, and the seconds until the first batch of an opened file is parsed. Plain Keras, and a job of one
worker with its master and server, have one core; two workers have two.

`checksums` reads TFRecords that are in the system's file cache, with and without the verification of their data, in
turns. It prints the difference of the medians, in seconds per GB of data.

`index` scans one file that is in the system's file cache, as a master does before the first task, and prints the
processor time per GB of uncompressed data.

`first_step` runs `elasticcb train` with one worker for one step, on CSV files of these sizes in MB, and prints the
median seconds from the command until the master has counted, and until the worker has built its model and done its
first step.
"""

from __future__ import annotations

import argparse
import datetime
import gzip
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

GIGABYTE = 10**9


EPOCHS_MODEL = """
import time

import keras
import tensorflow as tf

NAMES = [f"x{n}" for n in range(8)]


def custom_model():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, "relu"), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    return model


def feed_batch(records, mode, metadata):
    if FORMAT == "csv":
        columns = tf.io.decode_csv(records, [0.0] * 9)
    elif FORMAT == "tfrecord":
        values = records["value"] if isinstance(records, dict) else records  # of Kafka, in streams.py
        found = tf.io.parse_example(values, {name: tf.io.FixedLenFeature([], tf.float32) for name in [*NAMES, "y"]})
        columns = [found[name] for name in [*NAMES, "y"]]
    else:
        columns = [records[name] for name in [*NAMES, "y"]]
    return tf.stack(columns[:8], 1), columns[8][:, None]


class Clock(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        with open(TIMES, "a") as file:
            file.write(f"{time.time()}\\n")


def callbacks():
    return [Clock()]


def plain(path):
    if FORMAT == "csv":
        records = tf.data.TextLineDataset(path).batch(512)
    elif FORMAT == "tfrecord":
        records = tf.data.TFRecordDataset(path).batch(512)
    else:
        import pyarrow.parquet

        def batches():
            for batch in pyarrow.parquet.ParquetFile(path).iter_batches(512):
                yield {name: batch.column(name).to_numpy() for name in [*NAMES, "y"]}

        signature = {name: tf.TensorSpec([None], tf.float32) for name in [*NAMES, "y"]}
        records = tf.data.Dataset.from_generator(batches, output_signature=signature)
    custom_model().fit(
        records.map(lambda batch: feed_batch(batch, "training", None)).prefetch(2), epochs=4, verbose=0,
        callbacks=callbacks(),
    )


def in_cluster(path, workers):
    import elasticcb

    with elasticcb.Cluster(num_workers=workers) as cluster:
        data = elasticcb.data.read(path, feed_batch=feed_batch)
        cluster.fit(custom_model(), data, batch_size=512, epochs=4, verbose=0, callbacks=callbacks())


def first_batch(path):
    import elasticcb

    started = time.perf_counter()
    data = elasticcb.data.read(path, feed_batch=feed_batch)
    (source,) = data.reader.sources()
    next(data.batches("training", 512).batches([(source.name, 0, source.count)]))
    print(time.perf_counter() - started)
"""


_ONE_CORE = ("taskset", "-c", "0")
_CORES: tuple[tuple[int, tuple[str, ...]], ...] = ((1, _ONE_CORE), (2, ("taskset", "-c", "0,1")))  # by workers


def epochs(rows: int, formats: list[str], runs: int) -> None:
    import numpy as np

    numbers = np.random.default_rng(0).normal(size=(rows, 9)).astype("float32")
    print("| file | plain Keras | command, 1 worker | 2 workers | `fit`, 1 worker | 2 workers | first batch |")
    print("|---|---|---|---|---|---|---|")
    for kind in formats:
        with tempfile.TemporaryDirectory() as folder:
            path, times = Path(folder, f"data.{kind}"), Path(folder, "times")
            _WRITERS[kind](path, numbers)
            Path(folder, "model.py").write_text(f"FORMAT, TIMES = {kind!r}, {str(times)!r}\n{EPOCHS_MODEL}")
            train = [sys.executable, "-m", "elasticcb", "train", f"--model_zoo={folder}", "--minibatch_size=512"]
            train += ["--model_def=model.custom_model", f"--training_data={path}", "--num_epochs=4"]
            commands = [
                [*_ONE_CORE, *_call(f"plain({str(path)!r})")],
                *([*core, *train, f"--num_workers={n}", f"--job_dir={folder}/job{n}"] for n, core in _CORES),
                *([*core, *_call(f"in_cluster({str(path)!r}, {n})")] for n, core in _CORES),
            ]
            best = [float("inf")] * len(commands)
            for _ in range(runs):
                for place, command in enumerate(commands):
                    times.unlink(missing_ok=True)
                    for job in Path(folder).glob("job*"):
                        shutil.rmtree(job)
                    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
                    ends = np.loadtxt(times)
                    best[place] = min(best[place], float(np.diff(ends).min()))
            call = _call(f"first_batch({str(path)!r})")
            first = float(subprocess.run(call, cwd=folder, check=True, capture_output=True, text=True).stdout)
        print(f"| {kind} | {' | '.join(f'{each:.2f} s' for each in best)} | {first:.2f} s |", flush=True)


def _call(expression: str) -> list[str]:
    return [sys.executable, "-c", f"import model; model.{expression}"]


def _write_csv(path: Path, numbers: Any) -> None:
    path.write_text("".join(",".join(f"{value:.4f}" for value in row) + "\n" for row in numbers.tolist()))


def _write_examples(path: Path, numbers: Any) -> None:
    import tensorflow as tf

    with tf.io.TFRecordWriter(str(path)) as writer:
        for value in serialized_examples(numbers):
            writer.write(value)


def serialized_examples(numbers: Any) -> Iterator[bytes]:
    """A `tf.train.Example` of each row of 8 features and a label."""
    import tensorflow as tf

    for row in numbers.tolist():
        example = tf.train.Example()
        for name, value in zip([*(f"x{n}" for n in range(8)), "y"], row, strict=True):
            example.features.feature[name].float_list.value.append(value)
        yield example.SerializeToString()


def _write_parquet(path: Path, numbers: Any) -> None:
    import pyarrow.parquet

    names = [*(f"x{n}" for n in range(8)), "y"]
    pyarrow.parquet.write_table(pyarrow.table(dict(zip(names, numbers.T, strict=True))), path, row_group_size=8192)


_WRITERS = {"csv": _write_csv, "tfrecord": _write_examples, "parquet": _write_parquet}


def checksums(megabytes: int, runs: int) -> None:
    import tensorflow as tf

    from elasticcb.data import open_reader, tfrecord

    print("| bytes of a record | s/GB without verifying | s/GB of verifying |\n|---|---|---|")
    for size in (100, 1_000, 10_000, 100_000):
        with tempfile.TemporaryDirectory() as folder:
            path = str(Path(folder, "a.tfrecord"))
            record = os.urandom(size)
            with tf.io.TFRecordWriter(path) as writer:
                for _ in range(megabytes * 10**6 // size):
                    writer.write(record)
            reader = open_reader(path)
            count = reader.sources()[0].count
            seconds: dict[bool, list[float]] = {False: [], True: []}
            for _ in range(runs):
                for verifies in seconds:
                    verify = tfrecord._verify if verifies else lambda *_: None
                    with mock.patch.object(tfrecord, "_verify", verify):
                        started = time.perf_counter()
                        for _ in reader.read_chunks(path, 0, count):
                            pass
                        seconds[verifies].append((time.perf_counter() - started) * GIGABYTE / (count * size))
        without, verified = (statistics.median(seconds[key]) for key in (False, True))
        print(f"| {size:,} | {without:.2f} | {verified - without:.2f} |")


def index(megabytes: int, runs: int) -> None:
    import tensorflow as tf

    from elasticcb.data import open_reader

    rows = b"".join(b"0.%06d," % (7919 * i % 10**6) * 8 + b'"some ""text"", %d"\n' % (i % 10) for i in range(10_000))
    print("| file | s/GB |\n|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for name in ("numbers.csv", "quoted.csv", "numbers.csv.gz", "records of 100 bytes.tfrecord"):
            path = Path(folder, name)
            if name.startswith("numbers"):
                size = write_csv(path, megabytes)
            elif name.startswith("quoted"):
                size = path.write_bytes(rows * (megabytes * 10**6 // len(rows) + 1))
            else:
                with tf.io.TFRecordWriter(str(path)) as writer:
                    for _ in range(megabytes * 10**4):
                        writer.write(bytes(100))
                size = path.stat().st_size
            seconds = []
            for _ in range(runs):
                started = time.process_time()
                open_reader(str(path)).sources()
                seconds.append((time.process_time() - started) * GIGABYTE / size)
            print(f"| {name} | {statistics.median(seconds):.2f} |", flush=True)


MODEL = """
import keras
import tensorflow as tf

def custom_model():
    return keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])

def loss(labels, predictions):
    return keras.losses.mean_squared_error(labels, predictions)

def optimizer():
    return keras.optimizers.SGD(0.01)

def feed_batch(lines, mode, metadata):
    numbers = tf.io.decode_csv(lines, [0.0] * 9)
    return tf.stack(numbers[:8], axis=1), numbers[8][:, None]
"""
MILESTONES = (
    ("worker-0", "The model is built"),
    ("master", "The model is built"),
    ("worker-0", "The first step is done"),
)


def write_csv(path: Path, megabytes: int) -> int:
    """Writes `megabytes` of text, and returns its bytes."""
    lines = b"".join(b"0.%06d," % (7919 * i % 10**6) * 8 + b"%d\n" % (i % 10) for i in range(10_000))
    with gzip.open(path, "wb", 1) if path.suffix == ".gz" else path.open("wb") as file:
        times = megabytes * 10**6 // len(lines) + 1
        for _ in range(times):
            file.write(lines)
    return times * len(lines)


def first_step(sizes: list[int], formats: list[str], runs: int) -> None:
    print("| data | worker's model | master's model and count | first step |\n|---|---|---|---|")
    for ending in formats:
        for size in sizes:
            with tempfile.TemporaryDirectory() as folder:
                Path(folder, "model.py").write_text(MODEL)
                data = Path(folder, f"data.{ending}")
                write_csv(data, size)
                found = [run_once(folder, data) for _ in range(runs)]
            medians = " | ".join(f"{statistics.median(each):.1f} s" for each in zip(*found, strict=True))
            print(f"| {size:,} MB, {ending} | {medians} |", flush=True)


def run_once(folder: str, data: Path) -> list[float]:
    """Seconds after the start of the command, by milestone."""
    job = Path(folder, "job")
    shutil.rmtree(job, ignore_errors=True)
    command = [sys.executable, "-m", "elasticcb", "train", f"--model_zoo={folder}", "--model_def=model.custom_model"]
    command += [f"--training_data={data}", "--num_workers=1", "--num_ps=1", "--max_step=1", f"--job_dir={job}"]
    started = time.time()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    seconds = []
    for role, text in MILESTONES:
        log = Path(job, "logs", f"{role}.log").read_text(errors="replace")
        found = re.search(rf"^(\S+)\.(\d+)Z {role} I \S+: {text}", log, re.MULTILINE)
        if found is None:
            raise SystemExit(f"{role}.log has no line {text!r}:\n{log}")
        at = (
            datetime.datetime.strptime(found[1], "%Y-%m-%dT%H:%M:%S").replace(tzinfo=datetime.timezone.utc).timestamp()
            + int(found[2]) / 1000
        )
        seconds.append(at - started)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["epochs", "checksums", "index", "first_step"])
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--sizes", type=int, nargs="+", default=[10, 300, 1200], help="MB of text")
    parser.add_argument("--rows", type=int, default=204_800)
    parser.add_argument("--formats", nargs="+")
    arguments = parser.parse_args()
    if arguments.what == "epochs":
        epochs(arguments.rows, arguments.formats or list(_WRITERS), arguments.runs)
    elif arguments.what == "checksums":
        checksums(arguments.megabytes, arguments.runs)
    elif arguments.what == "index":
        index(arguments.megabytes, arguments.runs)
    else:
        first_step(arguments.sizes, arguments.formats or ["csv", "csv.gz"], arguments.runs)


if __name__ == "__main__":
    main()
