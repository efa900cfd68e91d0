"""Predictions as named columns with one row per record."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from elasticcb.errors import ModelFileError
from elasticcb.model.metric_messages import unflatten_outputs

RECORD = "record"  # the column with the record's position in the data, from 0
_ONLY = "prediction"  # the name of the only output


@dataclass(frozen=True)
class Column:
    """One output for some records.

    Attributes:
        values: an array with one row per record; for a ragged output, its flat values.
        splits: for a ragged output, its row splits from the outermost to the innermost; () for others.
    """

    name: str
    values: np.ndarray
    splits: tuple[np.ndarray, ...] = ()

    @property
    def rows(self) -> int:
        return len(self.splits[0]) - 1 if self.splits else len(self.values)

    @property
    def shape(self) -> tuple[int, ...] | None:
        """Shape of a row; None if rows can have different shapes."""
        return None if self.splits else self.values.shape[1:]

    @property
    def is_text(self) -> bool:
        return self.values.dtype.kind in "OSU"

    def plain(self) -> Column:
        """Converted to dtypes that every format supports: text for bytes, float32 for shorter floats."""
        values = self.values
        if self.is_text:
            flat = [v.decode("utf-8", "backslashreplace") if isinstance(v, bytes) else str(v) for v in values.flat]
            values = np.empty(values.shape, object)
            values.reshape(-1)[:] = flat
        elif values.dtype.kind == "V" or values.dtype == np.float16:  # V: bfloat16
            values = values.astype(np.float32)
        return Column(self.name, values, self.splits)

    def to_lists(self) -> list[Any]:
        """The rows as Python values or lists. Floats have the shortest representation that reads back equal."""
        values = self.values
        if values.dtype == np.float32:
            values = values.astype("U32").astype(np.float64)  # otherwise 0.1 becomes 0.10000000149011612
        rows: list[Any] = values.tolist()
        for splits in reversed(self.splits):
            bounds = splits.tolist()
            rows = [rows[start:end] for start, end in itertools.pairwise(bounds)]
        return rows


def columns_of(outputs: Mapping[str, np.ndarray], output_names: Sequence[str] = ()) -> list[Column]:
    """The columns of a step's outputs for one batch (`flatten_outputs`).

    Args:
        output_names: names of the model's outputs, used if their number matches a list of outputs.

    Raises `ModelFileError` for outputs without one row per record.
    """
    return [_column(name, leaf) for name, leaf in _named(unflatten_outputs(outputs), "", output_names)]


def _named(structure: Any, name: str, output_names: Sequence[str]) -> list[tuple[str, Any]]:
    if isinstance(structure, Mapping):
        parts = [(str(key), value) for key, value in structure.items()]
    elif isinstance(structure, (tuple, list)):
        names = output_names if not name and len(output_names) == len(structure) else range(len(structure))
        prefix = "" if names is output_names else "output_" if not name else ""
        parts = [(f"{prefix}{key}", value) for key, value in zip(names, structure, strict=True)]
    else:
        return [(name or _ONLY, structure)]
    return [found for key, value in parts for found in _named(value, f"{name}.{key}" if name else key, output_names)]


def _column(name: str, leaf: Any) -> Column:
    if name == RECORD:
        raise ModelFileError(
            f"The model has an output named {RECORD!r}, which is reserved for the record number. Rename the output."
        )
    if leaf is None or hasattr(leaf, "dense_shape"):
        what = "None" if leaf is None else "a sparse tensor"
        raise ModelFileError(
            f"The output {name!r} is {what}, which --output can't write. Remove it from the model's predictions, or "
            "make it dense with tf.sparse.to_dense."
        )
    if hasattr(leaf, "nested_row_splits"):
        return Column(name, leaf.flat_values.numpy(), tuple(splits.numpy() for splits in leaf.nested_row_splits))
    values = np.asarray(leaf)
    if not values.ndim:
        raise ModelFileError(
            f"The output {name!r} is one number for the whole batch, but --output writes a row per record. Return "
            "outputs with the batch on axis 0, or process it in a callback's on_predict_batch_end."
        )
    return Column(name, values)


def names_of_outputs(model: Any) -> Sequence[str]:
    """The names of the outputs of a Keras model, if it has any."""
    return tuple(getattr(model, "output_names", None) or ())
