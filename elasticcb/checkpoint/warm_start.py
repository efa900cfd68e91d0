"""Initializes a new job's weights from the checkpoint of another model: variables are matched by name."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from elasticcb.checkpoint.manifest import read_manifest, specs_in
from elasticcb.checkpoint.parts import load_model
from elasticcb.checkpoint.remote import Files
from elasticcb.checkpoint.shard_file import Part
from elasticcb.errors import CheckpointError
from elasticcb.optimizers.state import Key, ModelState
from elasticcb.rpc.tensors import dtype_of
from elasticcb.settings.choices import read_init_map
from elasticcb.sharding.partition import VariableSpec
from elasticcb.sharding.table_state import TableState, overlaid, whole

_SHOWN = 6  # names in a message
_OF_HALF_A_STEP = {"accumulated_gradients"}  # slots that are meaningless at the first step of a job


@dataclass(frozen=True)
class WarmStart:
    """What a job loads from a checkpoint.

    Attributes:
        taken: the checkpoint's variable for each of the job's variables.
    """

    folder: Path
    specs: Sequence[VariableSpec]
    saved: Sequence[VariableSpec]
    taken: Mapping[int, int]

    def summary(self) -> str:
        """Describes which variables are loaded, initialized, and unused."""
        fresh = [spec.path for index, spec in enumerate(self.specs) if index not in self.taken]
        used = set(self.taken.values())
        unused = [spec.path for index, spec in enumerate(self.saved) if index not in used]
        return (
            f"Loaded {len(self.taken)} of {len(self.specs)} variables from {self.folder}. Newly initialized: "
            f"{_some(fresh)}. Unused in the checkpoint: {_some(unused)}."
        )

    def apply(self, state: ModelState, slots: Collection[Key]) -> None:
        """Sets the loaded variables in `state`, the job's initial state. Rows stay as old as they are: those of the
        checkpoint were trained before version 0.

        Args:
            slots: slots of the job's optimizers whose classes are those in `state.optimizer.optimizers`. Slots of other
                classes, and numbers of steps, are initialized.

        Raises `CheckpointError` if a file is missing or damaged.
        """
        manifest = read_manifest(self.folder)
        part = load_model(Files(str(self.folder)), manifest, self.saved)
        part.version = int(manifest["version"])
        same_optimizers = part.optimizers.optimizers == state.optimizer.optimizers
        for new, old in self.taken.items():
            names = [name for variable, name in slots if variable == new and name not in _OF_HALF_A_STEP]
            names = names if same_optimizers else []
            dtype, is_table = dtype_of(self.specs[new].dtype), bool(self.specs[new].table)
            if not is_table and old not in part.tables:
                state.weights[new] = part.weights[old].astype(dtype)
                given = part.optimizers.slots
                state.optimizer.slots |= {(new, name): given[old, name] for name in names if (old, name) in given}
            elif not is_table:  # the slots of ids without a row are unknown
                rows = np.array(state.weights[new])
                table = whole(part.tables[old])
                rows[table.ids] = table.rows
                state.weights[new] = rows
            else:
                self._set_table(state, new, _table(part, old, names))
                if old in part.ages:
                    state.ages[new] = part.ages[old] - np.array([part.version, 0])

    def _set_table(self, state: ModelState, table: int, taken: TableState) -> None:
        rows = state.weights[table]
        ids = state.ids.get(table)
        ids = np.arange(len(rows), dtype=np.int64) if ids is None else ids
        fresh = TableState(ids, rows, used=np.zeros(len(rows), np.int64))
        if np.isin(fresh.ids, taken.ids).all():
            fresh = taken.select(np.empty(0, np.int64))
        both = overlaid([fresh, taken])
        state.weights[table], state.ids[table] = both.rows.astype(dtype_of(self.specs[table].dtype)), both.ids
        state.optimizer.slots |= {(table, name): slot for name, slot in both.slots.items()}
        assert both.used is not None
        state.used[table] = both.used


def _table(part: Part, variable: int, names: Collection[str]) -> TableState:
    """Reads a variable of the checkpoint as rows by id, with these slots."""
    if variable in part.tables:
        table = whole(part.tables[variable])
        slots = {name: table.slots[name] for name in names if name in table.slots}
        used = np.zeros(len(table), np.int64) if table.used is None else table.used - part.version
        return TableState(table.ids, table.rows, slots, used=used)
    rows = part.weights[variable]
    slots = {name: part.optimizers.slots[variable, name] for name in names if (variable, name) in part.optimizers.slots}
    return TableState(np.arange(len(rows), dtype=np.int64), rows, slots, used=np.zeros(len(rows), np.int64))


def warm_start(folder: Path, specs: Sequence[VariableSpec], init_map: str) -> WarmStart:
    """Matches a job's variables with a checkpoint's variables.

    Raises `CheckpointError` if a name of the map is unknown, a shape differs, or nothing matches.
    """
    specs, own = _without_model_name(specs)
    saved, others = _without_model_name(specs_in(read_manifest(folder)))
    renamed = {new.removeprefix(own): old.removeprefix(others) for new, old in read_init_map(init_map).items()}
    taken = _matched([spec.path for spec in specs], [spec.path for spec in saved], folder, renamed)
    misfits = {new: old for new, old in taken.items() if not _fits(specs[new], saved[old])}
    if misfits:
        shown = "; ".join(
            f"{specs[new].path!r} is {_shape(specs[new])} in the model, and {_shape(saved[old])} in the checkpoint"
            + ("" if specs[new].path == saved[old].path else f" ({saved[old].path!r})")
            for new, old in list(misfits.items())[:_SHOWN]
        )
        kept = [each for each in (init_map, *(f"{specs[new].path}=" for new in misfits)) if each]
        raise CheckpointError(
            f"init_from={folder}: variables differ in shape or type: {shown}. To initialize them from scratch, add "
            f'init_map "{",".join(kept)}"; or use the shapes of the checkpoint.'
        )
    return WarmStart(folder, specs, saved, taken)


def _without_model_name(specs: Sequence[VariableSpec]) -> tuple[list[VariableSpec], str]:
    """Variables by path without the common prefix of all layers, and the prefix: Keras numbers Sequential and
    subclassed models in names ("sequential_2/hidden/kernel")."""
    heads = {spec.path.partition("/")[0] for spec in specs}
    if len(heads) > 1 or any(spec.path.count("/") < 2 for spec in specs):
        return list(specs), ""
    name = f"{heads.pop()}/" if heads else ""
    return [replace(spec, path=spec.path.removeprefix(name)) for spec in specs], name


def _fits(new: VariableSpec, old: VariableSpec) -> bool:
    if not np.can_cast(dtype_of(old.dtype), dtype_of(new.dtype), "same_kind"):
        return False
    if not new.table and not old.table:
        return new.shape == old.shape
    # For a table, only rows by id matter: there may be more ids than in the checkpoint. 0 means any number of ids.
    more_ids = not new.rows or 0 < old.rows <= new.rows
    return bool(len(new.shape) == len(old.shape) == 2) and new.shape[1:] == old.shape[1:] and more_ids


def _shape(spec: VariableSpec) -> str:
    sizes = ["any" if spec.table and not index and not size else str(size) for index, size in enumerate(spec.shape)]
    return f"{spec.dtype}[{', '.join(sizes)}]"


def _matched(
    model: Sequence[str], checkpoint: Sequence[str], folder: Path, renamed: Mapping[str, str]
) -> dict[int, int]:
    """The variable of the checkpoint in `folder` for each of the model's, by their paths. Equal paths are matched in
    order; several variables may be mapped to the same."""
    problems = [
        *(_unknown(new, model, "model") for new in renamed),
        *(_unknown(old, checkpoint, f"checkpoint {folder}") for old in renamed.values() if old),
    ]
    if any(problems):
        raise CheckpointError("init_map: " + " ".join(filter(None, problems)))
    places: dict[str, list[int]] = {}
    for index, path in enumerate(checkpoint):
        places.setdefault(path, []).append(index)
    taken, seen, idle = {}, Counter[str](), {new: old for new, old in renamed.items() if old}
    for index, path in enumerate(model):
        name = _name_for(path, renamed)
        old = path if name is None else renamed[name] and renamed[name] + path[len(name) :]
        found, seen[path] = places.get(old, [])[seen[path] :], seen[path] + 1
        if found:
            taken[index] = found[0]
            idle.pop(name or "", None)
    if idle:
        listed = ", ".join(f"{new}={old}" for new, old in idle.items())
        raise CheckpointError(
            f"init_map: {listed}: no variable of the checkpoint has the name that a variable of the model gets by "
            "this. Expected NEW=OLD of two layers with variables of the same names, or of two variables. Correct it, "
            "or remove it."
        )
    if not taken:
        raise CheckpointError(
            f"init_from={folder}: the checkpoint contains no variable of the model. The model has {_some(model)}; "
            f"the checkpoint has {_some(checkpoint)}. Give layers the same names, or map their names: init_map "
            "NEW=OLD."
        )
    return taken


def _unknown(name: str, paths: Sequence[str], where: str) -> str:
    if any(path == name or path.startswith(f"{name}/") for path in paths):
        return ""
    layers = [path.rpartition("/")[0] for path in paths]
    near = difflib.get_close_matches(name, [*paths, *dict.fromkeys(layers)], 1)
    hint = f"Is it {near[0]!r}?" if near else f"It has {_some(paths)}."
    return f"The {where} has no variable or layer {name!r}. {hint}"


def _name_for(path: str, renamed: Mapping[str, str]) -> str | None:
    """The longest name that applies to a variable of the model; None: there is none."""
    name = path
    while name and name not in renamed:
        name = name.rpartition("/")[0]
    return name or None


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return (", ".join(names[:_SHOWN]) or "nothing") + more
