"""What windows of rows do to a model: a simulation in one process.

    python benchmarks/row_windows.py [--seeds=3] [--into=docs/updates.md]

Workers take turns on the *clicks* of quality_cases.py (a factorization machine with an MLP, batches of 128, 2 epochs).
Each trains dense weights of its own, whose mean is taken after each window. For a window of batches a worker keeps the
rows that more than a share of its batches ask for, and updates them by an Adagrad of its own. Of other rows, each batch
sends the gradients. `MERGES` says how the rows that are kept are merged. Prints a Markdown table of the AUC over
validation data, in points, and of how many updates by others the rows that a batch asked for lacked, on average.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
import tensorflow as tf
from quality_cases import CLICK_COLUMNS, IDS_OF_COLUMN, Examples, clicks
from report import publish, table_parser

BATCH, EPOCHS, DIM, ACCUMULATOR = 128, 2, 17, 0.1  # a row: 16 factors, and its weight in the linear part
RATES, WORKERS = (0.05, 0.3), (2, 4)
MERGES = {
    "gradients": "sum of gradients",
    "squares": "sums of gradients and of their squares",
    "moved": "movements added up",
    "mean": "mean of movements",
}
# Batches of a window, the share of them that ask for a row that is kept, how it is merged.
SETTINGS = [(16, 1.0, ""), (4, 0.0, "squares"), *((16, 0.0, each) for each in ("gradients", "squares", "moved"))]
SETTINGS += [(16, 0.25, "squares"), (16, 0.25, "mean")]


def main() -> None:
    parser = table_parser(__doc__ or "")
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    training, validation = clicks(Path())
    titles = " | ".join(f"rate {rate}" for rate in RATES)
    lines = [f"| workers | batches | rows kept | merged | lacked | {titles} |", "|---" * (5 + len(RATES)) + "|"]
    plain: dict[Any, float] = {}
    for workers, (window, share, merge) in product(WORKERS, SETTINGS):
        cells, late = [], []
        for rate in RATES:
            values = []
            for seed in range(arguments.seeds):
                found, lacked = Simulation(workers, rate, window, share, merge, seed).auc(training, validation)
                late.append(lacked)
                exact = plain.setdefault((workers, rate, seed), found)  # the first setting's
                values.append(found - exact if merge else found)
            cells.append(f"{mean(values):{'+' if merge else ''}.2f} ± {stdev(values):.2f}")
        kept = f"in more than {window * share:.0f} batches" if share else "all"
        about = f"{window} | {kept} | {MERGES[merge]}" if merge else "1 | none | "
        lines.append(f"| {workers} | {about} | {mean(late):.1f} | {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    publish("row windows", "\n".join(lines), arguments.into)


class Simulation:
    """A training; the arguments are those of `SETTINGS`, and Adagrad's learning rate."""

    def __init__(self, workers: int, rate: float, window: int, share: float, merge: str, seed: int) -> None:
        self._window, self._least, self._merge, self._rate = window, window * share, merge, rate
        random = self._random = np.random.default_rng(seed)
        self._rows = random.uniform(-0.05, 0.05, (CLICK_COLUMNS * IDS_OF_COLUMN, DIM)).astype("f4")
        self._squares = np.full_like(self._rows, ACCUMULATOR)
        shapes = [(16 * CLICK_COLUMNS, 64), (64,), (64, 1), (1,)]
        dense = [np.zeros(each) if len(each) < 2 else random.normal(0, sum(each) ** -0.5, each) for each in shapes]
        self._dense = [[each.astype("f4") for each in dense] for _ in range(workers)]
        self._dense_squares = [[np.full_like(each, ACCUMULATOR) for each in own] for own in self._dense]
        self._lacked = self._lookups = 0

    def auc(self, training: Examples, validation: Examples) -> tuple[float, float]:
        """In points; and how many updates by other workers a row that was asked for lacked."""
        (ids, labels), workers = training, len(self._dense)
        for _ in range(EPOCHS):
            order = self._random.permutation(len(ids))
            cut = [order[first : first + BATCH] for first in range(0, len(ids), BATCH)]
            for first in range(0, len(cut) - workers + 1, workers * self._window):
                window = cut[first : first + workers * self._window]
                self._train([[(ids[part], labels[part]) for part in window[own::workers]] for own in range(workers)])
        metric = tf.keras.metrics.AUC(2000, from_logits=True)
        metric.update_state(validation[1], logits(self._rows, validation[0], self._dense[0]))
        return 100 * float(metric.result()), self._lacked / self._lookups

    def _train(self, batches: Sequence[Sequence[Examples]]) -> None:
        """A window: batches by worker."""
        count = len(self._rows)
        asked = [np.bincount(np.concatenate([np.unique(x) for x, _ in own]), minlength=count) for own in batches]
        kept = [counts > self._least for counts in asked]
        base = self._rows.copy(), self._squares.copy()
        rows, squares = [[held.copy() for _ in batches] for held in base]
        sums, updates = [np.zeros_like(base[0]) for _ in batches], np.zeros((len(batches), count), int)
        for step in range(max(map(len, batches))):
            pushes = []
            for own, (x, y) in ((own, given[step]) for own, given in enumerate(batches) if step < len(given)):
                ids, places = np.unique(x, return_inverse=True)
                stay = kept[own][ids]
                self._lookups += len(ids)
                self._lacked += int((updates[:, ids].sum(0) - updates[own, ids])[stay].sum())
                present = np.where(stay[:, None], rows[own][ids], self._rows[ids])
                computed = gradients(present, places.reshape(x.shape), y, self._dense[own])
                found, *dense = (each.numpy() for each in computed)
                for weight, square, gradient in zip(self._dense[own], self._dense_squares[own], dense, strict=True):
                    self._adagrad(weight, square, ..., gradient)
                self._adagrad(rows[own], squares[own], ids[stay], found[stay])
                sums[own][ids[stay]] += found[stay]
                updates[own, ids] += 1
                pushes.append((ids[~stay], found[~stay]))
            for push in pushes:
                self._adagrad(self._rows, self._squares, *push)
        moved, grown = (sum(each - before for each in own) for own, before in zip((rows, squares), base, strict=True))
        self._end(moved / np.maximum(1, sum(kept))[:, None] if self._merge == "mean" else moved, grown, sums)
        self._dense = [[np.mean(each, axis=0) for each in zip(*self._dense, strict=True)] for _ in batches]

    def _end(self, moved: Any, grown: Any, sums: Sequence[Any]) -> None:
        """Of a window: the servers get what workers made of the rows that they keep."""
        if self._merge == "gradients":
            for each in sums:
                self._adagrad(self._rows, self._squares, ..., each)
            return
        self._squares += grown
        self._rows += -self._rate * sum(sums) / np.sqrt(self._squares + 1e-7) if self._merge == "squares" else moved

    def _adagrad(self, rows: Any, squares: Any, ids: Any, gradients: Any) -> None:
        squares[ids] += gradients**2
        rows[ids] -= self._rate * gradients / np.sqrt(squares[ids] + 1e-7)


def logits(rows: Any, places: Any, dense: Sequence[Any]) -> Any:
    found = tf.gather(rows, places)
    factors, hidden = found[..., 1:], tf.reshape(found[..., 1:], (-1, len(dense[0])))
    pairs = 0.5 * tf.reduce_sum(tf.reduce_sum(factors, 1) ** 2 - tf.reduce_sum(factors**2, 1), 1, keepdims=True)
    return tf.reduce_sum(found[..., :1], 1) + pairs + tf.nn.relu(hidden @ dense[0] + dense[1]) @ dense[2] + dense[3]


@tf.function(reduce_retracing=True)
def gradients(rows: Any, places: Any, labels: Any, dense: Sequence[Any]) -> Any:
    """Of the loss, by rows and dense weights."""
    with tf.GradientTape() as tape:
        tape.watch((rows, dense))
        loss = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels, logits(rows, places, dense)))
    return [tf.convert_to_tensor(each) for each in tape.gradient(loss, [rows, *dense])]


if __name__ == "__main__":
    main()
