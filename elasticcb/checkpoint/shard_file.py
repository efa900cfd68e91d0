"""The file with a parameter server's shard of the model, in a checkpoint or as a recovery file: a safetensors file,
written and read in pieces, so that an embedding table may be larger than memory. (The library itself writes only
tensors that are completely in memory.)
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from safetensors import SafetensorError, safe_open

from elasticcb.errors import CheckpointError
from elasticcb.optimizers.state import OptimizerState, to_tensors
from elasticcb.rpc.tensors import Array
from elasticcb.sharding import table_state
from elasticcb.sharding.array_names import AGES, GONE, TABLE, WEIGHT, kind_of, named
from elasticcb.sharding.partition import ShardMap
from elasticcb.sharding.table_state import TableSource, TableState
from elasticcb.storage import durable

_SIZE = struct.Struct("<Q")  # of the header
_ALIGNMENT = 8
_KINDS = {"f": "F", "i": "I", "u": "U", "c": "C"}


class Outline(NamedTuple):
    """The description of a tensor, without its values."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class TensorFile:
    """A file that is being written; a context manager. All methods may raise `OSError`."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self._begins: dict[str, int] = {}  # byte in the file
        self._outlines: Mapping[str, Outline] = {}

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def begin(self, tensors: Mapping[str, Outline], metadata: Mapping[str, str]) -> None:
        """Writes the header. All of its tensors must follow."""
        header: dict[str, Any] = {"__metadata__": dict(metadata)}
        position = 0
        # The largest elements first, so that each tensor is aligned to its element size.
        for name in sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name)):
            outline, self._begins[name] = tensors[name], position
            position += outline.bytes
            offsets = [self._begins[name], position]
            header[name] = {"dtype": _name_of(outline.dtype), "shape": list(outline.shape), "data_offsets": offsets}
        encoded = json.dumps(header, separators=(",", ":")).encode()
        encoded += b" " * (-len(encoded) % _ALIGNMENT)
        start = _SIZE.size + len(encoded)
        self._begins = {name: start + begin for name, begin in self._begins.items()}
        self._outlines = tensors
        self._file.write(_SIZE.pack(len(encoded)) + encoded)

    def put(self, name: str, first: int, array: Array) -> None:
        """Writes `array`, the part of the tensor from index `first` of its first axis on."""
        outline = self._outlines[name]
        row_bytes = math.prod(outline.shape[1:]) * outline.dtype.itemsize
        self._file.seek(self._begins[name] + first * row_bytes)
        if array.size:
            self._file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def _name_of(dtype: np.dtype[Any]) -> str:
    if dtype.name in ("bool", "bfloat16"):
        return {"bool": "BOOL", "bfloat16": "BF16"}[dtype.name]
    return f"{_KINDS[dtype.kind]}{8 * dtype.itemsize}"


PIECE_BYTES = 4 << 20


class SavedTable:
    """A `TableSource` of files.

    Args:
        files: files of `write_part`, in the order in which they were written; later rows override earlier ones, also by
            being gone. Memory holds one piece, and the ids of all files but the first. Checksums are not verified.
        owner: the server that wrote them, and the map by which it has rows: an id in the files of two servers would
            have two rows, so reading raises `CheckpointError` for ids of others.
    """

    def __init__(self, number: int, files: Sequence[Path], owner: tuple[int, ShardMap]) -> None:
        self._prefix, self.files = f"{TABLE}/{number}/", tuple(files)
        self._number, self._owner = number, owner

    def __len__(self) -> int:
        if len(self.files) > 1:
            return sum(len(ids) for ids, _ in self.ages())
        with opened(self.files[0]) as file:
            return int(file.get_slice(self._prefix + "ids").get_shape()[0])

    def ages(self) -> Iterator[tuple[Array, Array | None]]:
        ids, used = self._prefix + "ids", self._prefix + "used"
        for tensors in self._read((ids, used)):
            self._check(tensors[ids])
            yield tensors[ids], tensors.get(used)

    def pieces(self) -> Iterator[TableState]:
        for tensors in self._read():
            self._check(tensors[self._prefix + "ids"])
            yield table_state.from_tensors(tensors)[self._number]

    def _check(self, ids: Array) -> None:
        server, shard_map = self._owner
        foreign = np.flatnonzero(~shard_map.owns(server, ids))
        if len(foreign):
            owner = shard_map.server_of(ids[foreign[:1]])[0]
            raise CheckpointError(
                f"{self.files[0]} contains a row of the id {ids[foreign[0]]}, which belongs in the file of server "
                f"{owner}, so the id may have two rows. The files are not from one model."
            )

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


class ReadableTable(Protocol):
    """An embedding table that is read in pieces while it is being trained (elasticcb/ps/table_snapshot.py)."""

    def __len__(self) -> int: ...

    def read(self, start: int) -> TableState: ...

    def pieces(self) -> Iterator[TableState]: ...

    def release(self) -> None: ...


class OnlyRows:
    """A `ReadableTable` without the slots and counts of another."""

    def __init__(self, table: ReadableTable) -> None:
        self._table, self.release = table, table.release

    def __len__(self) -> int:
        return len(self._table)

    def read(self, start: int) -> TableState:
        piece = self._table.read(start)
        return TableState(piece.ids, piece.rows)

    def pieces(self) -> Iterator[TableState]:
        return (TableState(piece.ids, piece.rows) for piece in self._table.pieces())


@dataclass
class Part:
    """The state of one server. Arrays have the shapes of its slices."""

    version: int
    weights: dict[int, Array] = field(default_factory=dict)
    optimizers: OptimizerState = field(default_factory=OptimizerState)  # extras only for complete variables
    tables: Mapping[int, TableSource] = field(default_factory=dict)  # by variable; slots are within
    held: Mapping[int, ReadableTable] = field(default_factory=dict)  # tables that are trained meanwhile
    gone: Mapping[int, Array] = field(default_factory=dict)  # by table, ids whose rows in earlier files were removed
    ages: Mapping[int, Array] = field(default_factory=dict)  # by table whose rows age by time, of `RowAges`

    def release(self) -> None:
        """Releases the state."""
        for table in self.held.values():
            table.release()


@dataclass(frozen=True)
class SavedFile:
    """The entry of a server's file in the manifest; `version` of the model is the one in it."""

    name: str
    bytes: int
    sha256: str
    version: int

    @classmethod
    def of(cls, saved: Mapping[str, Any]) -> SavedFile:
        return cls(saved["name"], saved["bytes"], saved["sha256"], saved["version"])


def write_part(path: Path, part: Part, answered: Mapping[int, int] = {}) -> SavedFile:
    """Writes a server's state to one file.

    Args:
        answered: by worker, the sequence number of the last push in it.

    Raises `CheckpointError` if that fails.
    """
    tensors = named(WEIGHT, part.weights) | to_tensors(part.optimizers)
    tensors |= named(AGES, part.ages) | named(GONE, part.gone)
    metadata = {
        "version": str(part.version),
        "optimizer": ", ".join(part.optimizers.optimizers),
        "answered": json.dumps(dict(answered)),
    }
    try:
        with durable.replacing(path) as unfinished, TensorFile(unfinished) as file:
            # The arrays of a table are known from its first piece.
            held: dict[int, TableSource | ReadableTable] = {**part.tables, **part.held}
            tables = {number: table.pieces() for number, table in held.items()}
            first = {number: next(pieces) for number, pieces in tables.items()}
            outlines = {name: Outline(array.dtype, array.shape) for name, array in tensors.items()}
            for number, piece in first.items():
                rows = len(held[number])
                for name, array in table_state.to_tensors({number: piece}).items():
                    outlines[name] = Outline(array.dtype, (rows, *array.shape[1:]))
            file.begin(outlines, metadata)
            for name, array in tensors.items():
                file.put(name, 0, array)
            for number, pieces in tables.items():
                start = 0
                for piece in itertools.chain([first.pop(number)], pieces):
                    for name, array in table_state.to_tensors({number: piece}).items():
                        file.put(name, start, array)
                    start += len(piece.ids)
        return SavedFile(path.name, *durable.digest_of(path), part.version)
    except OSError as error:
        raise CheckpointError(f"The file {path} can't be written: {error}.") from error


def optimizers_in(metadata: Mapping[str, str]) -> tuple[str, ...]:
    """The class names of the optimizers in the metadata of a file; none: unknown."""
    return tuple(name for name in metadata.get("optimizer", "").split(", ") if name)


def check_file(path: Path, saved: SavedFile) -> None:
    """Raises `CheckpointError` if the file is not the saved one."""
    try:
        size = path.stat().st_size
        if size != saved.bytes:
            raise CheckpointError(f"The file {path} is damaged: it has {size} bytes, its manifest lists {saved.bytes}.")
        if durable.digest_of(path).sha256 != saved.sha256:
            raise CheckpointError(f"The file {path} is damaged: its SHA-256 is not the one in its manifest.")
    except OSError as error:
        raise CheckpointError(f"The file {path} can't be read: {error}.") from error
