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
    return _columns_of_examples(found, reader.may_lack) if found is not None else None


def named_feed(columns: Columns, label: str, inputs: Sequence[str] | None) -> FeedBatch:
    """A `feed_batch` to `(features, labels[, sample_weight])`, or only to `features` in prediction.

    The label is the column named by `label`; by default, `y` if there is `x`, or `labels` if there is `features`.
    Features are a dict of the other columns, or of those in `inputs`; or the column itself if the only other one is `x`
    or `features`. It raises `DataError` if it needs a label and can't determine it, or a column of `inputs` is
    missing.
    """
    names = columns.names
    known_label = label or next((y for x, y in _KNOWN_PAIRS if x in names and y in names), "")
    features = [name for name in names if name not in (known_label, _WEIGHT)]
    bare = features[0] if features in (["x"], ["features"]) else None
    taken = features if inputs is None or len(features) == len(inputs) == 1 else inputs
    missing = [name for name in taken if name not in features] if not bare else []

    def feed_batch(records: Any, mode: str, metadata: Any) -> Any:
        if mode != Mode.PREDICTION and (known_label not in names or not features):
            given = f"There is no label {label!r}" if label else "No label is given"
            raise DataError(
                f"{given}. The columns of the data are {', '.join(names)}. Set --label, or `label` in a program, to "
                "the column of the labels, or define a feed."
            )
        if missing:
            raise DataError(
                f"The model has inputs that are not columns of the data: {', '.join(missing)}. The columns are "
                f"{', '.join(features)}. Give inputs the names of columns, or define a feed."
            )
        found = columns.parse(records)
        x = found[bare] if bare else {name: found[name] for name in taken}
        if mode == Mode.PREDICTION:
            return x
        y = _present(found[known_label], known_label)
        return (x, y, found[_WEIGHT]) if _WEIGHT in names else (x, y)

    return feed_batch


def _present(labels: Any, name: str) -> Any:
    """The labels, none of which may be NaN, as missing numbers are."""
    if not isinstance(labels, tf.Tensor) or not labels.dtype.is_floating:
        return labels
    text = f"The label {name!r} is missing or NaN in a record. Remove such records, or set a value by `fill_null`."
    with tf.control_dependencies([tf.debugging.Assert(~tf.reduce_any(tf.math.is_nan(labels)), [text])]):
        return tf.identity(labels)


def _of_lines(given: LineFormat, lines: Any) -> dict[str, Any]:
    defaults = [_default(given, name) for name in given.types]
    fields = tf.io.decode_csv(lines, defaults, field_delim=given.delimiter, use_quote_delim=given.quotes)
    found = {}
    for (name, dtype), values in zip(given.types.items(), fields, strict=True):
        if dtype in DATES:
            values = _since_1970(values, dtype, given.fill.get(name))
        elif dtype != STRING and dtype not in _DECODED:
            values = _narrowed(values, dtype, name)
        found[name] = values
    return found


def _narrowed(values: Any, dtype: str, name: str) -> Any:
    """The numbers in another dtype, which must hold them."""
    if np.dtype(dtype).kind == "f":
        narrow = tf.cast(values, dtype)
        fits = tf.equal(tf.math.is_inf(tf.cast(narrow, tf.float64)), tf.math.is_inf(values))
    else:
        limits = np.iinfo(dtype)
        most = min(limits.max, np.iinfo(np.int64).max)
        narrow, fits = tf.cast(values, dtype), (values >= int(limits.min)) & (values <= int(most))
    with tf.control_dependencies([tf.debugging.Assert(tf.reduce_all(fits), [f"The column {name!r} exceeds {dtype}."])]):
        return tf.identity(narrow)


def _default(given: LineFormat, name: str) -> Any:
    """The default of `decode_csv`, which has the column's dtype: an empty one means that a value is required."""
    dtype = given.types[name]
    if dtype in DATES:
        fill = given.fill.get(name)
        if fill is not None and not isinstance(fill, int):
            raise UsageError(
                f"The reader parameter fill_null has {fill!r} for the column {name!r}. Expected an integer: days since "
                "1970 of a date, microseconds of a timestamp."
            )
        return tf.constant([""])
    if dtype != STRING and dtype not in _DECODED:
        dtype = "float64" if np.dtype(dtype).kind == "f" else "int64"
    value = given.fill.get(name, missing_value(dtype))
    try:
        return tf.constant([] if value is None else [value], dtype)
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"The reader parameter fill_null has {value!r} for the column {name!r}. Expected {dtype}."
        ) from error


def _since_1970(values: Any, dtype: str, fill: Any) -> Any:
    unit, pattern = "D" if dtype == DATE else "us", DATES[dtype]

    def convert(texts: Any) -> Any:
        given = [text.decode().strip() for text in texts]
        for text in given:  # NumPy takes more
            if text and not pattern.fullmatch(text):
                raise ValueError(f"{text!r} is not a {dtype}")
        texts = np.array([text.removesuffix("Z") for text in given])
        missing = texts == ""
        if fill is None and missing.any():
            raise ValueError("a field is empty")
        numbers = np.where(missing, "1970-01-01", texts).astype(f"datetime64[{unit}]").astype(np.int64)
        return np.where(missing, np.int64(fill or 0), numbers)

    return tf.ensure_shape(tf.numpy_function(convert, [values], tf.int64, stateful=False), [None])


def _columns_of_examples(given: ExampleFormat, may_lack: str) -> Columns | None:
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
    names = [name for name in given.columns if name in kinds or name != may_lack] or sorted(kinds)
    unknown = [name for name in [*names, *given.fill, *given.ragged] if name not in (*kinds, may_lack)]
    if unknown or not names:
        if not kinds:
            return None
        raise DataError(
            f"The first {len(given.sample)} records have no feature {', '.join(unknown)}, which a reader parameter "
            f"names. Their features are {', '.join(sorted(kinds))}."
        )
    features: dict[str, Any] = {}
    filled: dict[str, tuple[int, Any]] = {}  # lists that are empty where the value is missing: their size, the value
    for name in names:
        dtype = {"bytes_list": STRING, "float_list": "float32", "int64_list": "int64"}[kinds[name]]
        sizes, value = lengths[name] - {0}, given.fill.get(name, missing_value(dtype))
        if len(sizes) != 1 or name in given.ragged or 0 in lengths[name]:
            features[name] = tf.io.RaggedFeature(tf.as_dtype(dtype), row_splits_dtype=tf.int64)
            if len(sizes) == 1 and name not in given.ragged and value is not None:
                filled[name] = next(iter(sizes)), value
            continue
        (size,) = sizes
        shape = [] if size == 1 else [size]
        default = value if value is None or not shape else [value] * size
        features[name] = tf.io.FixedLenFeature(shape, tf.as_dtype(dtype), default)

    def parse(records: Any) -> dict[str, Any]:
        found: dict[str, Any] = tf.io.parse_example(records, features)
        return found | {name: _filled(found[name], name, *how) for name, how in filled.items()}

    return Columns(tuple(names), parse)


def _filled(lists: Any, name: str, size: int, value: Any) -> Any:
    """The lists, each empty or of this size, as a tensor with the value in place of empty ones."""
    lengths = lists.row_lengths()
    text = f"The feature {name!r} has lists that are neither empty nor of {size} values. Name it in `ragged`."
    fits = tf.reduce_all((lengths == 0) | (lengths == size))
    with tf.control_dependencies([tf.debugging.Assert(fits, [text])]):
        whole = lists.to_tensor(value, shape=[None, size])
        return whole[:, 0] if size == 1 else whole
