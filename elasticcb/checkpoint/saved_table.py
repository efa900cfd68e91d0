"""Reads an embedding table from files in pieces, so that it may be larger than memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from elasticcb.errors import CheckpointError
from elasticcb.rpc.tensors import Array
from elasticcb.sharding import table_state
from elasticcb.sharding.array_names import GONE, TABLE, kind_of
from elasticcb.sharding.table_state import TableState

PIECE_BYTES = 4 << 20


class SavedTable:
    """A `TableSource` of files.

    Args:
        files: files of `write_part`, in the order in which they were written; later rows override earlier ones, also by
            being gone. Memory holds one piece, and the ids of all files but the first. Checksums are not verified.
    """

    def __init__(self, number: int, files: Sequence[Path]) -> None:
        self._prefix, self.files = f"{TABLE}/{number}/", tuple(files)
        self._number = number

    def __len__(self) -> int:
        if len(self.files) > 1:
            return sum(len(ids) for ids, _ in self.ages())
        with opened(self.files[0]) as file:
            return int(file.get_slice(self._prefix + "ids").get_shape()[0])

    def ages(self) -> Iterator[tuple[Array, Array | None]]:
        ids, used = self._prefix + "ids", self._prefix + "used"
        for tensors in self._read((ids, used)):
            yield tensors[ids], tensors.get(used)

    def pieces(self) -> Iterator[TableState]:
        for tensors in self._read():
            yield table_state.from_tensors(tensors)[self._number]

    def _read(self, wanted: Sequence[str] = ()) -> Iterator[dict[str, Array]]:
        """Yields pieces of the arrays by name, of the `wanted` ones or all; the newest file first."""
        seen = np.empty(0, np.int64)  # ids in newer files, sorted
        for older in reversed(range(len(self.files))):
            found = [seen, self._gone_in(self.files[older])] if older else [seen]
            for tensors in self._pieces_of(self.files[older], wanted):
                if len(seen):
                    ids = tensors[self._prefix + "ids"]
                    new = seen[np.minimum(np.searchsorted(seen, ids), len(seen) - 1)] != ids
                    tensors = {name: array[new] for name, array in tensors.items()}
                if older:
                    found.append(tensors[self._prefix + "ids"])
                yield tensors
            seen = np.sort(np.concatenate(found))

    def _gone_in(self, path: Path) -> Array:
        name = f"{GONE}/{self._number}"
        with opened(path) as file:
            ids: Array = file.get_tensor(name) if name in file.keys() else np.empty(0, np.int64)  # noqa: SIM118
        return ids

    def _pieces_of(self, path: Path, wanted: Sequence[str]) -> Iterator[dict[str, Array]]:
        """Yields at least one piece of a file."""
        with opened(path) as file:
            names = [name for name in file.keys() if name.startswith(self._prefix)]  # noqa: SIM118 -- not a mapping
            names = [name for name in names if not wanted or name in wanted]
            total = file.get_slice(self._prefix + "ids").get_shape()[0]
            row_bytes = sum(_slice(file, name, 0, min(1, total)).nbytes for name in names)
        rows = max(1, PIECE_BYTES // max(1, row_bytes))
        for start in range(0, max(1, total), rows):
            # Reopened for each piece, because the pages read from a mapped file count as memory of the process.
            with opened(path) as file:
                piece = {name: _slice(file, name, start, min(start + rows, total)) for name in names}
            yield piece


def _slice(file: Any, name: str, start: int, stop: int) -> Array:
    # The library does not support empty slices.
    array: Array = file.get_slice(name)[start:stop] if start < stop else file.get_tensor(name)[start:stop]
    return array


def tables_in(names: Sequence[str]) -> list[int]:
    """The tables of a file whose arrays have these names."""
    return sorted({int(name.split("/")[1]) for name in names if kind_of(name) == TABLE})


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Any]:
    """Opens a safetensors file. Raises `CheckpointError` if it can't be read."""
    try:
        with safe_open(path, framework="np") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"The file {path} can't be read: {error}.") from error
