"""The Criteo display-advertising format: records, features and their preprocessing inside the model.

Shared by deepfm.py and dcn.py. A record is a line with a label (was the ad clicked?), 13 counts I1 to I13 and
26 categories C1 to C26, any of which may be empty. The data set itself (`train.txt`) has tabs between and no
header: `--data_reader_params="format=tsv"`. Samples of it often are CSV with a header:
`--data_reader_params="format=csv;header=true"`.
"""

import keras
import tensorflow as tf

NUMERIC = [f"I{number}" for number in range(1, 14)]
CATEGORICAL = [f"C{number}" for number in range(1, 27)]
COLUMNS = [*NUMERIC, *CATEGORICAL]


def make_inputs():
    """Inputs by column name, one value per record: float32 counts, NaN if empty, and string categories."""
    inputs = {name: keras.Input((), name=name, dtype="float32") for name in NUMERIC}
    return inputs | {name: keras.Input((), name=name, dtype="string") for name in CATEGORICAL}


def numeric_features(inputs):
    """Two features per count, (batch, 26): log(1 + count), 0 if empty, and whether it is there at all."""
    counts = keras.ops.stack([inputs[name] for name in NUMERIC], axis=1)
    known = keras.ops.logical_not(keras.ops.isnan(counts))
    # Before the logarithm: the gradient of a NaN is NaN even where it is not selected. Counts may also be -1.
    counts = keras.ops.where(known, keras.ops.maximum(counts, 0.0), 0.0)
    return keras.ops.concatenate([keras.ops.log1p(counts), keras.ops.cast(known, "float32")], axis=1)


def categorical_indices(inputs, bins):
    """Row numbers for an embedding table that all columns share, (batch, 26), below `table_rows(bins)`.

    Each column is hashed into `bins` rows of its own; an empty value is a value like any other.
    """
    # Salted by the column: values of one column that collide do not in another.
    hashed = [keras.layers.Hashing(bins, salt=n)(inputs[name]) for n, name in enumerate(CATEGORICAL)]
    indices = keras.ops.stack([keras.ops.cast(index, "int64") for index in hashed], axis=1)
    return indices + keras.ops.arange(0, table_rows(bins), bins, dtype="int64")


def table_rows(bins):
    """Rows of a table that holds all categorical columns."""
    return bins * len(CATEGORICAL)


def feed_batch(lines, mode, metadata):
    """Lines to `({column: values}, labels)`; lines to predict for have no label, as in Criteo's `test.txt`."""
    labels = 0 if mode == "prediction" else 1
    defaults = [tf.constant(0.0)] * labels
    defaults += [tf.constant(float("nan"))] * len(NUMERIC) + [tf.constant("")] * len(CATEGORICAL)
    # Values hold neither tabs nor commas, so one line of code reads both variants.
    fields = tf.io.decode_csv(tf.strings.regex_replace(lines, "\t", ","), defaults, use_quote_delim=False)
    features = dict(zip(COLUMNS, fields[labels:], strict=True))
    return (features, fields[0][:, tf.newaxis]) if labels else features


def loss(labels, predictions):
    return keras.losses.binary_crossentropy(labels, predictions)


def eval_metrics_fn():
    return {"auc": keras.metrics.AUC(), "accuracy": keras.metrics.BinaryAccuracy()}
