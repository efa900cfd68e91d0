"""NumPy files: the records of an array are its rows, those of an .npz dicts of rows."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from elasticcb.data.feeds import named_feed
from elasticcb.data.files import Content, FileReader, is_remote, open_content
from elasticcb.data.reader import CHUNK_BYTES, CHUNK_RECORDS, Metadata, check_range
from elasticcb.errors import DataError

if TYPE_CHECKING:
    from elasticcb.data.reader import Feed

_HEADER_READERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}
_ZIP_LOCAL_HEADER_BYTES = 30  # before the name; https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT


@dataclass(frozen=True)
class _Opened:
    arrays: dict[str, Any]  # "" is the name of a single array without fields
    memory_bytes: int  # of arrays that are no memory maps

    @property
    def count(self) -> int:
        return len(next(iter(self.arrays.values()))) if self.arrays else 0

    @property
    def layout(self) -> str:
        return ", ".join(
            f"{name} {array.dtype.name}{list(array.shape[1:])}".lstrip() for name, array in self.arrays.items()
        )


class NumpyReader(FileReader):
    """Rows of .npy and .npz files; local arrays that are not compressed are mapped, not loaded.

    A record is a row of the array in an .npy, and a dict of the rows of all arrays in an .npz, or of
    the fields of a structured array.

    Args:
      label: the array that holds labels, for the default feed (`named_feed`).
    """

    def __init__(self, files: list[str], *, label: str = "") -> None:
        super().__init__(files)
        self._label = label

    @property
    def element_spec(self) -> Any:
        import tensorflow as tf

        specs = {
            name: tf.TensorSpec(
                array.shape[1:], tf.string if array.dtype.kind in "SU" else array.dtype.newbyteorder("=")
            )
            for name, array in self.first_opened().arrays.items()
        }
        return specs.get("", specs)

    @property
    def metadata(self) -> Metadata:
        arrays = self.first_opened().arrays
        return Metadata(
            column_names=tuple(name for name in arrays if name),
            column_dtypes={name: array.dtype.name for name, array in arrays.items() if name},
            extra={"shapes": {name: tuple(array.shape[1:]) for name, array in arrays.items()}},
        )

    def default_feed(self) -> Feed | None:
        names = self.metadata.column_names
        return named_feed(names, self._label) if names else None

    def read_chunks(self, name: str, start: int, end: int, size: int = CHUNK_RECORDS) -> Iterator[Any]:
        opened: _Opened = self.opened(name)
        check_range(name, start, end, opened.count)
        row_bytes = sum(array.nbytes for array in opened.arrays.values()) // max(opened.count, 1)
        size = min(size, max(CHUNK_BYTES // max(row_bytes, 1), 1))
        for first in range(start, end, size):
            chunk = {key: _native(array[first : min(first + size, end)]) for key, array in opened.arrays.items()}
            yield chunk.get("", chunk)

    def _open(self, name: str) -> _Opened:
        content = open_content(name)
        if not content.size:
            return _Opened({}, 0)
        local = not is_remote(name) and not content.memory_bytes
        try:
            arrays = _npz_arrays(content, local) if name.lower().endswith(".npz") else _npy_arrays(content, local)
        except (ValueError, OSError, EOFError, KeyError, zipfile.BadZipFile) as error:
            raise DataError(
                f"{name} can't be read as NumPy's format: {error}. It is damaged or was not copied to "
                "its end; "
                "write it again."
            ) from error
        _check_arrays(name, arrays)
        in_memory = [array.nbytes for array in arrays.values() if not isinstance(array, np.memmap)]
        return _Opened(arrays, sum(in_memory))


def _npy_arrays(content: Content, local: bool) -> dict[str, Any]:
    if local:
        with open(content.name, "rb") as file:
            array = _array_in(file, content.name, content.size, map_file=True)
    else:
        data = content.read(0, content.size)
        array = _array_in(io.BytesIO(data), content.name, len(data), map_file=False)
    if array.dtype.names:
        return {field: array[field] for field in array.dtype.names}
    return {"": array}


def _npz_arrays(content: Content, local: bool) -> dict[str, Any]:
    arrays = {}
    with open(content.name, "rb") if local else io.BytesIO(content.read(0, content.size)) as file:
        archive = zipfile.ZipFile(file)
        for member in archive.infolist():
            if not member.filename.endswith(".npy"):
                continue
            key = member.filename.removesuffix(".npy")
            what = f"array {key!r} in {content.name}"
            if local and member.compress_type == zipfile.ZIP_STORED:
                file.seek(member.header_offset)
                local_header = file.read(_ZIP_LOCAL_HEADER_BYTES)
                name_bytes, extra_bytes = np.frombuffer(local_header[26:30], "<u2").tolist()
                file.seek(name_bytes + extra_bytes, io.SEEK_CUR)
                arrays[key] = _array_in(file, what, file.tell() + member.file_size, map_file=True)
            else:
                data = archive.read(member)
                arrays[key] = _array_in(io.BytesIO(data), what, len(data), map_file=False)
    return arrays


def _array_in(file: Any, what: str, end: int, map_file: bool) -> Any:
    """The array whose header `file` stands at, and which reaches to byte `end` at most."""
    version = np.lib.format.read_magic(file)
    if version not in _HEADER_READERS:
        raise DataError(f"{what} is in version {version} of NumPy's format. Expected 1.0 or 2.0.")
    shape, fortran_order, dtype = _HEADER_READERS[version](file)
    if dtype.hasobject:
        raise DataError(
            f"{what} holds Python objects, which would have to be unpickled. Save numbers, or strings of "
            "a fixed length (dtype 'S' or 'U')."
        )
    if not shape:
        raise DataError(f"{what} is a single value. Expected an array whose first axis counts records.")
    offset = file.tell()
    needed = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    if offset + needed > end:
        row_bytes = max(needed // max(shape[0], 1), 1)
        whole = f"record {(end - offset) // row_bytes}" if not fortran_order else "its records (stored by columns)"
        raise DataError(
            f"{what} is truncated inside {whole}: its header promises {shape[0]} records in {needed} bytes, "
            f"and {end - offset} are there. Copy or write the file again."
        )
    order: Any = "F" if fortran_order else "C"
    if map_file and needed:
        return np.memmap(file, dtype, "r", offset, shape, order)
    file.seek(offset)
    return np.frombuffer(file.read(needed), dtype).reshape(shape, order=order)


def _check_arrays(name: str, arrays: dict[str, Any]) -> None:
    if not arrays:
        raise DataError(f"{name} holds no array.")
    lengths = {key: len(array) for key, array in arrays.items()}
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{key} has {length}" for key, length in lengths.items())
        raise DataError(f"The arrays in {name} must have equally many records: {listed}.")
    for key, array in arrays.items():
        if array.dtype.kind not in "biufcSU" or (array.dtype.kind == "f" and array.dtype.itemsize > 8):
            raise DataError(
                f"Array {key!r} in {name} has the dtype {array.dtype}, which TensorFlow has not. Save "
                "it with "
                "a numeric, boolean or string dtype."
            )


def _native(rows: Any) -> Any:
    if rows.dtype.kind == "S":
        return rows.astype(object)
    if rows.dtype.kind == "U":
        return np.char.encode(rows, "utf-8").astype(object)
    return np.ascontiguousarray(rows, rows.dtype.newbyteorder("="))
