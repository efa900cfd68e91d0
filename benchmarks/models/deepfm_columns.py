"""The deepfm of deepfm_lazy.py with a table for each column: 26 tables of 16 elements a row, and 26 of one."""

from models import deepfm
from models.deepfm_lazy import arrays, loss, optimizer  # noqa: F401 - found by their names


def model(keras, ops):
    from elasticcb.layers import Embedding

    ids = keras.Input((deepfm.COLUMNS,), dtype="int64", name="ids")
    numbers = keras.Input((deepfm.NUMBERS,), name="numbers")

    def looked_up(units, name):
        columns = (Embedding(units, name=f"{name}_{i}")(ids[:, i : i + 1]) for i in range(deepfm.COLUMNS))
        return keras.layers.Concatenate(axis=1)(list(columns))

    return deepfm.head(keras, ops, ids, numbers, looked_up(1, "weights"), looked_up(deepfm.UNITS, "embeddings"))
