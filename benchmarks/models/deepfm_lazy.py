"""The deepfm of deepfm.py on `elasticcb.layers.Embedding`: any number of ids, rows made on first use."""

from models import deepfm
from models.deepfm import loss, optimizer  # noqa: F401 - found by their names


def model(keras, ops):
    from elasticcb.layers import Embedding

    ids = keras.Input((deepfm.COLUMNS,), dtype="int64", name="ids")
    numbers = keras.Input((deepfm.NUMBERS,), name="numbers")
    weights = Embedding(1, name="weights")(ids)
    embeddings = Embedding(deepfm.UNITS, name="embeddings")(ids)
    return deepfm.head(keras, ops, ids, numbers, weights, embeddings)


def arrays(random, vocabulary):
    return deepfm.arrays(random, int(vocabulary))
