"""Parquet files by row groups: records are dicts of columns (extra `parquet`)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from elasticcb.data.content import File
from elasticcb.data.extras import import_extra, library_errors
from elasticcb.data.file_index import FileIndex
from elasticcb.data.file_reader import FileReader, Opened
from elasticcb.data.reader import Metadata, specs_of_columns
from elasticcb.data.stacking import RaggedRows
from elasticcb.errors import DataError, UsageError
from elasticcb.storage.remote_files import is_url


class _OpenedParquet(Opened):
    """An open file and its last decoded row group: the tasks of a worker often share one."""

    def __init__(self, file: File, columns: Sequence[str], fill: Mapping[str, Any]) -> None:
        super().__init__(file)
        name = file.name
        self._arrow = import_extra("pyarrow", "parquet", "Parquet")
        self._compute = import_extra("pyarrow.compute", "parquet", "Parquet")
        parquet = import_extra("pyarrow.parquet", "parquet", "Parquet")
        self.name = name
        self.columns: dict[str, _Column] = {}
        self._fill = fill
        self._lock = threading.Lock()
        self._group = -1
        self._arrays: dict[str, Any] = {}
        if not file.identity.size:
            return
        with library_errors(name):
            self._file = parquet.ParquetFile(_open_remote(name) if is_url(name) else name)
            metadata = self._file.metadata
            rows = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
        self._bounds = np.cumsum([0, *rows])
        self.count = int(self._bounds[-1])
        schema = self._file.schema_arrow
        missing = sorted(set(columns) - set(schema.names))
        if missing:
            raise DataError(
                f"{name} has no column {', '.join(missing)}, which the reader parameter `columns` lists. Its columns "
                f"are {', '.join(schema.names)}."
            )
        self.columns = {
            column: _column_of(self._arrow, schema.field(column), name) for column in columns or schema.names
        }
        self._check_fill()

    def _check_fill(self) -> None:
        for name, value in self._fill.items():
            if name not in self.columns:
                raise UsageError(
                    f"The reader parameter fill_null has the unknown column {name!r}. The columns that are read are "
                    f"{', '.join(self.columns)}."
                )
            kind = self.columns[name].kind
            try:
                self._arrow.scalar(value, kind)
            except (TypeError, ValueError, OverflowError) as error:
                raise UsageError(
                    f"The reader parameter fill_null has {value!r} for the column {name!r}. Expected {kind}."
                ) from error

    @property
    def layout(self) -> str:
        return ", ".join(f"{name} {column.layout}" for name, column in self.columns.items())

    @property
    def memory_bytes(self) -> int:
        return sum((int(array.nbytes) for array in self._arrays.values()), super().memory_bytes)

    def read(self, start: int, end: int, size: int) -> Iterator[Any]:
        for rows in self._rows(start, end):
            count = len(next(iter(rows.values())))
            for first in range(0, count, size):
                yield {column: array[first : first + size] for column, array in rows.items()}

    def _rows(self, start: int, end: int) -> Iterator[dict[str, Any]]:
        """The records `[start, end)`, as one dict of arrays per row group."""
        while start < end:
            group = int(self._bounds.searchsorted(start, side="right")) - 1
            first = int(self._bounds[group])
            stop = min(end, int(self._bounds[group + 1]))
            arrays = self._decoded(group)
            yield {name: array[start - first : stop - first] for name, array in arrays.items()}
            start = stop

    def _decoded(self, group: int) -> dict[str, Any]:
        with self._lock:
            if group != self._group:
                first, last = self._bounds[group], self._bounds[group + 1]
                with library_errors(f"Row group {group} (records [{first}, {last})) of {self.name}"):
                    table = self._file.read_row_group(group, columns=list(self.columns), use_threads=False)
                self._arrays = {name: self._array(name, table.column(name), int(first)) for name in self.columns}
                self._group = group
            return self._arrays

    def _array(self, name: str, values: Any, first: int) -> Any:
        """The values of a column: an array, or `RaggedRows` for lists of varying length."""
        column = self.columns[name]
        values = values.combine_chunks()
        owners = np.arange(first, first + len(values))  # the record of each value
        splits = []
        for depth, kind in enumerate(column.lists):
            values = _stored(self._arrow, values)
            if depth < column.ragged:
                lengths = self._compute.list_value_length(values).fill_null(0).to_numpy(zero_copy_only=False)
                splits.append(np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]))
            else:
                self._refuse_nulls(name, values, owners)
                lengths = kind.list_size
            owners = np.repeat(owners, lengths)
            values = values.flatten()
        array = self._leaves(name, _stored(self._arrow, values), owners).reshape((-1, *column.shape))
        for each in reversed(splits):
            array = RaggedRows(each, array)
        return array

    def _leaves(self, name: str, values: Any, owners: Any) -> Any:
        arrow, column = self._arrow, self.columns[name]
        if arrow.types.is_dictionary(values.type):
            values = values.dictionary_decode()
        try:
            for kind in column.through:
                # Only digits below a microsecond may be dropped.
                values = values.cast(kind, safe=getattr(values.type, "unit", "") != "ns")
        except arrow.ArrowInvalid as error:
            raise DataError(
                f"The column {name!r} of {self.name} has values that do not fit into {column.dtype.name}: {error}. "
                "Exclude it with the reader parameter `columns`, or write it with another type."
            ) from error
        if name in self._fill:
            values = values.fill_null(arrow.scalar(self._fill[name], column.kind))
        if column.dtype.kind == "O":
            return values.cast(arrow.large_binary()).fill_null(b"").to_numpy(zero_copy_only=False)
        if column.dtype.kind != "f":
            self._refuse_nulls(name, values, owners)
        return values.to_numpy(zero_copy_only=False)

    def _refuse_nulls(self, name: str, values: Any, owners: Any) -> None:
        if values.null_count:
            place = int(np.flatnonzero(values.is_null().to_numpy(zero_copy_only=False))[0])
            advice = "Write a list of this size instead."
            if not self._arrow.types.is_fixed_size_list(values.type):
                advice = f"Choose a value with the reader parameter fill_null={{{name!r}: ...}}, or write floats: NaN."
            raise DataError(
                f"Record {owners[place]} of {self.name} is null in column {name!r}, and {values.type} can't represent "
                f"null. {advice}"
            )


@dataclass(frozen=True)
class _Column:
    """How a column becomes tensors.

    Attributes:
        dtype: of the values.
        kind: Arrow's type of them.
        lists: Arrow's types of the lists around the values, from the outermost.
        ragged: number of axes with varying length, or around one.
        through: Arrow types to which values are cast, one after another.
    """

    dtype: np.dtype[Any]
    kind: Any
    lists: tuple[Any, ...] = ()
    ragged: int = 0
    through: tuple[Any, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """Of a value of the innermost axis of varying length."""
        return tuple(kind.list_size for kind in self.lists[self.ragged :])

    @property
    def layout(self) -> str:
        return f"{self.dtype.name}{[*['...'] * self.ragged, *self.shape]}".replace("'", "")


def _column_of(arrow: Any, field: Any, name: str) -> _Column:
    """Raises `DataError` for a type that has no tensors."""
    types = arrow.types
    kind, lists, ragged = field.type, [], 0
    while True:
        if isinstance(kind, arrow.BaseExtensionType):
            kind = kind.storage_type
        elif types.is_fixed_size_list(kind) or types.is_list(kind) or types.is_large_list(kind):
            lists.append(kind)
            ragged = ragged if types.is_fixed_size_list(kind) else len(lists)
            kind = kind.value_type
        elif types.is_dictionary(kind):
            kind = kind.value_type
        else:
            break
    for is_kind, dtype, through in _conversions(arrow):
        if is_kind(kind):
            numpy_dtype = np.dtype(dtype or kind.to_pandas_dtype())
            return _Column(numpy_dtype, through[-1] if through else kind, tuple(lists), ragged, through)
    raise DataError(
        f"Column {field.name!r} of {name} has the type {field.type}, which is not a number, boolean, string, time, or "
        "list of these. Exclude it with the reader parameter `columns`, or write it with another type."
    )


def _conversions(arrow: Any) -> list[tuple[Callable[[Any], bool], Any, tuple[Any, ...]]]:
    """By kind of Arrow type: the dtype (None: the same), and the types to which values are cast."""
    types, int64 = arrow.types, arrow.int64()
    texts = ("string", "large_string", "string_view", "binary", "large_binary", "binary_view", "fixed_size_binary")
    return [
        (types.is_boolean, None, ()),
        (types.is_integer, None, ()),
        (types.is_floating, None, ()),
        (lambda kind: types.is_decimal(kind) and kind.scale == 0, np.int64, (int64,)),
        (types.is_decimal, np.float64, (arrow.float64(),)),
        (types.is_timestamp, np.int64, (arrow.timestamp("us"), int64)),
        (types.is_date, np.int64, (arrow.date32(), arrow.int32(), int64)),
        (types.is_time, np.int64, (arrow.time64("us"), int64)),
        (types.is_duration, np.int64, (arrow.duration("us"), int64)),
        *((getattr(types, f"is_{text}"), object, ()) for text in texts if hasattr(types, f"is_{text}")),
    ]


def _stored(arrow: Any, values: Any) -> Any:
    return values.storage if isinstance(values, arrow.ExtensionArray) else values


def _open_remote(name: str) -> Any:
    import fsspec

    return fsspec.open(name, "rb").open()


class ParquetReader(FileReader):
    """Rows of Parquet files as dicts of columns.

    Nulls become NaN in float columns, empty strings in text columns and empty lists; in other columns they raise an
    error, unless `fill_null` has a value.

    Args:
      columns: columns to read; default: all.
      fill_null: values in place of nulls, by column; in a column of lists, for the nulls in the lists.
    """

    def __init__(
        self,
        files: list[str],
        *,
        columns: Sequence[str] = (),
        fill_null: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(files)
        self._columns = [columns] if isinstance(columns, str) else list(columns)
        self._fill = dict(fill_null or {})

    @property
    def element_spec(self) -> Any:
        columns = self.first_opened().columns.items()
        return specs_of_columns(
            {name: (column.dtype, (*[None] * column.ragged, *column.shape)) for name, column in columns}
        )

    @property
    def metadata(self) -> Metadata:
        columns = self.first_opened().columns
        return Metadata(
            column_names=tuple(columns),
            column_dtypes={
                name: "string" if column.dtype.kind == "O" else column.dtype.name for name, column in columns.items()
            },
        )

    def _open(self, file: File, index: FileIndex | None, enough: int | None) -> _OpenedParquet:
        return _OpenedParquet(file, self._columns, self._fill)
