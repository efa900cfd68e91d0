"""Arrays of one source in one file, which readers map into memory."""

from __future__ import annotations

import mmap
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

_ALIGNMENT_BYTES = 64  # TensorFlow uses such arrays without a copy
_CHUNK_BYTES = 64 << 20


@dataclass(frozen=True)
class Block:
    """An array in a file: its bytes start at `offset`, in C order."""

    path: str
    offset: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def count(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))


class BlockWriter:
    """Appends arrays to a new file in `folder`.

    Not one .npy per array: a Python memory map keeps its file open, and a structure may hold many arrays.
    """

    def __init__(self, folder: Path) -> None:
        descriptor, self.path = tempfile.mkstemp(prefix="arrays-", suffix=".bin", dir=folder)
        self._file = os.fdopen(descriptor, "wb")

    def __enter__(self) -> BlockWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, array: Any, dtype: np.dtype[Any] | None = None) -> Block:
        """Writes `array` as a block, cast to `dtype`, in the machine's byte order."""
        array = np.asarray(array)
        dtype = (dtype or array.dtype).newbyteorder("=")
        offset = self._file.tell()
        self._file.write(b"\0" * (-offset % _ALIGNMENT_BYTES))
        block = Block(self.path, self._file.tell(), dtype, array.shape)
        rows = array.reshape(1) if not array.shape else array
        step = max(_CHUNK_BYTES // max(rows[:1].nbytes, 1), 1)
        for first in range(0, len(rows), step):
            self._file.write(np.ascontiguousarray(rows[first : first + step], dtype).view(np.uint8).data)
        return block


class BlockReader:
    """Maps the files of blocks on first use, each file once."""

    def __init__(self) -> None:
        self._files: dict[str, Any] = {}

    def array(self, block: Block) -> Any:
        """The array of a block, read-only, backed by the file."""
        if not block.count:
            return np.empty(block.shape, block.dtype)
        if block.path not in self._files:
            self._files[block.path] = np.asarray(np.memmap(block.path, np.uint8, "r"))
        data = self._files[block.path]
        end = block.offset + block.count * block.dtype.itemsize
        return data[block.offset : end].view(block.dtype).reshape(block.shape)

    def close(self) -> None:
        self._files.clear()

    def __reduce__(self) -> Any:
        return BlockReader, ()


def block_of_memmap(array: Any) -> Block | None:
    """The block of an array that is a contiguous part of a memory-mapped file that other processes can map; else
    None."""
    if not isinstance(array, np.memmap) or array.filename is None or array._mmap is None:  # type: ignore[attr-defined]
        return None
    if array.mode == "c" or not array.flags.c_contiguous or array.dtype.hasobject:
        return None
    # `offset` is that of the originally opened array; the offset of a slice follows from its address.
    mapped = np.frombuffer(array._mmap, np.uint8)  # type: ignore[attr-defined]
    start = array.offset - array.offset % mmap.ALLOCATIONGRANULARITY
    inside = array.__array_interface__["data"][0] - mapped.__array_interface__["data"][0]
    return Block(str(array.filename), start + inside, array.dtype, array.shape)
