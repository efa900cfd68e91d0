"""Memory and model quality of embedding tables whose rows are held as bfloat16.

    python benchmarks/rows_dtype.py memory [--rows=1e7] [--into=docs/embeddings.md]
    python benchmarks/rows_dtype.py quality --data_dir=DIRECTORY [--seeds=5] [--into=docs/embeddings.md]

`memory` fills a table with rows and the slot of Adagrad, in a process for each line. `quality` trains models whose
embeddings are updated as on a parameter server, `EmbeddingTable` and the model's optimizer on the rows of each batch;
all else is plain Keras. The models are movielens of the model zoo (DIRECTORY holds ml-100k/u.data), and clicks:
generated, 8 columns of zipf(1.2) with 20,000 ids each, whose logits are those of a factorization machine, that is
trained by Adagrad at a small rate. Rows rounded to the nearest bfloat16 are there for comparison; a job has none. In
brackets is the difference from float32 with the same seed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from statistics import mean, stdev
from typing import Any
from unittest import mock

import numpy as np
from quality_cases import CASES, Examples
from report import publish, table_parser
from tables import table_update

COLUMNS, VOCABULARY, UNITS = 8, 20_000, 8
EXAMPLES, HELD_OUT = 200_000, 50_000
KINDS = ("float32", "bfloat16", "bfloat16, to the nearest")


def main() -> None:
    parser = table_parser(__doc__ or "")
    parser.add_argument("what", choices=("memory", "quality"))
    parser.add_argument("--rows", type=float, default=1e7)
    parser.add_argument("--data_dir", type=Path)
    parser.add_argument("--seeds", type=int, default=5, help="2 or more")
    arguments = parser.parse_args()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
    is_memory = arguments.what == "memory"
    lines = memory(int(arguments.rows)) if is_memory else quality(arguments.data_dir, arguments.seeds)
    publish(f"rows_dtype {arguments.what}", "\n".join(lines), arguments.into)


# ---------------------------------------------------------------------- memory


def memory(rows: int) -> list[str]:
    lines = ["| dim | rows_dtype | bytes a row | memory of the process |", "|---|---|---|---|"]
    for dim in (16, 64):
        for rows_dtype in ("float32", "bfloat16"):
            with ProcessPoolExecutor(1, get_context("spawn")) as pool:
                row_bytes, resident = pool.submit(filled, rows, dim, rows_dtype).result()
            lines.append(f"| {dim} | {rows_dtype} | {row_bytes} | {resident / 2**30:.2f} GiB |")
            print(lines[-1], flush=True)
    return lines


def filled(rows: int, dim: int, rows_dtype: str) -> tuple[int, int]:
    """Bytes of a row, by which the memory of tables is counted, and those by which the process has grown."""
    import psutil

    from elasticcb.ps.embedding_table import EmbeddingTable

    table = EmbeddingTable(
        dim, "float32", lambda ids: np.ones((len(ids), dim)), {"accumulator": np.full(dim, 0.1)}, options=of(rows_dtype)
    )
    before = psutil.Process().memory_info().rss
    for start in range(0, rows, 1 << 16):
        ids = np.arange(start, min(start + (1 << 16), rows))
        table.lookup(ids, create=True)
        change = table.prepare(ids, np.ones((len(ids), dim), np.float32))
        table.commit(change, change.rows, change.slots, 1)
    return table.row_bytes, psutil.Process().memory_info().rss - before


def of(rows_dtype: str) -> Any:
    from elasticcb.settings import RowsDtype
    from elasticcb.settings.table import TableOptions

    return TableOptions(rows_dtype=RowsDtype(rows_dtype))


# ---------------------------------------------------------------------- quality


@dataclass(frozen=True)
class Trained:
    """A model, its training data, and the metrics to report."""

    model: Callable[[], Any]  # compiled
    training: Examples
    validation: Examples
    batch_size: int
    epochs: int
    metrics: Sequence[str]


def quality(data_dir: Path, seeds: int) -> list[str]:
    movielens = CASES["movielens"]
    cases = {
        "movielens": Trained(
            movielens.model,
            *movielens.load(data_dir),
            movielens.batch_size,
            movielens.epochs,
            ("rmse",),
        ),
        "clicks": Trained(clicks_model, *clicks(), 256, 2, ("auc", "loss")),
    }
    lines = [f"| model | metric, in hundredths | {' | '.join(KINDS)} |", "|---|---|---|---|---|"]
    for name, case in cases.items():
        found = {kind: [train(case, kind, seed) for seed in range(seeds)] for kind in KINDS}
        for metric in case.metrics:
            plain, *others = ([100 * each[metric] for each in found[kind]] for kind in KINDS)
            shown = [f"{mean(plain):.2f} ± {stdev(plain):.2f}"]
            for values in others:
                differences = [value - of_plain for value, of_plain in zip(values, plain, strict=True)]
                shown.append(f"{mean(values):.2f} ({mean(differences):+.2f} ± {stdev(differences):.2f})")
            lines.append(f"| {name} | {metric} | {' | '.join(shown)} |")
            print(lines[-1], flush=True)
    return lines


def clicks() -> tuple[Examples, Examples]:
    random = np.random.default_rng(0)
    ids = (random.zipf(1.2, (EXAMPLES + HELD_OUT, COLUMNS)) - 1) % VOCABULARY
    ids += VOCABULARY * np.arange(COLUMNS)
    weights = random.normal(0, 0.5, COLUMNS * VOCABULARY)
    vectors = random.normal(0, 0.35, (COLUMNS * VOCABULARY, 4))[ids]
    pairs = 0.5 * (vectors.sum(1) ** 2 - (vectors**2).sum(1)).sum(1)
    logits = weights[ids].sum(1) + pairs - 1
    labels = (random.random(len(ids)) < 1 / (1 + np.exp(-logits))).astype(np.float32)[:, None]
    return (ids[:EXAMPLES], labels[:EXAMPLES]), (ids[EXAMPLES:], labels[EXAMPLES:])


def clicks_model() -> Any:
    import keras

    layers = keras.layers
    ids = keras.Input((COLUMNS,), dtype="int64")
    vectors = layers.Embedding(COLUMNS * VOCABULARY, UNITS)(ids)
    square_of_sum = keras.ops.square(keras.ops.sum(vectors, axis=1))
    sum_of_squares = keras.ops.sum(keras.ops.square(vectors), axis=1)
    x = layers.Concatenate()([layers.Flatten()(vectors), square_of_sum - sum_of_squares])
    logits = layers.Dense(1)(layers.Dense(64, activation="relu")(x))
    model = keras.Model(ids, logits)
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adagrad(0.01), loss, metrics=[keras.metrics.AUC(from_logits=True, name="auc")])
    return model


def train(case: Trained, kind: str, seed: int) -> dict[str, float]:
    """The metrics of a model whose tables hold rows of this kind."""
    import keras
    import tensorflow as tf

    tf.get_logger().setLevel("ERROR")  # it warns of models that are made again and again
    keras.utils.set_random_seed(seed)
    model = case.model()
    batches = (
        tf.data.Dataset.from_tensor_slices(case.training)
        .shuffle(EXAMPLES, seed)
        .batch(case.batch_size, drop_remainder=True)
        .repeat(case.epochs)
    )
    layers = [layer for layer in model.layers if isinstance(layer, keras.layers.Embedding)]
    values = [layer.embeddings.value for layer in layers]
    tables = Served(model.optimizer, [value.numpy() for value in values], kind)
    others = [each for each in model.trainable_variables if all(each.value is not value for value in values)]
    model.optimizer.build(others)

    @tf.function
    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = model.compute_loss(x, y, model(x, training=True))
        rows, dense = tape.gradient(loss, [values, [each.value for each in others]])
        model.optimizer.apply(dense)
        unique = [tf.unique(each.indices) for each in rows]
        return [
            (ids, tf.math.unsorted_segment_sum(each.values, places, tf.size(ids)))
            for each, (ids, places) in zip(rows, unique, strict=True)
        ]

    for x, y in batches:
        gradients = [(ids.numpy().astype(np.int64), rows.numpy()) for ids, rows in step(x, y)]
        for value, (ids, rows) in zip(values, tables.update(gradients), strict=True):
            value.scatter_update(tf.IndexedSlices(rows, ids))
    found: dict[str, float] = model.evaluate(*case.validation, batch_size=4096, verbose=0, return_dict=True)
    return found


class Served:
    """Tables as a parameter server holds them.

    Args:
        optimizer: of the model.
        values: of each table, all rows.
        kind: one of `KINDS`.
    """

    def __init__(self, optimizer: Any, values: list[Any], kind: str) -> None:
        from elasticcb.ps.embedding_table import EmbeddingTable
        from elasticcb.ps.table_update import TableUpdates
        from elasticcb.sharding.table_state import TableState

        self._tables, self._updates = {}, {}
        self._to_nearest = kind == KINDS[2]
        self._version = 0
        for index, rows in enumerate(values):
            update = table_update(lambda: type(optimizer).from_config(optimizer.get_config()), rows.shape[1])
            options = of(kind.partition(",")[0])
            table = EmbeddingTable(rows.shape[1], "float32", None, update.slots_of(rows.shape[1]), options=options)
            table.load(TableState(np.arange(len(rows)), rows), 0)
            self._tables[index], self._updates[index] = table, update
        self._apply = TableUpdates(self._updates)

    def update(self, gradients: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
        """By gradients of rows, ids and rows as they are then, of each table."""
        self._version += 1
        with self._rounding():
            steps = {"iterations": np.int64(self._version - 1)}
            self._apply(self._tables, dict(enumerate(gradients)), self._version, steps)
        return [(ids, self._tables[index].lookup(ids, False)) for index, (ids, _) in enumerate(gradients)]

    def _rounding(self) -> AbstractContextManager[Any]:
        import ml_dtypes

        def to_nearest(rows: Any, ids: Any, version: int) -> Any:
            return rows.astype(ml_dtypes.bfloat16)

        if self._to_nearest:
            return mock.patch("elasticcb.ps.table_rows.rounded", to_nearest)
        return nullcontext()


if __name__ == "__main__":
    main()
