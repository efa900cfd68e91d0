"""What late gradients of embedding rows do to a model: plain Keras, but gradients come to the tables some batches late.

    python benchmarks/late_rows.py --data_dir=DIRECTORY [--late=0,1,3,7,15] [--seeds=3] [--into=docs/updates.md]

That is what several workers do to tables, with local and asynchronous updates alike: with W workers, a row's gradient
is computed before some W - 1 other batches are applied. The model is movielens of the model zoo, where a batch of 128
has up to a tenth of all rows. All else is applied at once. DIRECTORY holds ml-100k/u.data. Prints a Markdown table of
the error over validation data.
"""

from __future__ import annotations

import os
from collections import deque
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from quality_cases import CASES, Case, Examples
from report import publish, table_parser


def main() -> None:
    parser = table_parser(__doc__ or "")
    parser.add_argument("--data_dir", type=Path, required=True)
    parser.add_argument("--late", default="0,1,3,7,15", help="batches, with commas between them")
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

    case = CASES["movielens"]
    training, validation = case.load(arguments.data_dir)
    lines = ["| batches late | rmse, in points |", "|---|---|"]
    for late in map(int, arguments.late.split(",")):
        found = [rmse(case, training, validation, late, seed) for seed in range(arguments.seeds)]
        spread = f" ± {stdev(found):.2f}" if len(found) > 1 else ""
        lines.append(f"| {late} | {mean(found):.2f}{spread} |")
        print(lines[-1], flush=True)
    publish("late rows", "\n".join(lines), arguments.into)


def rmse(case: Case, training: Examples, validation: Examples, late: int, seed: int) -> float:
    """Of a model whose tables get each gradient `late` batches after it was computed."""
    import keras
    import tensorflow as tf

    keras.utils.set_random_seed(seed)
    model = case.model()
    batches = (
        tf.data.Dataset.from_tensor_slices(training).shuffle(100_000, seed).batch(case.batch_size).repeat(case.epochs)
    )
    tables = [layer.embeddings for layer in model.layers if isinstance(layer, keras.layers.Embedding)]
    others = [variable for variable in model.trainable_variables if all(variable is not table for table in tables)]
    for_tables = model.optimizer.from_config(model.optimizer.get_config())
    model.optimizer.build(others)
    for_tables.build(tables)

    @tf.function
    def gradients(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = model.compute_loss(x, y, model(x, training=True))
        rows, dense = tape.gradient(loss, [[table.value for table in tables], [each.value for each in others]])
        model.optimizer.apply(dense)
        return [tf.convert_to_tensor(each) for each in rows]

    apply_rows = tf.function(for_tables.apply)
    waiting: deque[Any] = deque()
    for x, y in batches:
        waiting.append(gradients(x, y))
        if len(waiting) > late:
            apply_rows(waiting.popleft())
    for rows in waiting:
        apply_rows(rows)
    return case.shown(model.evaluate(*validation, batch_size=1024, verbose=0, return_dict=True)[case.metric])


if __name__ == "__main__":
    main()
