"""Writes predictions as a file: CSV, JSON lines, Parquet or NumPy; as named columns with one row per record.

Each writer takes the batches in the order of the data, as (position of the first record, columns), and holds only one
at a time; Parquet's holds a row group. NumPy's iterates over them once per column.
"""

from __future__ import annotations

import csv
import itertools
import json
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from elasticcb.data.extras import import_extra
from elasticcb.errors import ModelFileError
from elasticcb.model.metric_messages import unflatten_outputs

RECORD = "record"  # the column with the record's position in the data, from 0
_ONLY = "prediction"  # the only output, if its layer has no name by the user


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

    def without_unit_axis(self) -> Column:
        """A column of rows of one number, as a column of numbers."""
        return Column(self.name, self.values[:, 0])

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
        output_names: names of the model's outputs, used if their number matches: of a list, or of the only output.

    Raises `ModelFileError` for outputs without one row per record.
    """
    found = _named(unflatten_outputs(outputs), "", output_names)
    if len(output_names) == 1 and [name for name, _ in found] == [_ONLY]:
        found = [(output_names[0] or _ONLY, found[0][1])]
    return [_column(name, leaf) for name, leaf in found]


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


Shapes = Mapping[str, set[tuple[int, ...] | None]]  # shapes of rows, by column
Batches = Iterable[tuple[int, list[Column]]]  # number of the first record; may be read several times

# Limits of a row group in Parquet; the first one that is reached applies.
_ROWS_PER_GROUP = 128 * 1024
_BYTES_PER_GROUP = 64 << 20


def check(column: Column, format: str) -> None:
    """Raises `ModelFileError` if `format` can't store such a column."""
    kind = "text" if column.is_text else "complex numbers" if column.values.dtype.kind == "c" else ""
    if kind and (format == "npz") == (kind == "text"):
        others = "--output_format=jsonl" if kind == "text" else "--output_format=npz"
        raise ModelFileError(
            f"The output {column.name!r} contains {kind}, which {format} files can't store. Use {others}."
        )
    if format == "npz" and column.splits:
        raise _of_many_shapes(column.name)


def check_shapes(name: str, shapes: set[tuple[int, ...] | None], format: str) -> None:
    """Raises `ModelFileError` if `format` can't store rows of all these shapes in one column."""
    if format == "npz" and len(shapes) > 1:
        raise _of_many_shapes(name)


def _of_many_shapes(name: str) -> ModelFileError:
    return ModelFileError(
        f"The rows of the output {name!r} have different shapes, which a NumPy array can't store. Use "
        "--output_format=jsonl or --output_format=parquet."
    )


def _write_csv(path: Path, batches: Batches, shapes: Shapes) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([RECORD, *(name for column, found in shapes.items() for name in _csv_names(column, found))])
        for start, columns in batches:
            cells = [cell for column in columns for cell in _csv_cells(column.plain(), shapes[column.name])]
            writer.writerows(zip(range(start, start + columns[0].rows), *cells, strict=True))


def _csv_names(name: str, shapes: set[tuple[int, ...] | None]) -> list[str]:
    (shape,) = shapes if len(shapes) == 1 else (None,)
    if shape is None or len(shape) != 1:
        return [name]
    return [f"{name}_{index}" for index in range(shape[0])]


def _csv_cells(column: Column, shapes: set[tuple[int, ...] | None]) -> list[list[Any]]:
    """A list of cells for each name."""
    rows = column.to_lists()
    if shapes == {()}:
        return [rows]
    if len(_csv_names(column.name, shapes)) > 1:
        return [list(cells) for cells in zip(*rows, strict=True)]
    return [[json.dumps(row) for row in rows]]


def _write_jsonl(path: Path, batches: Batches, shapes: Shapes) -> None:
    with path.open("w", encoding="utf-8") as file:
        for start, columns in batches:
            names = [RECORD, *(column.name for column in columns)]
            lists = [column.plain().to_lists() for column in columns]
            for row in zip(range(start, start + columns[0].rows), *lists, strict=True):
                file.write(json.dumps(dict(zip(names, row, strict=True)), ensure_ascii=False) + "\n")


def _write_parquet(path: Path, batches: Batches, shapes: Shapes) -> None:
    _, parquet = _pyarrow()
    writer = None
    try:
        for table in _row_groups(_tables(batches)):
            if writer is None:
                writer = parquet.ParquetWriter(path, table.schema)
            writer.write_table(table)
    finally:
        if writer is not None:
            writer.close()


def _tables(batches: Batches) -> Iterator[Any]:
    """A `pyarrow.Table` of each batch."""
    pa, _ = _pyarrow()
    for start, columns in batches:
        plain = [column.plain() for column in columns]
        arrays = {RECORD: pa.array(np.arange(start, start + plain[0].rows))}
        yield pa.table(arrays | {column.name: _arrow(column) for column in plain})


def _row_groups(tables: Iterable[Any]) -> Iterator[Any]:
    """Joins tables, because one row group per batch would make files large and slow to read."""
    pa, _ = _pyarrow()
    gathered: list[Any] = []
    rows = size = 0
    for table in tables:
        gathered.append(table)
        rows, size = rows + table.num_rows, size + table.nbytes
        if rows >= _ROWS_PER_GROUP or size >= _BYTES_PER_GROUP:
            yield pa.concat_tables(gathered)
            gathered, rows, size = [], 0, 0
    if gathered:
        yield pa.concat_tables(gathered)


def _pyarrow() -> tuple[Any, Any]:
    return import_extra("pyarrow", "parquet", "Parquet"), import_extra("pyarrow.parquet", "parquet", "Parquet")


def _arrow(column: Column) -> Any:
    pa, _ = _pyarrow()
    shape = column.values.shape
    text = pa.string() if column.is_text else None
    array = pa.array(column.values.reshape(-1), type=text)
    for depth in range(len(shape) - 1, 0, -1):
        count = int(np.prod(shape[:depth], dtype=np.int64))
        array = pa.LargeListArray.from_arrays(np.arange(count + 1) * shape[depth], array)
    for splits in reversed(column.splits):
        array = pa.LargeListArray.from_arrays(splits.astype(np.int64), array)
    return array


def _write_npz(path: Path, batches: Batches, shapes: Shapes) -> None:
    dtypes: dict[str, np.dtype[Any]] = {}
    rows = 0
    for _, columns in batches:
        for column in columns:
            dtypes[column.name] = column.plain().values.dtype
        rows += columns[0].rows

    def values_of(name: str) -> Iterator[np.ndarray]:
        for start, columns in batches:
            if name == RECORD:
                yield np.arange(start, start + columns[0].rows)
            else:
                yield next(column.plain().values for column in columns if column.name == name)

    with zipfile.ZipFile(path, "w", allowZip64=True) as archive:
        for name in (RECORD, *shapes):
            dtype = np.dtype(np.int64) if name == RECORD else dtypes[name]
            (shape,) = {()} if name == RECORD else shapes[name]
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                header = {
                    "descr": np.lib.format.dtype_to_descr(dtype),
                    "fortran_order": False,
                    "shape": (rows, *(shape or ())),
                }
                np.lib.format.write_array_header_1_0(member, header)
                for values in values_of(name):
                    member.write(np.ascontiguousarray(values, dtype).tobytes())


WRITERS: dict[str, Callable[[Path, Batches, Shapes], None]] = {
    "csv": _write_csv,
    "jsonl": _write_jsonl,
    "parquet": _write_parquet,
    "npz": _write_npz,
}
