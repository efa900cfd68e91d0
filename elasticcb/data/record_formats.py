"""How records that are strings hold columns: fields of a line, or features of a `tf.train.Example`."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from elasticcb.errors import DataError

SAMPLE_RECORDS = 1000  # from which the types of columns are inferred

# Types of columns of text besides NumPy's numbers: days, or microseconds, since 1970 (int64).
DATE, TIMESTAMP, STRING = "date", "timestamp", "string"
DATES = {
    DATE: re.compile(r"\d{4}-\d\d-\d\d"),
    TIMESTAMP: re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d(\.\d{1,9})?)?Z?"),
}
EXAMPLES_ADVICE = " The first records are not serialized `tf.train.Example`s."
_EXACT_FLOATS = 1 << 24  # float32 represents all integers up to this one
# As `tf.io.decode_csv` reads them; Python also takes underscores and other digits.
_INTEGER = re.compile(r"[+-]?\d+", re.ASCII)
_FLOAT = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?|[+-]?(nan|inf|infinity)", re.ASCII | re.IGNORECASE)


@dataclass(frozen=True)
class LineFormat:
    """Records are lines of delimited fields.

    Attributes:
      types: by column, in the order of the fields: NumPy's name of a number dtype, or one of `DATE`, `TIMESTAMP`,
        `STRING`.
      fill: values of empty fields, by column.
      explain: called with a source name, start and end; raises `DataError` for the first value there that does not
        have its column's type.
    """

    types: Mapping[str, str]
    delimiter: str
    quotes: bool
    fill: Mapping[str, Any]
    explain: Callable[[str, int, int], None]


@dataclass(frozen=True)
class ExampleFormat:
    """Records are serialized `tf.train.Example`s.

    Attributes:
      sample: the first records.
      columns: features to read; empty: those of the sample.
      fill: values of missing features, by column.
      ragged: features that are lists of varying length, in addition to those of the sample.
    """

    sample: Sequence[bytes]
    columns: Sequence[str] = ()
    fill: Mapping[str, Any] = field(default_factory=dict)
    ragged: Sequence[str] = ()


RecordFormat = LineFormat | ExampleFormat


def is_integer(text: str) -> bool:
    """Whether a field is an integer for `tf.io.decode_csv`."""
    return _INTEGER.fullmatch(text) is not None


def is_float(text: str) -> bool:
    """Whether a field is a number for `tf.io.decode_csv`."""
    return _FLOAT.fullmatch(text) is not None


def missing_value(dtype: str) -> Any:
    """The value of an empty field, a null or a missing feature, if the user gives none: NaN or "". None: there is no
    such value, and a missing one is an error."""
    if dtype == STRING:
        return ""
    return float("nan") if dtype not in DATES and np.dtype(dtype).kind == "f" else None


def inferred_type(values: Sequence[str], has_fill: bool) -> str:
    """The type of a column with these values. Integers with missing values become floats if these are exact, and other
    large numbers float64.

    Raises `DataError`, which says what the column has, if integers are not exact.
    """
    present = [value.strip() for value in values if value]
    if present and all(map(is_integer, present)):
        numbers = [int(value) for value in present]
        if min(numbers) < -(1 << 63) or max(numbers) >= 1 << 63:
            raise DataError("integers that int64 does not hold")
        if len(present) == len(values) or has_fill:
            return "int64"
        if max(map(abs, numbers)) <= _EXACT_FLOATS:
            return "float32"
        raise DataError("large integers and empty fields")
    if all(map(is_float, present)):
        finite = [abs(number) for number in map(float, present) if math.isfinite(number)]
        return "float32" if max(finite, default=0) <= _EXACT_FLOATS else "float64"
    for name, pattern in DATES.items():
        if all(pattern.fullmatch(value) for value in present):
            return name
    return STRING
