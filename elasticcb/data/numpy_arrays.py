"""NumPy files: the records of an array are its rows; the records of an .npz are dicts of rows."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from elasticcb.data.content import Content, File, MemoryContent, SpooledContent, raw_file
from elasticcb.data.file_index import FileIndex
from elasticcb.data.file_reader import FileReader, Opened
from elasticcb.data.reader import Metadata, specs_of_columns
from elasticcb.data.stacking import CHUNK_BYTES
from elasticcb.errors import DataError
from elasticcb.process.wording import how_many

_HEADER_READERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}
_ZIP_LOCAL_HEADER_BYTES = 30  # before the name; https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT


@dataclass(frozen=True)
class _Array:
    """An array in a file, whose rows are read on demand."""

    content: Content
    offset: int  # byte offset of its first row
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        return int(np.prod(self.shape[1:], dtype=np.int64)) * self.dtype.itemsize

    def rows(self, start: int, end: int) -> Any:
        data = self.content.read(self.offset + start * self.row_bytes, self.offset + end * self.row_bytes)
        shape = (end - start, *self.shape[1:])
        if len(data) != (end - start) * self.row_bytes:
            raise DataError(f"{self.content.name} ends inside records [{start}, {end}). Write the file again.")
        return np.frombuffer(data, self.dtype).reshape(shape) if data else np.empty(shape, self.dtype)


class _OpenedArrays(Opened):
    def __init__(self, file: File, arrays: Mapping[str, _Array]) -> None:
        super().__init__(file, next(iter(arrays.values())).shape[0] if arrays else 0)
        self._arrays = arrays
        self.columns: dict[str, tuple[np.dtype[Any], tuple[int, ...]]] = {}  # dtype and shape of a record's part
        for name, array in arrays.items():  # "" is the key of a single array
            for field in array.dtype.names or ():
                base, shape = array.dtype[field].base, array.dtype[field].shape
                self.columns[field] = base, (*array.shape[1:], *shape)
            if not array.dtype.names:
                self.columns[name] = array.dtype, array.shape[1:]

    @property
    def memory_bytes(self) -> int:
        return sum((array.content.memory_bytes for array in self._arrays.values()), super().memory_bytes)

    @property
    def disk_bytes(self) -> int:
        return sum(array.content.disk_bytes for array in self._arrays.values())

    @property
    def layout(self) -> str:
        return ", ".join(f"{name} {dtype.name}{list(shape)}".lstrip() for name, (dtype, shape) in self.columns.items())

    def read(self, start: int, end: int, size: int) -> Iterator[Any]:
        row_bytes = sum(array.row_bytes for array in self._arrays.values())
        size = min(size, max(CHUNK_BYTES // max(row_bytes, 1), 1))
        for first in range(start, end, size):
            chunk = {}
            for name, array in self._arrays.items():
                rows = array.rows(first, min(first + size, end))
                fields = array.dtype.names
                chunk.update({field: _native(rows[field]) for field in fields} if fields else {name: _native(rows)})
            yield chunk.get("", chunk)


class NumpyReader(FileReader):
    """Rows of .npy and .npz files, read by ranges; compressed arrays are first decompressed to a temporary file.

    A record is a row of the array in an .npy; for an .npz or a structured array, it is a dict of the rows of all arrays
    or fields.
    """

    @property
    def element_spec(self) -> Any:
        specs = specs_of_columns(self.first_opened().columns)
        return specs.get("", specs)

    @property
    def metadata(self) -> Metadata:
        columns = self.first_opened().columns
        return Metadata(
            column_names=tuple(name for name in columns if name),
            column_dtypes={name: dtype.name for name, (dtype, _) in columns.items() if name},
            extra={"shapes": {name: shape for name, (_, shape) in columns.items()}},
        )

    def _open(self, file: File, index: FileIndex | None, enough: int | None) -> _OpenedArrays:
        if not file.identity.size:
            return _OpenedArrays(file, {})
        try:
            if file.name.lower().endswith(".npz"):
                arrays = _npz_arrays(file)
            else:
                arrays = {"": _array_in(raw_file(file), file, file.name, file.identity.size)}
        except (ValueError, OSError, EOFError, KeyError, zipfile.BadZipFile) as error:
            raise DataError(
                f"{file.name} can't be read as a NumPy file: {error}. The file is damaged or incomplete. Write it "
                "again."
            ) from error
        opened = _OpenedArrays(file, arrays)
        _check_arrays(file.name, arrays, opened)
        return opened


def _npz_arrays(file: File) -> dict[str, _Array]:
    arrays = {}
    raw = raw_file(file)
    archive = zipfile.ZipFile(raw)
    for member in archive.infolist():
        if not member.filename.endswith(".npy"):
            continue
        key = member.filename.removesuffix(".npy")
        what = f"array {key!r} in {file.name}"
        if member.compress_type == zipfile.ZIP_STORED:
            raw.seek(member.header_offset)
            local_header = raw.read(_ZIP_LOCAL_HEADER_BYTES)
            name_bytes, extra_bytes = np.frombuffer(local_header[26:30], "<u2").tolist()
            raw.seek(name_bytes + extra_bytes, io.SEEK_CUR)
            arrays[key] = _array_in(raw, file, what, raw.tell() + member.file_size)
        else:
            spool = _spooled(file, member)
            arrays[key] = _array_in(raw_file(spool), spool, what, member.file_size)
    return arrays


def _spooled(file: File, member: zipfile.ZipInfo) -> SpooledContent:
    return SpooledContent(file, lambda: zipfile.ZipFile(raw_file(file)).open(member).read)


def _array_in(raw: Any, content: Content, what: str, end: int) -> _Array:
    """The array whose header is at the position of `raw`, the file of `content`, and which ends at byte `end` at the
    latest."""
    version = np.lib.format.read_magic(raw)
    if version not in _HEADER_READERS:
        raise DataError(f"{what} has version {version} of NumPy's format. Expected 1.0 or 2.0.")
    shape, fortran_order, dtype = _HEADER_READERS[version](raw)
    if dtype.hasobject:
        raise DataError(
            f"{what} contains Python objects, which can't be loaded without pickle. Save numbers, or strings of fixed "
            "length (dtype 'S' or 'U')."
        )
    if not shape:
        raise DataError(f"{what} is a single value. Expected an array whose first axis counts records.")
    offset = raw.tell()
    needed = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    by_columns = fortran_order and len(shape) > 1
    if offset + needed > end:
        row_bytes = max(needed // max(shape[0], 1), 1)
        whole = "its records (stored by columns)" if by_columns else f"record {(end - offset) // row_bytes}"
        raise DataError(
            f"{what} is truncated inside {whole}: its header promises {how_many(shape[0], 'record')} in "
            f"{needed} bytes, but there are {end - offset}. Copy or write the file again."
        )
    if by_columns:  # rows are not contiguous
        array = np.frombuffer(content.read(offset, offset + needed), dtype).reshape(shape, order="F")
        content, offset = MemoryContent(content.name, array.tobytes(order="C")), 0
    return _Array(content, offset, dtype, tuple(shape))


def _check_arrays(name: str, arrays: Mapping[str, _Array], opened: _OpenedArrays) -> None:
    if not arrays:
        raise DataError(f"{name} contains no arrays.")
    lengths = {key: array.shape[0] for key, array in arrays.items()}
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{key} has {length}" for key, length in lengths.items())
        raise DataError(f"The arrays in {name} must have the same number of records: {listed}.")
    for key, (dtype, _) in opened.columns.items():
        if dtype.kind not in "biufcSU" or (dtype.kind == "f" and dtype.itemsize > 8):
            raise DataError(
                f"Array {key!r} in {name} has the dtype {dtype}, which TensorFlow does not support. Save it with a "
                "numeric, boolean or string dtype."
            )


def _native(rows: Any) -> Any:
    if rows.dtype.kind == "S":
        return rows.astype(object)
    if rows.dtype.kind == "U":
        return np.char.encode(rows, "utf-8").astype(object)
    return np.ascontiguousarray(rows, rows.dtype.newbyteorder("="))
