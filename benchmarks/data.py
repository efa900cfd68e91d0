"""What checksums of TFRecords cost.

    python benchmarks/data.py checksums

Reads TFRecords that are in the system's file cache, with and without the verification of their data, in turns. Prints
the difference of the medians, in seconds per GB of data.
"""

from __future__ import annotations

import argparse
import os
import statistics
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
                for verified in seconds:
                    verify = tfrecord._verify if verified else lambda *_: None
                    with mock.patch.object(tfrecord, "_verify", verify):
                        started = time.perf_counter()
                        for _ in reader.read_chunks(path, 0, count):
                            pass
                        seconds[verified].append((time.perf_counter() - started) * GIGABYTE / (count * size))
        without, verified = (statistics.median(seconds[key]) for key in (False, True))
        print(f"| {size:,} | {without:.2f} | {verified - without:.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["checksums"])
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args()
    checksums(arguments.megabytes, arguments.runs)


if __name__ == "__main__":
    main()
