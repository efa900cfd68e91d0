"""The deepfm of deepfm.py on `elasticcb.layers.Embedding`: any number of ids, rows made on first use."""

import numpy as np
from models import deepfm
from models.deepfm import loss, optimizer  # noqa: F401 - found by their names

SMALLEST = 100_000  # vocabulary whose zipf(1.2) gives the different ids of a batch, where their number is constant
BLOCK = 1_024  # examples with the same shift of their ids


def model(keras, ops):
    from elasticcb.layers import Embedding

    ids = keras.Input((deepfm.COLUMNS,), dtype="int64", name="ids")
    numbers = keras.Input((deepfm.NUMBERS,), name="numbers")
    weights = Embedding(1, name="weights")(ids)
    embeddings = Embedding(deepfm.UNITS, name="embeddings")(ids)
    return deepfm.head(keras, ops, ids, numbers, weights, embeddings)


def arrays(random, which):
    """`which`: a vocabulary, for ids as in deepfm.py; or one of vocabulary.py's ways, as "uniform-1000000"."""
    kind, _, vocabulary = which.rpartition("-")
    if kind in ("", "zipf"):
        given = deepfm.arrays(random, int(vocabulary))
    else:
        given = deepfm.arrays(random, SMALLEST)
        size = int(vocabulary) // deepfm.COLUMNS
        first = np.arange(deepfm.COLUMNS)
        if kind == "uniform":
            ids = random.integers(0, size, given["ids"].shape)
        else:
            shifts = random.integers(0, size, (deepfm.ROWS // BLOCK, deepfm.COLUMNS)).repeat(BLOCK, axis=0)
            ids = (given["ids"] - SMALLEST // deepfm.COLUMNS * first + shifts) % size
        given["ids"] = ids + size * first
    return given
