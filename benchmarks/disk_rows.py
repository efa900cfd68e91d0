"""What rows of an embedding table on disk cost (--embedding_when_full=disk), in a folder that is removed afterwards.

    python benchmarks/disk_rows.py zipf [--vocabulary=1e7]
    python benchmarks/disk_rows.py fill [--rows=1e8] [--memory=2e9]

No processes, no network. `zipf` trains a table with Adagrad on the ids of the deepfm workload (benchmarks/tables.py)
without a limit, then with memory for a tenth of the rows that it came to, and prints milliseconds of a lookup and an
update of one batch: CPU time of all threads, and wall time. `fill` makes `--rows` rows, with memory for some of them,
trains, writes a checkpoint, and reads all rows for an export; it prints rows per second, memory and bytes on disk.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tables import Array, initial_rows, table_update, unique_ids

WINDOW = 50  # batches


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["zipf", "fill"])
    parser.add_argument("--vocabulary", type=float, default=1e7, help="ids in all, of zipf")
    parser.add_argument("--batch", type=int, default=1024, help="examples of a batch, of zipf")
    parser.add_argument("--warm_up", type=int, default=2000, help="batches before the measurement, of zipf")
    parser.add_argument("--rows", type=float, default=1e8, help="of fill")
    parser.add_argument("--memory", type=float, default=2e9, help="bytes, of fill")
    parser.add_argument("--dim", type=int, default=16, help="elements of a row")
    parser.add_argument("--folder", type=Path, help="for the files; by default the system's for temporary ones")
    arguments = parser.parse_args()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        if arguments.what == "zipf":
            run_zipf(Path(folder), int(arguments.vocabulary), arguments.batch, arguments.warm_up, arguments.dim)
        else:
            run_fill(Path(folder), int(arguments.rows), int(arguments.memory), arguments.dim)


class Trained:
    """A table that is trained with Adagrad, with rows on disk beyond `memory_bytes` (0: all are in memory)."""

    def __init__(self, vocabulary: int, dim: int, memory_bytes: int, folder: Path) -> None:
        import keras

        from elasticcb.ps.embedding_table import EmbeddingTable
        from elasticcb.ps.table_limits import TableLimits
        from elasticcb.ps.table_update import TableUpdates
        from elasticcb.settings.choices import WhenFull
        from elasticcb.storage.cold_store import ColdStore

        of_table = table_update(keras.optimizers.Adagrad, dim)
        self._update = TableUpdates({0: of_table})
        self._dim = dim
        self.store = ColdStore(folder) if memory_bytes else None
        limits = TableLimits(memory_bytes, WhenFull.DISK if memory_bytes else WhenFull.ERROR, self.store)
        self.table = EmbeddingTable(dim, "float32", initial_rows(vocabulary, dim), of_table.slots_of(dim), limits)
        self.version = 0

    def step(self, ids: Array) -> None:
        self.version += 1
        self.table.lookup(ids, create=True)
        self._update({0: self.table}, {0: (ids, np.ones((len(ids), self._dim), np.float32))}, self.version)


def run_zipf(folder: Path, vocabulary: int, batch: int, warm_up: int, dim: int) -> None:
    memory_bytes = 0
    for title in ("all in memory", "a tenth in memory"):
        trained, random = Trained(vocabulary, dim, memory_bytes, folder), np.random.default_rng(0)
        for _ in range(warm_up):
            trained.step(unique_ids(random, vocabulary, batch))
        batches = [unique_ids(random, vocabulary, batch) for _ in range(4 * WINDOW)]
        with timed() as spent:
            for ids in batches:
                trained.step(ids)
        rows, in_memory = len(trained.table), len(trained.table.used)
        cpu, wall = (1e3 * seconds / len(batches) for seconds in (spent.cpu, spent.wall))
        print(
            f"{title}: {np.mean([len(ids) for ids in batches]):,.0f} rows a batch, {rows:,} rows, {in_memory:,} in "
            f"memory; {cpu:.2f} ms of CPU, {wall:.2f} ms a batch",
            flush=True,
        )
        memory_bytes = trained.table.bytes // 10
        if trained.store is not None:
            trained.store.close()


def run_fill(folder: Path, rows: int, memory_bytes: int, dim: int) -> None:
    from elasticcb.checkpoint.shard_file import Part, write_part

    trained = Trained(rows, dim, memory_bytes, folder)
    table, at_once = trained.table, 50_000

    def report(what: str, count: int, spent: Spent) -> None:
        print(
            f"{what}: {count:,} rows in {spent.wall:.1f} s, {count / spent.wall:,.0f} rows/s "
            f"({spent.cpu:.1f} s of CPU); "
            f"{resident():,.0f} MB of memory, {bytes_in(folder) / 1e6:,.0f} MB on disk",
            flush=True,
        )

    with timed() as spent:
        for first in range(0, rows, at_once):
            table.lookup(scattered(np.arange(first, min(first + at_once, rows))), create=True)
            if (first // at_once) % (rows // at_once // 10) == 0:
                print(f"  {first:,} rows after {time.time() - spent.begun:.0f} s", flush=True)
            table.advance(first // at_once)
    trained.version = rows // at_once
    report("made", rows, spent)
    random = np.random.default_rng(0)
    with timed() as spent:
        for _ in range(WINDOW):
            trained.step(scattered(np.unique(random.integers(0, rows, 2000))))
    report("trained, drawn from all", WINDOW * 2000, spent)
    lock = threading.Lock()
    held = table.hold(lock)
    with timed() as spent:
        write_part(folder / "checkpoint.safetensors", Part(0, held={0: held}))
    held.release()
    report("checkpoint", rows, spent)
    os.unlink(folder / "checkpoint.safetensors")
    held, read = table.hold(lock), 0
    with timed() as spent:
        for piece in held.pieces():
            read += len(piece.ids)
    held.release()
    assert read == rows
    report("read for an export", read, spent)
    assert trained.store is not None
    trained.store.close()


class Spent:
    """Seconds."""

    begun = wall = cpu = 0.0


@contextlib.contextmanager
def timed() -> Iterator[Spent]:
    spent = Spent()
    spent.begun, begun_cpu = time.time(), time.process_time()
    yield spent
    spent.wall, spent.cpu = time.time() - spent.begun, time.process_time() - begun_cpu


def scattered(numbers: Array) -> Array:
    """Ids without an order, as hashes are."""
    ids: Any = (numbers.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(1)
    return np.asarray(ids.astype(np.int64))


def resident() -> float:
    """MB that this process has in memory."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1e3


def bytes_in(folder: Path) -> int:
    return sum(
        os.stat(os.path.join(place, name)).st_blocks * 512 for place, _, names in os.walk(folder) for name in names
    )


if __name__ == "__main__":
    main()
