"""How often batches ask for the same rows of embedding tables: what a cache of rows at the workers could save at most.

    python benchmarks/repeated_rows.py [--into=docs/updates.md]

No model is trained: ids are counted, of deepfm and dcn (benchmarks/models) and of the *clicks* of quality_cases.py.
A window is a number of batches of one worker, which keeps the rows that at least a number of its batches ask for. Bytes
are those of ids and float32 between a worker and the servers: at each batch the row and its gradient; once in a window,
of a row that is kept, the row, its Adagrad accumulator, and the sums of its gradients and of their squares. A row is as
in deepfm: one of 16 elements and one of 1, in two tables. Then measures what an exchange costs by its rows. Prints four
Markdown tables.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from models import dcn, deepfm
from quality_cases import clicks
from report import publish, table_parser
from wire import rows_of_batches, served, variables

BEFORE, WINDOWS, WORKERS, EXCHANGES = (1, 4, 16, 64), (4, 16, 64), (2, 4), 128
BYTES_OF_BATCH, BYTES_OF_WINDOW = (2 * (2 * 8) + floats * 4 * 17 for floats in (2, 4))


def main() -> None:
    arguments = table_parser(__doc__ or "").parse_args()
    os.environ |= {"TF_CPP_MIN_LOG_LEVEL": "3", "KERAS_BACKEND": "tensorflow", "CUDA_VISIBLE_DEVICES": "-1"}
    deepfm_ids = deepfm.arrays(np.random.default_rng(0))["ids"]
    cases = [("deepfm", 128, deepfm_ids), ("deepfm", 1024, deepfm_ids), ("dcn", 128, dcn_ids())]
    cases.append(("clicks", 128, clicks(Path())[0][0]))
    before = [
        f"| | batch | different ids | {' | '.join(f'in the last {count}' for count in BEFORE)} |",
        "|---" * 7 + "|",
    ]
    kept = ["| | window | rows kept | of | lookups of them | bytes |", "|---" * 6 + "|"]
    shared = [f"| | window | {' | '.join(f'{count} workers' for count in WORKERS)} |", "|---" * 4 + "|"]
    for name, size, ids in cases:
        batches = [np.unique(ids[first : first + size]) for first in range(0, len(ids) - size + 1, size)]
        different = f"{np.mean([len(batch) for batch in batches]):,.0f} of {size * ids.shape[1]:,}"
        before.append(f"| {name} | {size} | {different} | {' | '.join(map(_percent, repeated(batches)))} |")
        for window in WINDOWS if size == 128 else ():
            for least in sorted({0, 1, window // 4 - 1}):
                kept.append(f"| {name} | {window} | in {least + 1} or more | {savings(batches, window, least)} |")
            several = (" of rows, ".join(map(_percent, changed_by_several(batches, window, each))) for each in WORKERS)
            shared.append(f"| {name} | {window} | {' of changes | '.join(several)} of changes |")
    publish("repeated rows", "\n".join([*before, "", *kept, "", *shared, "", *costs()]), arguments.into)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def dcn_ids() -> Any:
    """Of all columns, each with a range of its own."""
    ids, first = dcn.arrays(np.random.default_rng(0))["ids"], 0
    for (vocabulary, _), part in zip(dcn.COLUMNS, dcn.parts(), strict=True):
        ids[:, part] += first
        first += vocabulary
    return ids


def repeated(batches: Sequence[Any]) -> list[float]:
    """The share of a batch's ids that a batch before had, by how far back it may be (`BEFORE`)."""
    last = np.full(max(batch.max() for batch in batches) + 1, -(1 << 30))
    found, total = np.zeros(len(BEFORE)), 0
    for number, batch in enumerate(batches):
        if number >= min(max(BEFORE), len(batches) // 2):
            found += [np.count_nonzero(number - last[batch] <= count) for count in BEFORE]
            total += len(batch)
        last[batch] = number
    return list(found / total)


def in_windows(batches: Sequence[Any], length: int) -> Iterator[list[Any]]:
    for first in range(0, len(batches) - length + 1, length):
        yield list(batches[first : first + length])


def savings(batches: Sequence[Any], length: int, least: int) -> str:
    """Of a window, if rows stay that more than `least` of its batches ask for: cells of the table."""
    found: list[Any] = []
    for window in in_windows(batches, length):
        counts = np.unique(np.concatenate(window), return_counts=True)[1]
        found.append((np.count_nonzero(counts > least), len(counts), counts[counts > least].sum(), counts.sum()))
    rows, of, lookups, total = np.mean(np.array(found), axis=0)
    traffic = (total - lookups) * BYTES_OF_BATCH + rows * BYTES_OF_WINDOW
    return f"{rows:,.0f} | {of:,.0f} | {_percent(lookups / total)} | {_percent(traffic / total / BYTES_OF_BATCH)}"


def changed_by_several(batches: Sequence[Any], length: int, workers: int) -> tuple[float, float]:
    """Of the rows changed in a window, and of the changes, the shares of rows that several workers change."""
    found: list[Any] = []
    for window in in_windows(batches, workers * length):
        by_worker = [np.unique(np.concatenate(window[worker::workers])) for worker in range(workers)]
        several = np.unique(np.concatenate(by_worker), return_counts=True)[1] > 1
        changes = np.unique(np.concatenate(window), return_counts=True)[1]
        found.append((np.count_nonzero(several), len(several), changes[several].sum(), changes.sum()))
    rows, of, changes_of_several, all_changes = np.sum(np.array(found), axis=0)
    return rows / of, changes_of_several / all_changes


def costs() -> list[str]:
    """What an exchange of deepfm's rows costs, client and server together, by the share of rows that is left."""
    lines = ["| rows of an exchange | CPU ms |", "|---|---|"]
    specs = variables()
    whole = rows_of_batches(0, EXCHANGES + 1, specs)
    with served("local", "same", 1) as (worker,):
        for share in (1.0, 1.0, 0.7, 0.5, 0.25, 0.0):  # the first makes rows
            sets = [{table: own[: max(1, int(share * len(own)))] for table, own in ids.items()} for ids in whole]
            spent = []
            for given, wanted in pairwise(sets):
                gradients, begun = worker.gradients(given), time.process_time()
                worker.push(gradients, 0, wanted)
                spent.append(time.process_time() - begun)
            rows = np.mean([len(own) for ids in sets for own in ids.values()])
            lines.append(f"| {rows:,.0f} | {1e3 * median(spent):.2f} |")
    return [*lines[:2], *lines[3:]]


if __name__ == "__main__":
    main()
