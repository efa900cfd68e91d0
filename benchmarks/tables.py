"""How many rows of an embedding table a parameter server looks up and updates in a second of one core.

    python benchmarks/tables.py

No processes, no network: `EmbeddingTable`, and the user's optimizer on its rows. The ids are those of the deepfm
workload: 26 columns that share the vocabulary, zipf(1.2) in each. Rows are made on first use, as in a job; before the
measurement, `--warm_up` batches make those that come often. Prints a Markdown table of rows per second of CPU time, all
threads counted, medians over windows; "new ids" are those of the windows that had no row yet.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

COLUMNS = 26
EXPONENT = 1.2
OPTIMIZERS = ("SGD", "Adagrad", "Adam")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocabulary", type=float, nargs="+", default=[1e5, 1e6, 1e7, 1e8], help="ids in all")
    parser.add_argument("--dim", type=int, nargs="+", default=[16, 1], help="elements of a row")
    parser.add_argument("--batch", type=int, nargs="+", default=[128, 1024], help="examples of a batch")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, nargs="+", default=["Adagrad"], help="of Keras")
    parser.add_argument("--rows_dtype", choices=("float32", "bfloat16"), default="float32", help="of rows in memory")
    parser.add_argument("--warm_up", type=int, default=200, help="batches before the measurement")
    parser.add_argument("--windows", type=int, default=5, help="windows of 50 batches")
    arguments = parser.parse_args()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")

    print("| optimizer | ids | dim | batch | rows a batch | new ids | lookups/s | updates/s | rows held | MiB held |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for optimizer in arguments.optimizer:
        for vocabulary in arguments.vocabulary:
            for dim in arguments.dim:
                for batch in arguments.batch:
                    measured = measure(
                        optimizer,
                        int(vocabulary),
                        dim,
                        batch,
                        arguments.rows_dtype,
                        arguments.warm_up,
                        arguments.windows,
                    )
                    print(f"| {optimizer} | {vocabulary:.0e} | {dim} | {batch} | {' | '.join(measured)} |", flush=True)


def measure(
    optimizer: str, vocabulary: int, dim: int, batch: int, rows_dtype: str, warm_up: int, windows: int
) -> list[str]:
    """The last columns of a line."""
    import keras

    from elasticcb.ps.embedding_table import EmbeddingTable
    from elasticcb.ps.table_update import TableUpdates
    from elasticcb.settings import RowsDtype
    from elasticcb.settings.table import TableOptions

    of_table = table_update(lambda: getattr(keras.optimizers, optimizer)(0.05), dim)
    update = TableUpdates({0: of_table})
    options = TableOptions(rows_dtype=RowsDtype(rows_dtype))
    table = EmbeddingTable(dim, "float32", initial_rows(vocabulary, dim), of_table.slots_of(dim), options=options)
    random = np.random.default_rng(0)
    version = 0

    def run(batches: Sequence[Array]) -> tuple[float, float]:
        """CPU seconds of lookups and of updates."""
        nonlocal version
        gradients = [np.ones((len(ids), dim), np.float32) for ids in batches]
        looking_up = updating = 0.0
        for ids, gradient in zip(batches, gradients, strict=True):
            version += 1
            started = time.process_time()
            table.lookup(ids, create=True)
            looked_up = time.process_time()
            update({0: table}, {0: (ids, gradient)}, version)
            looking_up += looked_up - started
            updating += time.process_time() - looked_up
        return looking_up, updating

    run([unique_ids(random, vocabulary, batch) for _ in range(warm_up)])
    before = len(table)
    lookups, updates, rows_of_batches = [], [], []
    for _ in range(windows):
        batches = [unique_ids(random, vocabulary, batch) for _ in range(50)]
        rows = sum(map(len, batches))
        looking_up, updating = run(batches)
        lookups.append(rows / looking_up)
        updates.append(rows / updating)
        rows_of_batches.append(rows / len(batches))
    new = (len(table) - before) / sum(rows * 50 for rows in rows_of_batches)
    return [
        f"{median(rows_of_batches):,.0f}",
        f"{100 * new:.1f} %",
        f"{median(lookups) / 1e6:.1f} M",
        f"{median(updates) / 1e6:.1f} M",
        f"{len(table):,}",
        f"{table.bytes / 2**20:,.0f}",
    ]


def unique_ids(random: np.random.Generator, vocabulary: int, batch: int) -> Array:
    """The unique ids of one batch, in no order, int64."""
    below = vocabulary // COLUMNS
    # The inverse of the distribution function, as if numbers between the whole ones also came.
    shares = random.random((batch, COLUMNS))
    ranks = ((below + 1) ** (1 - EXPONENT) - 1) * shares + 1
    ids = (ranks ** (1 / (1 - EXPONENT))).astype(np.int64) - 1 + np.arange(COLUMNS) * below
    unique: Array = random.permutation(np.unique(ids))
    return unique


def initial_rows(vocabulary: int, dim: int) -> Callable[[Array], Array]:
    """As a server makes them."""
    import tensorflow as tf

    from elasticcb.layers.initial_values import InitialValues
    from elasticcb.tf.batch_signatures import quick_call

    values = InitialValues("uniform", 1, vocabulary, dim)
    make = quick_call(lambda ids: [values(ids)], [tf.TensorSpec([None], tf.int64)])
    return lambda ids: make([tf.constant(ids)])[0].numpy()


def table_update(make_optimizer: Callable[[], Any], dim: int) -> Any:
    """The update of a table by an optimizer, as a server makes it."""
    from elasticcb.optimizers.variables import Leaf
    from elasticcb.ps.table_update import TableUpdate
    from elasticcb.sharding.partition import VariableSpec

    spec = VariableSpec("embedding/embeddings", (0, dim), "float32", True, table="{}")

    return TableUpdate(Leaf("0", make_optimizer(), {0: spec}), spec)


if __name__ == "__main__":
    main()
