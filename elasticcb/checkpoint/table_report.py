"""What the embedding tables of a checkpoint hold, without reading their rows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from elasticcb.checkpoint.manifest import read_manifest
from elasticcb.checkpoint.versions import find_latest
from elasticcb.errors import CheckpointError
from elasticcb.rpc.tensors import Array, dtype_of
from elasticcb.sharding.array_names import SLOT, TABLE, kind_of
from elasticcb.sharding.table_spec import TableSpec

QUANTILES = (0.0, 0.25, 0.5, 0.75, 0.99, 1.0)


@dataclass(frozen=True)
class TableReport:
    """One table.

    Attributes:
        path, dtype, dim: of the variable; `dim` elements a row.
        input_dim: how many ids there may be; None: no limit.
        rows: how many ids have one.
        row_bytes, slot_bytes: of all rows, and of what the optimizer keeps for them.
        slots: the names of the latter.
        hits: how often rows were looked up in training, by `QUANTILES`; empty when nobody counted.
        top: the ids that were looked up most, with how often.
        ages: how many versions ago rows were last trained, by `QUANTILES`; empty when nobody counted.
        rows_of_servers: by the place of the server.
    """

    path: str
    dtype: str
    dim: int
    input_dim: int | None
    rows: int
    row_bytes: int
    slot_bytes: int
    slots: tuple[str, ...]
    hits: tuple[int, ...]
    top: tuple[tuple[int, int], ...]
    ages: tuple[int, ...]
    rows_of_servers: tuple[int, ...]


@dataclass(frozen=True)
class CheckpointReport:
    """All tables of one checkpoint."""

    folder: str
    version: int
    tables: tuple[TableReport, ...]


def report(checkpoint: str | Path, top: int) -> CheckpointReport:
    """The tables of a checkpoint: the folder of a version, or of several, of which the newest is taken.

    Args:
        top: of so many ids `TableReport.top` tells.

    Raises `CheckpointError` when there is none, or it can't be read.
    """
    folder = find_latest(checkpoint)
    manifest = read_manifest(folder)
    variables = manifest["variables"]
    found = {index: _Found() for index, variable in enumerate(variables) if variable.get("table")}
    for saved in manifest["files"]:
        path = folder / saved["name"]
        try:
            with safe_open(path, framework="np") as file:
                _read(file, found)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"The checkpoint file {path} can't be read: {error}.") from error
    version = int(manifest["version"])
    tables = tuple(_report(variables[index], table, version, top) for index, table in found.items())
    return CheckpointReport(str(folder), version, tables)


@dataclass
class _Found:
    """What the files hold of one table."""

    rows_of_servers: list[int] = field(default_factory=list)
    counts: dict[str, list[Array]] = field(default_factory=lambda: defaultdict(list))
    slots: list[str] = field(default_factory=list)

    def all(self, name: str) -> Array:
        """The counts of all servers, int64 [n]; empty where one has none."""
        parts = self.counts[name]
        return np.concatenate(parts) if len(parts) == len(self.rows_of_servers) else np.empty(0, np.int64)


def _read(file: Any, found: Mapping[int, _Found]) -> None:
    names: list[str] = file.keys()
    for name in names:
        kind, _, rest = name.partition("/")
        index, _, part = rest.partition("/")
        if kind != TABLE or int(index) not in found:
            continue
        table = found[int(index)]
        if part == "ids":
            table.rows_of_servers.append(file.get_slice(name).get_shape()[0])
        if part in ("ids", "hits", "used"):
            table.counts[part].append(file.get_tensor(name))
        elif kind_of(part) == SLOT and part.partition("/")[2] not in table.slots:
            table.slots.append(part.partition("/")[2])


def _report(variable: Mapping[str, Any], table: _Found, version: int, top: int) -> TableReport:
    ids, hits, used = (table.all(name) for name in ("ids", "hits", "used"))
    rows, dim = sum(table.rows_of_servers), int(np.prod(variable["shape"][1:]))
    row_bytes = rows * dim * dtype_of(variable["dtype"]).itemsize
    return TableReport(
        path=variable["path"],
        dtype=variable["dtype"],
        dim=dim,
        input_dim=TableSpec.from_json(variable["table"]).input_dim,
        rows=rows,
        row_bytes=row_bytes,
        slot_bytes=row_bytes * len(table.slots),
        slots=tuple(sorted(table.slots)),
        hits=_quantiles(hits),
        top=_top(ids, hits, top),
        ages=_quantiles(np.maximum(version - used, 0)),
        rows_of_servers=tuple(table.rows_of_servers),
    )


def _quantiles(counts: Array) -> tuple[int, ...]:
    if not len(counts):
        return ()
    return tuple(int(count) for count in np.quantile(counts, QUANTILES, method="nearest"))


def _top(ids: Array, hits: Array, count: int) -> tuple[tuple[int, int], ...]:
    if not len(hits) or not count:
        return ()
    # Of equal ones the smaller id comes first.
    best = np.lexsort((ids, -hits))[:count]
    return tuple((int(ids[place]), int(hits[place])) for place in best)
