"""How records that are strings hold columns: fields of a line, or features of a `tf.train.Example`."""

from __future__ import annotations

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


def missing_value(dtype: str) -> Any:
    """The value of an empty field, a null or a missing feature, if the user gives none: NaN or "". None: there is no
    such value, and a missing one is an error."""
    if dtype == STRING:
        return ""
    return float("nan") if dtype not in DATES and np.dtype(dtype).kind == "f" else None


def inferred_type(values: Sequence[str], has_fill: bool) -> str:
    """The type of a column with these values. Integers with missing values become floats if these are exact.

    Raises `DataError` if they are not.
    """
    present = [value for value in map(str.strip, values) if value]
    try:
        numbers = [int(value) for value in present]
        if numbers and min(numbers) >= -(1 << 63) and max(numbers) < 1 << 63:
            if len(present) == len(values) or has_fill:
                return "int64"
            if max(map(abs, numbers)) <= _EXACT_FLOATS:
                return "float32"
            raise DataError("large integers and empty fields")
    except ValueError:
        pass
    try:
        for value in present:
            float(value)
        return "float32"
    except ValueError:
        pass
    for name, pattern in DATES.items():
        if all(pattern.fullmatch(value) for value in present):
            return name
    return STRING
