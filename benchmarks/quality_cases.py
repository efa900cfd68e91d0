"""Models that plain Keras trains in seconds, and their data, as arrays."""

from __future__ import annotations

import pydoc_data.topics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from accuracy import compiled_model, model_file, records

Examples = tuple[Any, Any]  # x, y
LOSS_TOLERANCE = 0.02
WINDOW = 32  # bytes of text that the transformer sees at once
CLICK_COLUMNS, IDS_OF_COLUMN = 8, 5_000


@dataclass(frozen=True)
class Case:
    """A model, and which of its metrics over validation data is reported."""

    model: Callable[[], Any]  # compiled
    load: Callable[[Path], tuple[Examples, Examples]]  # to train on, to validate on
    batch_size: int
    epochs: int
    metric: str
    higher_is_better: bool = False
    in_points: bool = False  # hundredths
    digits: int = 2

    def shown(self, value: float) -> float:
        """In the unit of the table."""
        return 100 * value if self.in_points else value

    def is_reached(self, value: float, plain: float, workers: int) -> bool:
        """Whether the goal is, by values as shown: 0.3 points, with more than 4 workers 1 point, or 2 % of a loss."""
        points = 0.3 if workers <= 4 else 1.0
        allowed = points if self.in_points else LOSS_TOLERANCE * plain
        return (plain - value if self.higher_is_better else value - plain) <= allowed


def houses(directory: Path) -> tuple[Examples, Examples]:
    """Size, rooms and age of houses, and their price with a noise of variance 25, which no loss is below."""

    def made(rows: int, seed: int) -> Examples:
        random = np.random.default_rng(seed)
        size, rooms, age = random.uniform(30, 200, rows), random.integers(1, 8, rows), random.uniform(0, 30, rows)
        price = 2.5 * size + 10 * rooms - 1.5 * age + random.normal(0, 5, rows)
        return np.stack([size, rooms, age], 1).astype("float32"), price.astype("float32")[:, None]

    return made(20_000, 0), made(2_000, 1)


def regression() -> Any:
    import keras

    layers = keras.layers
    normalized = layers.Normalization(mean=[115.0, 4.0, 15.0], variance=[2400.0, 4.0, 75.0])
    hidden = [layers.Dense(32, activation="relu") for _ in range(2)]
    model = keras.Sequential([keras.Input((3,)), normalized, *hidden, layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.01), "mse")
    return model


def convnet() -> Any:
    """Convolutions with BatchNormalization, trained by SGD with momentum; the images of `mnist`."""
    import keras

    layers = keras.layers
    image = keras.Input((28, 28, 1), name="image")
    x = image
    for filters in (8, 16):
        x = layers.Conv2D(filters, 3, activation="relu")(x)
        x = layers.BatchNormalization()(x)
        x = layers.MaxPooling2D()(x)
    model = keras.Model({"image": image}, layers.Dense(10)(layers.Flatten()(x)))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), loss, metrics=["accuracy"])
    return model


def text(directory: Path) -> tuple[Examples, Examples]:
    """Pieces of Python's reference pages, as bytes, and the bytes that follow each; a tenth to validate on."""
    pages = "\n".join(page for _, page in sorted(pydoc_data.topics.topics.items())).encode()
    codes = np.frombuffer(pages, np.uint8).astype("int32")
    starts = range(0, len(codes) - WINDOW, 2 * WINDOW)
    x = np.stack([codes[start : start + WINDOW] for start in starts])
    y = np.stack([codes[start + 1 : start + WINDOW + 1] for start in starts])
    kept = np.arange(len(x)) % 10 == 0
    return (x[~kept], y[~kept]), (x[kept], y[kept])


def transformer(units: int = 48) -> Any:
    """Which byte comes next? A block of attention, with a small network behind it."""
    import keras

    layers, ops = keras.layers, keras.ops
    codes = keras.Input((WINDOW,), dtype="int32")
    places = ops.cumsum(ops.ones_like(codes), axis=1) - 1
    x = layers.Embedding(256, units)(codes) + layers.Embedding(WINDOW, units)(places)
    y = layers.LayerNormalization()(x)
    x = x + layers.MultiHeadAttention(4, units // 4)(y, y, use_causal_mask=True)
    y = layers.LayerNormalization()(x)
    x = x + layers.Dense(units)(layers.Dense(2 * units, activation="gelu")(y))
    model = keras.Model(codes, layers.Dense(256)(layers.LayerNormalization()(x)))
    model.compile(keras.optimizers.Adam(2e-3), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def clicks(directory: Path) -> tuple[Examples, Examples]:
    """Ids of 8 columns, zipf(1.3) in each, and clicks by what the ids and their pairs are worth."""
    random = np.random.default_rng(0)
    worth = random.normal(0, 0.4, (CLICK_COLUMNS, IDS_OF_COLUMN))
    factors = random.normal(0, 0.5, (CLICK_COLUMNS, IDS_OF_COLUMN, 4))

    def made(rows: int) -> Examples:
        ids = (random.zipf(1.3, (rows, CLICK_COLUMNS)) - 1) % IDS_OF_COLUMN
        columns = np.arange(CLICK_COLUMNS)
        found = factors[columns, ids]
        pairs = 0.5 * (found.sum(1) ** 2 - (found**2).sum(1)).sum(1)
        chance = 1 / (1 + np.exp(-(worth[columns, ids].sum(1) + pairs)))
        return ids + IDS_OF_COLUMN * columns, (random.random(rows) < chance).astype("float32")[:, None]

    return made(64_000), made(16_000)


def deepfm() -> Any:
    """Of the clicks; its larger table, of 2.6 MB, lives on the servers."""
    import keras

    layers, ops = keras.layers, keras.ops
    ids = keras.Input((CLICK_COLUMNS,), dtype="int64")
    linear = ops.sum(layers.Embedding(CLICK_COLUMNS * IDS_OF_COLUMN, 1)(ids), axis=1)
    found = layers.Embedding(CLICK_COLUMNS * IDS_OF_COLUMN, 16)(ids)
    pairs = 0.5 * ops.sum(ops.square(ops.sum(found, axis=1)) - ops.sum(ops.square(found), axis=1), 1, keepdims=True)
    deep = layers.Dense(1)(layers.Dense(64, activation="relu")(layers.Flatten()(found)))
    model = keras.Model(ids, linear + pairs + deep)
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adagrad(0.05), loss, metrics=[keras.metrics.AUC(from_logits=True, name="auc")])
    return model


def zoo_model(folder: str) -> Callable[[], Any]:
    return lambda: compiled_model(*model_file(folder))


def zoo_data(
    folder: str, training: str, validation: str, most: int, **reader: Any
) -> Callable[[Path], tuple[Examples, Examples]]:
    """The first `most` training records, and all validation records, as the folder's `feed` makes them."""

    def load(directory: Path) -> tuple[Examples, Examples]:
        job, module = model_file(folder)
        job["data_reader_params"] = reader or job.get("data_reader_params")
        found = (
            records(module, str(directory / training), "training", job).take(most),
            records(module, str(directory / validation), "evaluation", job),
        )
        first, second = (next(iter(part.batch(1 << 20))) for part in found)
        return first, second

    return load


def _criteo(directory: Path) -> tuple[Examples, Examples]:
    """All 200 records of the sample: three quarters to train on, the others to validate on."""
    import keras

    sample = "criteo/criteo_sample.txt"
    examples, _ = zoo_data("criteo", sample, sample, 200, format="csv", header=True)(directory)

    def part(rows: slice) -> Examples:
        return keras.tree.map_structure(lambda column: column[rows], examples)

    return part(slice(150)), part(slice(150, None))


_IMAGES = zoo_data("mnist", "mnist/t10k-images-idx3-ubyte.gz[:8000]", "mnist/t10k-images-idx3-ubyte.gz[8000:]", 8000)
_CENSUS = zoo_data("census", "census/adult.data", "census/adult.data", 12_800)
_MOVIELENS = zoo_data("movielens", "ml-100k/u.data", "ml-100k/u.data", 19_200)

CASES = {
    "regression": Case(regression, houses, 64, 12, "loss", digits=1),
    "convnet": Case(convnet, _IMAGES, 64, 3, "accuracy", higher_is_better=True, in_points=True, digits=1),
    "mnist": Case(zoo_model("mnist"), _IMAGES, 64, 3, "accuracy", higher_is_better=True, in_points=True),
    "census": Case(zoo_model("census"), _CENSUS, 64, 3, "accuracy", higher_is_better=True, in_points=True),
    "movielens": Case(zoo_model("movielens"), _MOVIELENS, 128, 5, "rmse", in_points=True),
    "criteo": Case(zoo_model("criteo"), _criteo, 16, 5, "loss", digits=3),
    "clicks": Case(deepfm, clicks, 128, 3, "auc", higher_is_better=True, in_points=True),
    "transformer": Case(transformer, text, 32, 3, "loss", digits=3),
}
