"""A server's part of a snapshot: safetensors files that any number of servers can read."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from elasticcb.checkpoint.manifest import WrittenPart, check_variables, map_in, written_parts
from elasticcb.checkpoint.remote import Files
from elasticcb.checkpoint.shard_file import Part, SavedFile, SavedTable, check_file, opened, optimizers_in, tables_in
from elasticcb.errors import CheckpointError, StoreError
from elasticcb.process.wording import how_many
from elasticcb.rpc.tensors import Array, dtype_of
from elasticcb.sharding.array_names import AGES, EXTRAS, SHARED, SLOTS, WEIGHT, by_index, kind_of
from elasticcb.sharding.partition import ShardMap, Slice, VariableSpec, partition
from elasticcb.sharding.table_state import JoinedTable, TableSource

logger = logging.getLogger(__name__)


class Loaded(NamedTuple):
    """A server's part, put together from files.

    Attributes:
        answered: by worker, the sequence number of the last push in it.
        file: the last file that it was read from, if all of it comes from the files of the same server.
    """

    part: Part
    answered: Mapping[int, int]
    file: SavedFile | None


def load_model(files: Files, manifest: Mapping[str, Any], specs: Sequence[VariableSpec]) -> Part:
    """The whole model; arguments and errors as for `load`."""
    (everything,) = partition(specs, 1, split=False)
    return load(files, manifest, specs, everything, 0, ShardMap(1)).part


def load(
    files: Files,
    manifest: Mapping[str, Any],
    specs: Sequence[VariableSpec],
    slices: Sequence[Slice],
    index: int,
    shard_map: ShardMap,
) -> Loaded:
    """The part of a server with `slices`, whichever servers wrote the snapshot. The SHA-256 of the files that it needs
    is checked; of files with changes, those before the first damaged one are used.

    Tables stay in the files until they are read; some rows may belong to other servers.

    Args:
        index: index of this server; scalars come from the same index if the number of servers is unchanged.

    Raises `CheckpointError` if files are missing or damaged, or belong to another model; `StoreError` if a URL can't be
    read now.
    """
    check_variables(manifest, specs, files.name)
    written = written_parts(manifest, Path(files.name))
    try:
        return _put_together(files, written, map_in(manifest), specs, slices, index, shard_map)
    except StoreError:
        raise
    except CheckpointError as error:
        raise CheckpointError(
            f"The snapshot {files.name} can't be used: {error} Start from another version."
        ) from error


def _put_together(
    folder: Files,
    written: Sequence[WrittenPart],
    written_by: ShardMap,
    specs: Sequence[VariableSpec],
    slices: Sequence[Slice],
    index: int,
    shard_map: ShardMap,
) -> Loaded:
    assemblies = {part.variable: _Assembly(part, specs[part.variable]) for part in slices}
    same_map = written_by.servers == shard_map.servers
    scalars_from = index if same_map else 0
    result, answered, used = Part(version=0), dict[int, int](), list[SavedFile]()
    tables: dict[int, list[TableSource]] = {number: [] for number, spec in enumerate(specs) if spec.table}
    for place, (held, saved) in enumerate(written):
        wanted = [part for part in held if part.variable in assemblies and assemblies[part.variable].overlaps(part)]
        has_ids = bool(tables) and (place == index or not same_map)
        if not wanted and place != scalars_from and not has_ids:
            continue
        usable = _undamaged(folder, saved)
        files = [folder.path(each.name) for each in usable]
        used.append(usable[-1])
        with opened(files[-1]) as file:
            names, metadata = list(file.keys()), file.metadata() or {}
            for worker, last in json.loads(metadata.get("answered", "{}")).items():
                answered[int(worker)] = max(last, answered.get(int(worker), 0))
            if has_ids:
                for number in tables_in(names):
                    tables[number].append(SavedTable(number, files, (place, written_by)))
            by_variable = _by_variable(names)
            for part in wanted:
                for name, slot in by_variable.get(part.variable, []):
                    if kind_of(name) == EXTRAS:
                        result.optimizers.extras[part.variable, slot] = file.get_tensor(name)
                    else:
                        assemblies[part.variable].fill(slot, part, file, name)
            if place == scalars_from:
                result.optimizers.optimizers = optimizers_in(metadata)
                shared = [name for name in names if kind_of(name) == SHARED]
                result.optimizers.shared = {name.partition("/")[2]: file.get_tensor(name) for name in shared}
                ages = {name: file.get_tensor(name) for name in names if kind_of(name) == AGES}
                result.ages = by_index(AGES, ages)
    result.tables = {number: JoinedTable(sources) for number, sources in tables.items() if sources}
    for assembly in assemblies.values():
        assembly.put_into(result)
    result.version = min(each.version for each in used)
    return Loaded(result, answered, used[0] if same_map and len(used) == 1 else None)


def _undamaged(folder: Files, files: Sequence[SavedFile]) -> list[SavedFile]:
    """The files before the first damaged one. Raises `CheckpointError` if there is none."""
    found: list[SavedFile] = []
    for saved in files:
        try:
            check_file(folder.path(saved.name), saved)
        except StoreError:
            raise
        except CheckpointError as error:
            if not found:
                raise
            logger.warning("%s Using what was saved before it.", error)
            break
        found.append(saved)
    return found


class _Assembly:
    """Assembles the wanted slice of a variable from the slices in the files."""

    def __init__(self, part: Slice, spec: VariableSpec) -> None:
        self.slice, self._spec = part, spec
        self.arrays: dict[str, Array] = {}  # by slot; "" is the weight itself
        self.filled: dict[str, int] = {}  # number of rows

    def overlaps(self, held: Slice) -> bool:
        if not self.slice.elements:
            return True
        return held.start < self.slice.stop and self.slice.start < held.stop

    def fill(self, slot: str, held: Slice, file: Any, name: str) -> None:
        first, last = self.slice.row_range(self._spec)
        held_first, held_last = held.row_range(self._spec)
        start, stop = max(first, held_first), min(last, held_last)
        if held == self.slice:
            self.arrays[slot] = np.array(file.get_tensor(name))
            self.filled[slot] = last - first
            return
        if slot not in self.arrays:
            width = file.get_slice(name).get_shape()[1:]
            self.arrays[slot] = np.empty((last - first, *width), dtype_in(file, name))
            self.filled[slot] = 0
        if start < stop:
            rows = file.get_slice(name)[start - held_first : stop - held_first]
            self.arrays[slot][start - first : stop - first] = rows
            self.filled[slot] += stop - start

    def put_into(self, part: Part) -> None:
        """Raises `CheckpointError` if the files did not contain all of it."""
        variable = self.slice.variable
        first, last = self.slice.row_range(self._spec)
        for slot, array in self.arrays.items():
            missing = last - first - self.filled[slot]
            if not slot and missing:
                raise CheckpointError(f"{how_many(missing, 'row')} of the weights of {self._spec.path!r} are missing.")
            if not slot:
                part.weights[variable] = array
            elif not missing:  # else it was saved before a movement had reached all servers
                part.optimizers.slots[variable, slot] = array
        if variable not in part.weights:
            raise CheckpointError(f"The weights of {self._spec.path!r} are missing.")


def dtype_in(file: Any, name: str) -> np.dtype[Any]:
    """The dtype of an array in an open safetensors file."""
    names = {"F": "float", "I": "int", "U": "uint", "B": "bfloat", "C": "complex"}
    short = file.get_slice(name).get_dtype()
    if short == "BOOL":
        return np.dtype(np.bool_)
    kind, digits = short.rstrip("0123456789"), short[len(short.rstrip("0123456789")) :]
    return dtype_of(names[kind[0]] + digits)


def _by_variable(names: Sequence[str]) -> dict[int, list[tuple[str, str]]]:
    """(tensor's name, slot) by variable; the slot of a weight is ""."""
    found: dict[int, list[tuple[str, str]]] = {}
    for name in names:
        kind, _, rest = name.partition("/")
        if kind in (WEIGHT, SLOTS, EXTRAS):
            variable, _, slot = rest.partition("/")
            found.setdefault(int(variable), []).append((name, slot))
    return found
