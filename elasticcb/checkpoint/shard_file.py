"""The file with a parameter server's shard of the model, in a checkpoint or as a recovery file."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from elasticcb.checkpoint.saved_table import SavedTable, opened, tables_in
from elasticcb.errors import CheckpointError
from elasticcb.optimizers.state import OptimizerState
from elasticcb.rpc.tensors import Array
from elasticcb.sharding import table_state
from elasticcb.sharding.array_names import (
    AGES,
    EXTRA,
    GONE,
    SHARED,
    SLOT,
    TABLE,
    WEIGHT,
    by_index,
    by_index_and_name,
    kind_of,
    named,
    of_kind,
)
from elasticcb.sharding.table_source import TableSource
from elasticcb.sharding.table_state import TableState
from elasticcb.storage import durable
from elasticcb.storage.tensor_file import Outline, TensorFile

Key = tuple[int, str]  # variable, name

FORMAT = 1


class ReadableTable(Protocol):
    """An embedding table that is read in pieces while it is being trained (elasticcb/ps/table_snapshot.py)."""

    def __len__(self) -> int: ...

    def read(self, start: int) -> TableState: ...

    def pieces(self) -> Iterator[TableState]: ...

    def release(self) -> None: ...


@dataclass
class Part:
    """The state of one server. Arrays have the shapes of its slices."""

    version: int
    weights: dict[int, Array] = field(default_factory=dict)
    slots: dict[Key, Array] = field(default_factory=dict)  # with the rows of their variable
    extras: dict[Key, Array] = field(default_factory=dict)  # of other shapes; only for complete variables
    shared: dict[str, Array] = field(default_factory=dict)  # iterations, learning rate, …
    optimizer: str = ""  # class names, separated by commas; "": none
    tables: Mapping[int, TableSource] = field(default_factory=dict)  # by variable; slots are within
    held: Mapping[int, ReadableTable] = field(default_factory=dict)  # tables that are trained meanwhile
    gone: Mapping[int, Array] = field(default_factory=dict)  # by table, ids whose rows in earlier files were removed
    ages: Mapping[int, Array] = field(default_factory=dict)  # by table whose rows age by time, of `RowAges`

    @property
    def optimizers(self) -> OptimizerState:
        """The state of the optimizers."""
        names = tuple(name for name in self.optimizer.split(", ") if name)
        return OptimizerState(self.slots, self.extras, self.shared, names)

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
    tensors = named(WEIGHT, part.weights) | named(SLOT, part.slots) | named(EXTRA, part.extras)
    tensors |= named(SHARED, part.shared) | named(AGES, part.ages) | named(GONE, part.gone)
    metadata = {"format": str(FORMAT), "version": str(part.version), "optimizer": part.optimizer}
    metadata["answered"] = json.dumps(dict(answered))
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


def read_part(path: Path) -> Part:
    """The inverse of `write_part`; tables stay in the file until they are read. Raises `CheckpointError`."""
    with opened(path) as file:
        metadata, names = file.metadata() or {}, list(file.keys())
        tensors = {name: file.get_tensor(name) for name in names if kind_of(name) != TABLE}
    return Part(
        int(metadata["version"]),
        by_index(WEIGHT, tensors),
        by_index_and_name(SLOT, tensors),
        by_index_and_name(EXTRA, tensors),
        of_kind(SHARED, tensors),
        metadata["optimizer"],
        {number: SavedTable(number, [path]) for number in tables_in(names)},
        ages=by_index(AGES, tensors),
    )


def check_file(path: Path, saved: SavedFile) -> None:
    """Raises `CheckpointError` if the file is not the saved one."""
    try:
        size = path.stat().st_size
        if size == saved.bytes and durable.digest_of(path).sha256 == saved.sha256:
            return
    except OSError as error:
        raise CheckpointError(f"The file {path} can't be read: {error}.") from error
    raise CheckpointError(
        f"The file {path} is damaged: its {size} bytes are not the {saved.bytes} bytes listed in its manifest."
    )
