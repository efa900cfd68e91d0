"""Reports on the embedding tables of a checkpoint, without reading all of their rows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from elasticcb.checkpoint.manifest import map_in, read_manifest, written_parts
from elasticcb.checkpoint.parts import dtype_in
from elasticcb.checkpoint.saved_table import opened
from elasticcb.checkpoint.table_report import IdReport, TablesReport, id_in_table, table_report
from elasticcb.checkpoint.versions import find_latest
from elasticcb.errors import CheckpointError
from elasticcb.rpc.tensors import Array
from elasticcb.sharding.array_names import SLOT, TABLE, kind_of
from elasticcb.sharding.partition import VariableSpec
from elasticcb.sharding.shard_map import ShardMap
from elasticcb.sharding.table_counts import TableCounts, Top
from elasticcb.sharding.table_state import TableState


class SavedTables(NamedTuple):
    """The tables of one version of a checkpoint.

    Attributes:
        files: each server's.
        shard_map: which server has which rows.
    """

    folder: Path
    version: int
    specs: Mapping[int, VariableSpec]
    files: tuple[Path, ...]
    shard_map: ShardMap

    @classmethod
    def of(cls, checkpoint: str | Path) -> SavedTables:
        """Opens the tables of a checkpoint: the folder of a version, or of several, of which the newest is used.

        Raises `CheckpointError` if there is none.
        """
        folder = find_latest(checkpoint)
        manifest = read_manifest(folder)
        specs = {
            index: VariableSpec(
                saved["path"], tuple(saved["shape"]), saved["dtype"], saved["trainable"], table=saved["table"]
            )
            for index, saved in enumerate(manifest["variables"])
            if saved.get("table")
        }
        files = [part.files for part in written_parts(manifest, folder)]
        if any(len(own) > 1 for own in files):
            raise CheckpointError(
                f"{folder} has files with changes, of a running job. Pass the folder of a checkpoint."
            )
        whole = tuple(folder / saved.name for (saved,) in files)
        return cls(folder, int(manifest["version"]), specs, whole, map_in(manifest))

    def report(self, top: int) -> TablesReport:
        """Reports on all tables.

        Raises `CheckpointError` if a file can't be read.
        """
        parts: dict[int, list[TableCounts]] = {index: [] for index in self.specs}
        for file in self._opened():
            for index, names in _by_table(file, self.specs).items():
                parts[index].append(self._counted(file, names, top))
        tables = tuple(table_report(spec, parts[index], top, live=False) for index, spec in self.specs.items())
        return TablesReport(str(self.folder), self.version, tables)

    def find(self, id: int) -> IdReport:
        """The rows of an id. Raises `CheckpointError` if a file can't be read."""
        found: dict[int, tuple[int, TableState]] = {}
        for server, file in enumerate(self._opened()):
            for index, names in _by_table(file, self.specs).items():
                places = np.flatnonzero(file.get_tensor(names["ids"]) == id)
                if len(places):
                    found[index] = server, _row_at(file, names, int(places[0]))
        owner = int(self.shard_map.server_of(np.array([id], np.int64))[0])
        none = TableState(np.empty(0, np.int64), np.empty((0, 0)))
        tables = tuple(id_in_table(spec, *found.get(index, (owner, none))) for index, spec in self.specs.items())
        return IdReport(str(self.folder), self.version, id, tables)

    def _opened(self) -> Iterator[Any]:
        """Opens the files one after another, closing each before the next."""
        for path in self.files:
            with opened(path) as file:
                yield file

    def _counted(self, file: Any, names: Mapping[str, str], top: int) -> TableCounts:
        counts, ids = TableCounts(Top(top)), file.get_tensor(names["ids"])
        slots = [part for part in names if kind_of(part) == SLOT]
        counts.rows, counts.row_bytes = len(ids), _bytes_of(file, names["rows"])
        counts.slots = [part.partition("/")[2] for part in slots]
        counts.slot_bytes = sum(_bytes_of(file, names[part]) for part in slots)
        if "hits" in names and "used" in names:
            counts.count(ids, file.get_tensor(names["hits"]), file.get_tensor(names["used"]), self.version)
        return counts


def _by_table(file: Any, specs: Mapping[int, VariableSpec]) -> dict[int, dict[str, str]]:
    """For each table, the names of its arrays in a file, by part: "ids", "slot/NAME"."""
    found: dict[int, dict[str, str]] = {}
    for name in file.keys():  # noqa: SIM118 -- not a mapping
        kind, _, rest = name.partition("/")
        index, _, part = rest.partition("/")
        if kind == TABLE and int(index) in specs:
            found.setdefault(int(index), {})[part] = name
    return found


def _bytes_of(file: Any, name: str) -> int:
    return math.prod(file.get_slice(name).get_shape()) * dtype_in(file, name).itemsize


def _row_at(file: Any, names: Mapping[str, str], place: int) -> TableState:
    """The row at a position, without reading the others."""

    def read(part: str) -> Array:
        array: Array = file.get_slice(names[part])[place : place + 1]
        return array

    return TableState(
        read("ids"),
        read("rows"),
        {part.partition("/")[2]: read(part) for part in names if kind_of(part) == SLOT},
        read("hits") if "hits" in names else None,
        read("used") if "used" in names else None,
    )
