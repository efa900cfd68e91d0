"""What checksums of TFRecords and indexes cost, and how the time to the first step depends on the size of the data.

    python benchmarks/data.py checksums
    python benchmarks/data.py index
    python benchmarks/data.py first_step [--sizes 10 300 1200] [--formats csv csv.gz]

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
from pathlib import Path
from unittest import mock

GIGABYTE = 10**9


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

def feed(dataset, mode, metadata):
    def parse(line):
        numbers = tf.strings.to_number(tf.strings.split(line, ","))
        return numbers[:8], numbers[8:]
    return dataset.map(parse)
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
    parser.add_argument("what", choices=["checksums", "index", "first_step"])
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--sizes", type=int, nargs="+", default=[10, 300, 1200], help="MB of text")
    parser.add_argument("--formats", nargs="+", default=["csv", "csv.gz"])
    arguments = parser.parse_args()
    if arguments.what == "checksums":
        checksums(arguments.megabytes, arguments.runs)
    elif arguments.what == "index":
        index(arguments.megabytes, arguments.runs)
    else:
        first_step(arguments.sizes, arguments.formats, arguments.runs)


if __name__ == "__main__":
    main()
