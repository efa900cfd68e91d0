"""DCN-v2 (Wang et al., 2021) on data like Criteo's: 26 id columns with a table each, 13 numbers, Adagrad.

The tables have 3 to 2,000,000 rows of 4, 8 or 16 elements, larger ones more; six columns have several ids an example,
whose rows are averaged. Three cross layers in parallel with an MLP of 256-128. Ids of a column follow zipf(1.2), whose
tail beyond the column's vocabulary is wrapped around.
"""

import numpy as np

ROWS = 65_536
NUMBERS = 13
# (vocabulary, ids an example); the vocabularies of Criteo's columns, of which the largest are cut.
COLUMNS = (
    *((1_460, 1), (583, 1), (2_000_000, 1), (1_000_000, 1), (305, 1), (24, 1), (12_517, 1), (633, 1), (3, 1)),
    *((93_145, 5), (5_683, 1), (1_000_000, 3), (3_194, 1), (27, 1), (14_992, 10), (300_000, 1), (10, 1)),
    *((5_652, 1), (2_173, 3), (4, 1), (300_000, 1), (18, 1), (15, 1), (286_181, 5), (105, 2), (142_572, 1)),
)
CROSS_LAYERS = 3


def units(vocabulary):
    """Elements of a row, by the rows of a table."""
    return 4 if vocabulary < 1_000 else 8 if vocabulary < 100_000 else 16


def parts():
    """Where the ids of each column lie in an example's."""
    ends = np.cumsum([count for _, count in COLUMNS]).tolist()
    return [slice(end - count, end) for end, (_, count) in zip(ends, COLUMNS, strict=True)]


WIDTH = sum(units(vocabulary) for vocabulary, _ in COLUMNS) + NUMBERS


def model(keras, ops):
    ids = keras.Input((parts()[-1].stop,), dtype="int64", name="ids")
    numbers = keras.Input((NUMBERS,), name="numbers")
    means = []
    for index, ((vocabulary, _), part) in enumerate(zip(COLUMNS, parts(), strict=True)):
        rows = keras.layers.Embedding(vocabulary, units(vocabulary), name=f"column_{index}")(ids[:, part])
        means.append(ops.mean(rows, axis=1))
    first = crossed = deep = keras.layers.Concatenate()([*means, numbers])
    for _ in range(CROSS_LAYERS):
        crossed = first * keras.layers.Dense(WIDTH)(crossed) + crossed
    for count in (256, 128):
        deep = keras.layers.Dense(count, activation="relu")(deep)
    return keras.Model(
        {"ids": ids, "numbers": numbers}, keras.layers.Dense(1)(keras.layers.Concatenate()([crossed, deep]))
    )


def optimizer(keras):
    return keras.optimizers.Adagrad(0.05)


def loss(keras):
    return keras.losses.BinaryCrossentropy(from_logits=True)


def arrays(random):
    columns = [(random.zipf(1.2, (ROWS, count)) - 1) % vocabulary for vocabulary, count in COLUMNS]
    return {
        "ids": np.concatenate(columns, axis=1).astype("int64"),
        "numbers": random.random((ROWS, NUMBERS), "float32"),
        "labels": random.integers(0, 2, (ROWS, 1)).astype("float32"),
    }
