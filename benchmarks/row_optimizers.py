"""What optimizers cost for each row of an embedding table, and how good the models are: plain Keras, in one process.

    python benchmarks/row_optimizers.py [--data_dir=DIRECTORY] [--accumulators=1e-6,1e-4] [--into=docs/embeddings.md]

Clicks are generated: 8 columns of ids by zipf(1.2), whose biases and pairwise products make the odds. With
DIRECTORY, which holds ml-100k/u.data, also ratings of 4 and 5 against others, by user and item. Tables [ids, 16] are
trained by each optimizer, dense layers by Adam(0.001). Each optimizer has the best of four learning rates, and of the
values that accumulators begin with, by a tenth of the data. Prints a Markdown table of the bytes of a row on a server,
and of the AUC over another tenth.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
from report import publish, table_parser

DIM, EPOCHS, BATCH_SIZE = 16, 2, 256
Data = tuple[np.ndarray, np.ndarray]  # ids [n, columns], labels [n, 1]


def main() -> None:
    parser = table_parser(__doc__ or "")
    parser.add_argument("--data_dir", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--accumulators", default="1e-6,1e-4", help="what they begin with, to choose from")
    arguments = parser.parse_args()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    import keras

    from elasticcb.optimizers import RowWiseAdagrad

    data = {"clicks": clicks()}
    if arguments.data_dir:
        data["movielens"] = ratings(arguments.data_dir / "ml-100k" / "u.data")
    lines = [f"| optimizer | bytes of a row of {DIM} float32 | {' | '.join(f'AUC, {name}' for name in data)} |"]
    lines.append("|---|---|" + "---|" * len(data))
    starts = [float(start) for start in arguments.accumulators.split(",")]
    adagrads: list[tuple[float, ...]] = list(
        product((0.03, 0.1, 0.3, 1.0), starts)
    )  # learning rate, initial accumulator
    kinds: dict[Any, list[tuple[float, ...]]] = {
        keras.optimizers.SGD: [(3.0,), (10.0,), (30.0,), (100.0,)],
        RowWiseAdagrad: adagrads,
        keras.optimizers.Adagrad: adagrads,
        keras.optimizers.Adam: [(0.001,), (0.003,), (0.01,), (0.03,)],
    }
    for kind, settings in kinds.items():
        makers = [partial(kind, *each) for each in settings]
        cells = [best(makers, *split(*given), seeds=arguments.seeds) for given in data.values()]
        lines.append(f"| {kind.__name__} | {row_bytes(kind)} | {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    publish("row optimizers", "\n".join(lines), arguments.into)


def clicks(rows: int = 80_000, columns: int = 8, vocabulary: int = 1_000) -> Data:
    random = np.random.default_rng(0)
    ids = (random.zipf(1.2, (rows, columns)) % vocabulary).astype("int32")
    place = np.arange(columns)
    biases, vectors = random.normal(0, 0.4, (columns, vocabulary)), random.normal(0, 0.4, (columns, vocabulary, 4))
    held = vectors[place, ids]
    products = (held.sum(1) ** 2 - (held**2).sum(1)).sum(1) / 2
    odds = biases[place, ids].sum(1) + products - 1
    return ids, (random.random(rows) < 1 / (1 + np.exp(-odds)))[:, None].astype("float32")


def ratings(path: Path) -> Data:
    table = np.loadtxt(path, np.int64)
    return table[:, :2].astype("int32"), (table[:, 2:3] >= 4).astype("float32")


def split(ids: np.ndarray, labels: np.ndarray) -> tuple[Data, Data, Data]:
    """To train on, to choose the rate by, to report."""
    order = np.random.default_rng(1).permutation(len(ids))
    training, choosing, reported = np.split(order, [len(ids) * 8 // 10, len(ids) * 9 // 10])
    return (ids[training], labels[training]), (ids[choosing], labels[choosing]), (ids[reported], labels[reported])


def best(makers: Sequence[Callable[[], Any]], training: Data, choosing: Data, reported: Data, seeds: int) -> str:
    """The AUC in points, over the data to report, of the optimizer that is best over the data to choose by."""
    make = max(makers, key=lambda make: auc(make(), training, choosing, seeds))
    found = [auc(make(), training, reported, seed) for seed in range(seeds)]
    return f"{mean(found):.2f}{f' ± {stdev(found):.2f}' if seeds > 1 else ''}"


def auc(optimizer: Any, training: Data, validation: Data, seed: int) -> float:
    """Of a model whose tables the optimizer trains, in points."""
    import keras

    keras.utils.set_random_seed(seed)
    ids, _ = training
    inputs = keras.Input(ids.shape[1:], dtype="int32")
    tables = [keras.layers.Embedding(int(ids.max()) + 1, DIM) for _ in range(ids.shape[1])]
    found = keras.layers.Concatenate()([table(inputs[:, place]) for place, table in enumerate(tables)])
    outputs = keras.layers.Dense(1)(keras.layers.Dense(64, "relu")(found))
    model = keras.Model(inputs, outputs)
    by_name = keras.optimizers.OptimizerMap(keras.optimizers.Adam(0.001), {".*embeddings": optimizer})
    model.compile(
        keras.optimizers.MultiOptimizer(by_name),
        keras.losses.BinaryCrossentropy(from_logits=True),
        metrics=[keras.metrics.AUC(2000, from_logits=True, name="auc")],
    )
    model.fit(*training, batch_size=BATCH_SIZE, epochs=EPOCHS, verbose=0)
    return 100 * float(model.evaluate(*validation, 4096, 0, return_dict=True)["auc"])


def row_bytes(kind: Callable[[], Any]) -> int:
    """What a server holds for a row, with the optimizer's slots, two counts and the index."""
    from elasticcb.optimizers.variables import Leaf
    from elasticcb.ps.embedding_table import EmbeddingTable
    from elasticcb.ps.table_update import TableUpdate
    from elasticcb.sharding.partition import VariableSpec

    spec = VariableSpec("table/embeddings", (0, DIM), "float32", True, table="{}")

    update = TableUpdate(Leaf("0", kind(), {0: spec}), spec)
    return EmbeddingTable(DIM, "float32", None, update.slots_of(DIM)).row_bytes


if __name__ == "__main__":
    main()
