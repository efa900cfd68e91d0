"""Reports on the embedding tables of a running job or of a checkpoint, assembled from the parts of each table."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from elasticcb.checkpoint.manifest import map_in, specs_in, verify, written_parts
from elasticcb.checkpoint.parts import dtype_in
from elasticcb.checkpoint.shard_file import opened
from elasticcb.checkpoint.versions import find_latest
from elasticcb.errors import CheckpointError
from elasticcb.proto import elasticcb_pb2 as pb
from elasticcb.rpc.tensors import Array, from_message
from elasticcb.settings.table import TableOptions
from elasticcb.sharding.array_names import SLOTS, TABLE, kind_of
from elasticcb.sharding.partition import ShardMap, VariableSpec
from elasticcb.sharding.table_counts import Spread, TableCounts, Top
from elasticcb.sharding.table_state import TableSpec, TableState, from_tensors


@dataclass(frozen=True)
class LiveTable:
    """Properties of a table that only a running job knows.

    Attributes:
        bytes: memory usage, with slots, counts and index.
        max_rows: maximum number of rows; 0: no limit.
        min_count: number of lookups after which an id gets a row.
        waiting: number of ids with fewer lookups.
        removed: number of rows removed since its current servers took it over.
        seconds: period of the next two values.
        made_per_minute, removed_per_minute: created and removed rows.
    """

    bytes: int
    max_rows: int
    min_count: int
    waiting: int
    removed: int
    seconds: float
    made_per_minute: float
    removed_per_minute: float


@dataclass(frozen=True)
class TableReport:
    """One table.

    Attributes:
        input_dim: maximum number of ids; None: no limit.
        row_bytes, slot_bytes: bytes of all rows, and of their optimizer slots.
        lookups: number of lookups of all these rows in training.
        hits: quantiles (`QUANTILES`) of the number of lookups per row in training; empty if not counted.
        top: the most frequently looked-up ids, with counts.
        ages: quantiles (`QUANTILES`) of the age of rows, in versions since they were last trained; empty if unknown.
        rows_of_servers: number of rows by server index.
        live: properties of a running job; None: from a checkpoint.
    """

    path: str
    dtype: str
    dim: int
    input_dim: int | None
    rows: int
    row_bytes: int
    slot_bytes: int
    slots: tuple[str, ...]
    lookups: int
    hits: tuple[int, ...]
    top: tuple[tuple[int, int], ...]
    ages: tuple[int, ...]
    rows_of_servers: tuple[int, ...]
    live: LiveTable | None = None


@dataclass(frozen=True)
class TablesReport:
    """All tables of a running job, or of a checkpoint.

    Attributes:
        folder: folder of the job, or of the checkpoint's version.
        held_bytes: memory usage of the tables, by server; empty: from a checkpoint.
        memory_bytes: memory limit per server; 0: no limit.
    """

    folder: str
    version: int
    tables: tuple[TableReport, ...]
    held_bytes: tuple[int, ...] = ()
    memory_bytes: int = 0


def table_report(spec: VariableSpec, parts: Sequence[TableCounts], top: int, live: bool) -> TableReport:
    """Assembles a table from its parts by server."""
    table, hits, ages = TableSpec.from_json(spec.table), Spread(), Spread()
    for part in parts:
        hits.add(part.hits)
        ages.add(part.ages)
    return TableReport(
        path=spec.path,
        dtype=table.options.held_dtype(spec.dtype) if live else spec.dtype,
        dim=spec.row_elements,
        input_dim=table.input_dim,
        rows=sum(part.rows for part in parts),
        row_bytes=sum(part.row_bytes for part in parts),
        slot_bytes=sum(part.slot_bytes for part in parts),
        slots=tuple(sorted({name for part in parts for name in part.slots})),
        lookups=hits.sum,
        hits=hits.quantiles(),
        top=_top_of(parts, top),
        ages=ages.quantiles(),
        rows_of_servers=tuple(part.rows for part in parts),
        live=_live(table.options, parts) if live else None,
    )


def _top_of(parts: Sequence[TableCounts], size: int) -> tuple[tuple[int, int], ...]:
    top = Top(size)
    for part in parts:
        top.show(part.top.ids, part.top.hits)
    return tuple(zip(top.ids.tolist(), top.hits.tolist(), strict=True))


def _live(options: TableOptions, parts: Sequence[TableCounts]) -> LiveTable:
    flows = [part for part in parts if part.seconds > 0]
    return LiveTable(
        bytes=sum(part.bytes for part in parts),
        max_rows=options.max_rows or 0,
        min_count=options.min_count or 1,
        waiting=sum(part.waiting for part in parts),
        removed=sum(part.removed for part in parts),
        seconds=max((flow.seconds for flow in flows), default=0.0),
        made_per_minute=sum(60 * flow.made_lately / flow.seconds for flow in flows),
        removed_per_minute=sum(60 * flow.removed_lately / flow.seconds for flow in flows),
    )


@dataclass(frozen=True)
class IdInTable:
    """One id in one table.

    Attributes:
        input_dim: ids are below it; None: no limit.
        server: index of the server responsible for its row; None: unknown.
        row: its values; None: it has no row.
        hits: number of lookups in training; before it has a row, it counts towards `min_count`. None: not counted.
        used: the version at which it was last trained; None: unknown, or it has no row.
        min_count: number of lookups after which it gets a row.
    """

    path: str
    input_dim: int | None
    server: int | None
    row: tuple[float, ...] | None
    hits: int | None
    used: int | None
    norm: float
    slot_norms: dict[str, float]
    min_count: int


@dataclass(frozen=True)
class IdReport:
    """One id in all tables of a running job, or of a checkpoint: `folder` and `version` as in `TablesReport`."""

    folder: str
    version: int
    id: int
    tables: tuple[IdInTable, ...]


def id_in_table(spec: VariableSpec, server: int | None, state: TableState, lookups: int | None = None) -> IdInTable:
    """Reports on an id, with its row if `state` has one.

    Args:
        lookups: number of lookups of an id without a row, if counted.
    """
    table, has_row = TableSpec.from_json(spec.table), len(state.ids) > 0
    return IdInTable(
        path=spec.path,
        input_dim=table.input_dim,
        server=server,
        row=tuple(state.rows[0].astype(np.float64).tolist()) if has_row else None,
        hits=_first(state.hits) if has_row else lookups,
        used=_first(state.used),
        norm=_norm(state.rows),
        slot_norms={name: _norm(slot) for name, slot in sorted(state.slots.items())} if has_row else {},
        min_count=table.options.min_count or 1,
    )


def _first(counts: Array | None) -> int | None:
    return None if counts is None or not len(counts) else int(counts[0])


def _norm(rows: Array) -> float:
    return float(np.linalg.norm(rows.astype(np.float64)))


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

        Raises `CheckpointError` if there is none, or a file is damaged.
        """
        folder = find_latest(checkpoint)
        manifest = verify(folder)
        specs = {index: spec for index, spec in enumerate(specs_in(manifest)) if spec.table}
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
        slots = [part for part in names if kind_of(part) == SLOTS]
        counts.rows, counts.row_bytes = len(ids), _bytes_of(file, names["rows"])
        counts.slots = [part.partition("/")[2] for part in slots]
        counts.slot_bytes = sum(_bytes_of(file, names[part]) for part in slots)
        if "hits" in names and "used" in names:
            counts.count(ids, file.get_tensor(names["hits"]), file.get_tensor(names["used"]), self.version)
        return counts


def _by_table(file: Any, specs: Mapping[int, VariableSpec]) -> dict[int, dict[str, str]]:
    """For each table, the names of its arrays in a file, by part: "ids", "slots/NAME"."""
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
        {part.partition("/")[2]: read(part) for part in names if kind_of(part) == SLOTS},
        read("hits") if "hits" in names else None,
        read("used") if "used" in names else None,
    )


def tables_of(folder: str, answer: pb.TablesResponse, top: int) -> TablesReport:
    """Report on all tables.

    Raises `WireError` for an invalid answer.
    """
    servers = [{part.variable: TableCounts.from_message(part) for part in each.tables} for each in answer.counts]
    tables = tuple(
        table_report(spec, [parts[index] for parts in servers if index in parts], top, live=True)
        for index, spec in _specs(answer).items()
    )
    return TablesReport(
        folder,
        max((each.version for each in answer.counts), default=0),
        tables,
        tuple(sum(part.bytes for part in parts.values()) for parts in servers),
        answer.memory_bytes,
    )


def id_of(folder: str, answer: pb.TablesResponse, id: int) -> IdReport:
    """The rows of an id. Raises `WireError` for an invalid answer."""
    states = from_tensors({each.name: from_message(each) for each in answer.found.tensors})
    none = TableState(np.empty(0, np.int64), np.empty((0, 0)))
    tables = tuple(
        id_in_table(spec, answer.server, states.get(index, none), answer.found.lookups.get(index, 0))
        for index, spec in _specs(answer).items()
    )
    return IdReport(folder, answer.found.version, id, tables)


def _specs(answer: pb.TablesResponse) -> dict[int, VariableSpec]:
    """Specs of the tables, by variable index."""
    specs = map(VariableSpec.from_message, answer.variables)
    return {index: spec for index, spec in enumerate(specs) if spec.table}
