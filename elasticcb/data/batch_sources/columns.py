"""Data without a feed: the columns of a batch of records as features and labels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from elasticcb.data.record_formats import DATE, DATES, STRING, ExampleFormat, LineFormat, missing_value
from elasticcb.errors import DataError, UsageError
from elasticcb.settings import Mode

if TYPE_CHECKING:
    from elasticcb.data.reader import FeedBatch, Reader

# Names that identify features and labels.
_KNOWN_PAIRS = (("x", "y"), ("features", "labels"))
_WEIGHT = "sample_weight"

_DECODED = ("float32", "float64", "int32", "int64")  # by decode_csv; others are read as int64 or float64


@dataclass(frozen=True)
class Columns:
    """The columns of a reader's records.

    Attributes:
      parse: from the records of a batch to `{name: tensor (batch, ...)}`.
      explain: called with a source name, start and end, after an error; may raise a better one.
    """

    names: tuple[str, ...]
    parse: Callable[[Any], Mapping[str, Any]]
    explain: Callable[[str, int, int], None] = lambda *_: None


def columns_of(reader: Reader) -> Columns | None:
    """The columns of dict records, lines or `tf.train.Example`s; None if they are unknown."""
    spec = reader.element_spec
    if isinstance(spec, dict):
        return Columns(tuple(spec), lambda records: records)
    found = reader.record_format()
    if isinstance(found, LineFormat):
        return Columns(tuple(found.types), lambda lines: _of_lines(found, lines), found.explain)
    return _columns_of_examples(found) if found is not None else None


def named_feed(columns: Columns, label: str) -> FeedBatch:
    """A `feed_batch` to `(features, labels[, sample_weight])`, or only to `features` in prediction.

    The label is the column named by `label`; by default, `y` if there is `x`, or `labels` if there is `features`.
    Features are a dict of the other columns, or the column itself if the only other one is `x` or `features`. It raises
    `DataError` if it needs a label and can't determine it.
    """
    names = columns.names
    known_label = label or next((y for x, y in _KNOWN_PAIRS if x in names and y in names), "")
    features = [name for name in names if name not in (known_label, _WEIGHT)]
    bare = features[0] if features in (["x"], ["features"]) else None

    def feed_batch(records: Any, mode: str, metadata: Any) -> Any:
        if mode != Mode.PREDICTION and (known_label not in names or not features):
            given = f"There is no label {label!r}" if label else "No label is given"
            raise DataError(
                f"{given}. The columns of the data are {', '.join(names)}. Set --label, or `label` in a program, to "
                "the column of the labels, or define a feed."
            )
        found = columns.parse(records)
        x = found[bare] if bare else {name: found[name] for name in features}
        if mode == Mode.PREDICTION:
            return x
        return (x, found[known_label], found[_WEIGHT]) if _WEIGHT in names else (x, found[known_label])

    return feed_batch


def _of_lines(given: LineFormat, lines: Any) -> dict[str, Any]:
    defaults = [_default(given, name) for name in given.types]
    fields = tf.io.decode_csv(lines, defaults, field_delim=given.delimiter, use_quote_delim=given.quotes)
    found = {}
    for (name, dtype), values in zip(given.types.items(), fields, strict=True):
        if dtype in DATES:
            values = _since_1970(values, dtype, given.fill.get(name))
        elif dtype != STRING and dtype not in _DECODED:
            values = tf.cast(values, dtype)
        found[name] = values
    return found


def _default(given: LineFormat, name: str) -> Any:
    """The default of `decode_csv`, which has the column's dtype: an empty one means that a value is required."""
    dtype = given.types[name]
    if dtype == STRING or dtype in DATES:
        return tf.constant([given.fill.get(name, "") if dtype == STRING else ""])
    if dtype not in _DECODED:
        dtype = "float64" if np.dtype(dtype).kind == "f" else "int64"
    value = given.fill.get(name, missing_value(dtype))
    try:
        return tf.constant([] if value is None else [value], dtype)
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"The reader parameter fill_null has {value!r} for the column {name!r}. Expected {dtype}."
        ) from error


def _since_1970(values: Any, dtype: str, fill: Any) -> Any:
    unit = "D" if dtype == DATE else "us"

    def convert(texts: Any) -> Any:
        texts = np.array([text.decode().strip().removesuffix("Z") for text in texts])
        missing = texts == ""
        if fill is None and missing.any():
            raise ValueError("a field is empty")
        numbers = np.where(missing, "1970-01-01", texts).astype(f"datetime64[{unit}]").astype(np.int64)
        return np.where(missing, np.int64(fill or 0), numbers)

    return tf.ensure_shape(tf.numpy_function(convert, [values], tf.int64, stateful=False), [None])


def _columns_of_examples(given: ExampleFormat) -> Columns | None:
    """By the features of the first records. None if these are not `tf.train.Example`s."""
    from google.protobuf.message import DecodeError

    lengths: dict[str, set[int]] = {}
    kinds: dict[str, str] = {}
    try:
        for record in given.sample:
            for name, value in tf.train.Example.FromString(record).features.feature.items():
                kind = value.WhichOneof("kind")
                if kind is None:
                    continue
                lengths.setdefault(name, set()).add(len(getattr(value, kind).value))
                kinds[name] = kind
    except DecodeError:
        return None
    names = list(given.columns) or sorted(kinds)
    unknown = [name for name in [*names, *given.fill, *given.ragged] if name not in kinds]
    if unknown or not names:
        if not kinds:
            return None
        raise DataError(
            f"The first {len(given.sample)} records have no feature {', '.join(unknown)}, which a reader parameter "
            f"names. Their features are {', '.join(sorted(kinds))}."
        )
    features = {name: _feature(given, name, kinds[name], lengths[name]) for name in names}
    return Columns(tuple(names), lambda records: tf.io.parse_example(records, features))


def _feature(given: ExampleFormat, name: str, kind: str, lengths: Sequence[int] | set[int]) -> Any:
    dtype = {"bytes_list": STRING, "float_list": "float32", "int64_list": "int64"}[kind]
    sizes = set(lengths) - {0}
    if len(sizes) != 1 or name in given.ragged:
        return tf.io.RaggedFeature(tf.as_dtype(dtype), row_splits_dtype=tf.int64)
    (size,) = sizes
    value = given.fill.get(name, missing_value(dtype))
    shape = [] if size == 1 else [size]
    default = value if value is None or not shape else [value] * size
    return tf.io.FixedLenFeature(shape, tf.as_dtype(dtype), default)
