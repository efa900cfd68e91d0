"""What deltas change of a model. NumPy releases the interpreter's lock in all that takes long here."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from elasticcb.checkpoint.manifest import MANIFEST, read_manifest, written_parts
from elasticcb.checkpoint.parts import load_model
from elasticcb.checkpoint.remote import Files
from elasticcb.checkpoint.shard_file import opened
from elasticcb.errors import CheckpointError, StoreError
from elasticcb.rpc.tensors import Array
from elasticcb.serving.exports import Export
from elasticcb.sharding.array_names import GONE, kind_of
from elasticcb.sharding.partition import VariableSpec
from elasticcb.sharding.table_state import whole


class TableChange(NamedTuple):
    """The changes of one table.

    Attributes:
        ids: of its new and changed rows, int64 [n], unique.
        rows: [n, dim].
        gone: ids of its removed rows, int64 [m]; those in `ids` too are there again.
    """

    ids: Array
    rows: Array
    gone: Array


class Delta(NamedTuple):
    """A delta in memory.

    Attributes:
        weights: of all dense variables, by index.
        changes: by table.
    """

    export: Export
    weights: Mapping[int, Array]
    changes: Mapping[int, TableChange]

    @property
    def bytes(self) -> int:
        return sum(array.nbytes for change in self.changes.values() for array in change)


def export_manifest(files: Files) -> tuple[dict[str, Any], Export]:
    """The manifest of an export. Raises `CheckpointError` if there is none, or it is that of something else."""
    path = files.path(MANIFEST)
    if not path.exists():
        raise CheckpointError(f"The export {files.name} is not there, or not finished: it has no {MANIFEST}.")
    manifest = read_manifest(path.parent)
    return manifest, Export.of(manifest, files.name)


def read_delta(files: Files, after: Export, specs: Sequence[VariableSpec]) -> Delta:
    """Reads a delta, whichever number of servers wrote it.

    Raises `CheckpointError` if it is damaged, does not follow `after`, or belongs to another model.
    """
    manifest, export = export_manifest(files)
    if (export.since, export.exporter, export.model) != (after.version, after.exporter, after.model):
        raise CheckpointError(
            f"The delta {files.name} follows version {export.since} of {export.model!r}, exported by run "
            f"{export.exporter}; expected version {after.version} of {after.model!r}, by run {after.exporter}. The "
            "next full export will be served."
        )
    try:
        part = load_model(files, manifest, specs)
    except StoreError:
        raise
    except CheckpointError as error:
        raise CheckpointError(f"The delta {files.name} can't be applied: {error.__cause__ or error}") from error
    gone: dict[int, list[Array]] = {number: [] for number, spec in enumerate(specs) if spec.table}
    for saved in itertools.chain.from_iterable(written.files for written in written_parts(manifest, Path(files.name))):
        with opened(files.path(saved.name)) as file:
            for name in (name for name in file.keys() if kind_of(name) == GONE):  # noqa: SIM118 -- not a mapping
                gone[int(name.partition("/")[2])].append(file.get_tensor(name))
    changes = {}
    for number, removed in gone.items():
        width = specs[number].shape[1:]
        table = whole(part.tables[number]) if number in part.tables else None
        ids, rows = (np.empty(0, np.int64), np.empty((0, *width))) if table is None else (table.ids, table.rows)
        changes[number] = TableChange(ids, rows, np.concatenate([np.empty(0, np.int64), *removed]))
    return Delta(export, part.weights, changes)


def combined(changes: Sequence[TableChange]) -> TableChange:
    """One change in the place of several, one after another; its ids are ascending, and none is in both."""
    ids = np.concatenate([part for change in changes for part in (change.gone, change.ids)])
    rows = np.concatenate([change.rows for change in changes if len(change.ids)] or [changes[0].rows])
    places, row = [], 0  # among `rows`; -1: the id is removed
    for change in changes:
        places += [np.full(len(change.gone), -1), np.arange(row, row + len(change.ids))]
        row += len(change.ids)
    # `unique` finds the first of equal ids: the last, in reverse.
    ids, last = np.unique(ids[::-1], return_index=True)
    at = np.concatenate(places)[::-1][last]
    return TableChange(ids[at >= 0], rows[at[at >= 0]], ids[at < 0])


def places_of(wanted: Array, ids: Array) -> tuple[Array, Array]:
    """Where `wanted` are, or would be, among ascending `ids`; and which of them are there."""
    places = np.searchsorted(ids, wanted)
    there = np.zeros(len(wanted), np.bool_)
    if len(ids):
        there = ids[np.minimum(places, len(ids) - 1)] == wanted
    return places, there


def moved(ids: Array, change: TableChange) -> tuple[Array, Array, Array]:
    """How a change of `combined` moves the rows of a table.

    Returns the table's new ids, ascending (those given if none came or went); for each, the place of its row before, or
    any place if it had none; and the places of the change's rows.
    """
    gone, was_there = places_of(change.gone, ids)
    places, known = places_of(change.ids, ids)
    if known.all() and not was_there.any():
        return ids, np.arange(len(ids)), places
    kept = np.delete(np.arange(len(ids)), gone[was_there])
    new, kept_ids = change.ids[~known], ids[kept]
    before = np.searchsorted(kept_ids, new)
    after = np.insert(kept_ids, before, new)
    return after, np.insert(kept, before, 0), np.searchsorted(after, change.ids)
