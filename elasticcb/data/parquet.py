"""Parquet files by row groups: records are dicts of columns (extra `parquet`)."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from elasticcb.data.content import File, is_remote
from elasticcb.data.extras import import_extra, library_errors
from elasticcb.data.feeds import named_feed
from elasticcb.data.file_index import FileIndex
from elasticcb.data.file_reader import FileReader
from elasticcb.data.reader import Metadata, specs_of_columns
from elasticcb.errors import DataError

if TYPE_CHECKING:
    from elasticcb.data.reader import Feed


class _OpenedParquet:
    """An open file and its last decoded row group: the tasks of a worker often share one."""

    complete = True
    disk_bytes = 0

    def __init__(self, file: File, columns: Sequence[str]) -> None:
        name = file.name
        self._arrow = import_extra("pyarrow", "parquet", "Parquet")
        parquet = import_extra("pyarrow.parquet", "parquet", "Parquet")
        self.file = file
        self.name = name
        self.count = 0
        self.columns: dict[str, tuple[np.dtype[Any], tuple[int, ...]]] = {}  # dtype and shape in a record
        self._lock = threading.Lock()
        self._group = -1
        self._arrays: dict[str, Any] = {}
        if not file.identity.size:
            return
        with library_errors(name):
            self._file = parquet.ParquetFile(_open_remote(name) if is_remote(name) else name)
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
        self.columns = {column: self._type_of(schema.field(column)) for column in columns or schema.names}

    @property
    def layout(self) -> str:
        return ", ".join(f"{name} {dtype.name}{list(shape)}" for name, (dtype, shape) in self.columns.items())

    @property
    def memory_bytes(self) -> int:
        return sum((int(array.nbytes) for array in self._arrays.values()), 1 << 16)

    def index(self) -> FileIndex:
        return FileIndex(self.file.identity, self.count, self.layout)

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

    def _type_of(self, field: Any) -> tuple[np.dtype[Any], tuple[int, ...]]:
        types = self._arrow.types
        kind, shape = field.type, []
        while types.is_fixed_size_list(kind):
            shape.append(kind.list_size)
            kind = kind.value_type
        if types.is_dictionary(kind):
            kind = kind.value_type
        if _is_text(types, kind):
            return np.dtype(object), tuple(shape)
        if types.is_boolean(kind) or types.is_integer(kind) or types.is_floating(kind):
            return np.dtype(kind.to_pandas_dtype()), tuple(shape)
        raise DataError(
            f"Column {field.name!r} of {self.name} has the type {field.type}, which is not a number, boolean, string "
            "or fixed-size list of these. Exclude it with the reader parameter `columns`, or write it with another "
            "type."
        )

    def _array(self, name: str, column: Any, first: int) -> Any:
        dtype, shape = self.columns[name]
        values = column.combine_chunks()
        if self._arrow.types.is_dictionary(values.type):
            values = values.dictionary_decode()
        for _ in shape:
            self._refuse_nulls(name, values, first)
            values = values.flatten()
        if dtype.kind == "O":
            array = values.cast(self._arrow.large_binary()).fill_null(b"").to_numpy(zero_copy_only=False)
        else:
            if dtype.kind != "f":
                self._refuse_nulls(name, values, first, int(np.prod(shape)) or 1)
            array = values.to_numpy(zero_copy_only=False)
        return array.reshape((-1, *shape)) if shape else array

    def _refuse_nulls(self, name: str, values: Any, first: int, per_record: int = 1) -> None:
        if values.null_count:
            place = int(np.flatnonzero(values.is_null().to_numpy(zero_copy_only=False))[0])
            raise DataError(
                f"Record {first + place // per_record} of {self.name} is null in column {name!r}, and {values.type} "
                "can't represent null (floats become NaN, strings become empty). Fill in a value, or write the "
                "column as floats."
            )


def _is_text(types: Any, kind: Any) -> bool:
    return any(test(kind) for test in (types.is_string, types.is_large_string, types.is_binary, types.is_large_binary))


def _open_remote(name: str) -> Any:
    import fsspec

    return fsspec.open(name, "rb").open()


class ParquetReader(FileReader):
    """Rows of Parquet files as dicts of columns.

    Nulls become NaN in float columns and empty strings in text columns; in other columns they raise an error.

    Args:
      columns: columns to read; default: all.
      label: the column with labels, for the default feed (`named_feed`).
    """

    def __init__(self, files: list[str], *, columns: Sequence[str] = (), label: str = "") -> None:
        super().__init__(files)
        self._columns = [columns] if isinstance(columns, str) else list(columns)
        self._label = label

    @property
    def element_spec(self) -> Any:
        return specs_of_columns(self.first_opened().columns)

    @property
    def metadata(self) -> Metadata:
        columns = self.first_opened().columns
        return Metadata(
            column_names=tuple(columns),
            column_dtypes={name: "string" if dtype.kind == "O" else dtype.name for name, (dtype, _) in columns.items()},
        )

    def default_feed(self) -> Feed | None:
        return named_feed(self.metadata.column_names, self._label)

    def _open(self, file: File, index: FileIndex | None, enough: int | None) -> _OpenedParquet:
        return _OpenedParquet(file, self._columns)
