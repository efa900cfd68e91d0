"""Checkpoints: one safetensors file per server and a manifest, which do not depend on how many servers
read them.

A folder of checkpoints holds a folder per version (`version-00000100`). The master makes a folder
with a temporary name, each server writes its file into it, the master writes the manifest and renames
the folder. A folder without a manifest is no checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from elasticcb.checkpoint.shard_file import FORMAT, Key, Part, SavedFile, check_file, write_part
from elasticcb.errors import CheckpointError
from elasticcb.rpc.tensors import dtype_of
from elasticcb.sharding import table_state
from elasticcb.sharding.bucket_map import BucketMap, even
from elasticcb.sharding.partition import Slice, VariableSpec
from elasticcb.sharding.table_state import TableState

Array = npt.NDArray[Any]

MANIFEST = "manifest.json"
_VERSION_FOLDER = re.compile(r"version-(\d{8,})")
_TEMPORARY = ".tmp-"


# ------------------------------------------------------------------ a server's side


def save_part(directory: str | Path, part: Part, slices: Sequence[Slice], index: int, num_ps: int) -> SavedFile:
    """Writes one server's file into `directory`, which exists.

    Args:
        part: what to write.
        slices: of which parts of the variables, of this server.
        index, num_ps: the server's place, and how many there are.

    Raises `CheckpointError` when it can't be written.
    """
    slices_held = json.dumps([list(part) for part in slices])
    return write_part(Path(directory) / f"server-{index:05d}-of-{num_ps:05d}.safetensors", part, slices=slices_held)


def load_slices(
    version_directory: str | Path,
    specs: Sequence[VariableSpec],
    slices: Sequence[Slice],
    index: int = 0,
    buckets: BucketMap | None = None,
) -> Part:
    """What a server that holds `slices` needs of a checkpoint, whichever servers wrote it.

    Args:
        version_directory: the folder of one version.
        specs: the model's variables now; they must be those of the checkpoint.
        slices: what to load.
        index: of this server; scalars come from the same place when there were as many servers.
        buckets: which rows of embedding tables each server holds; None: there is one server.

    Raises `CheckpointError` when files are missing or damaged, or belong to another model.
    """
    folder = Path(version_directory)
    manifest = read_manifest(folder)
    check_variables(manifest, specs, folder)
    parts = {part.variable: _Assembly(part, specs[part.variable]) for part in slices}
    result = Part(version=int(manifest["version"]))
    extras_seen: dict[Key, Array] = {}
    files = manifest["files"]
    buckets = buckets or even(1)
    scalars_from = index if len(files) == buckets.servers else 0
    same_buckets = len(files) == buckets.servers and manifest.get("buckets") == buckets.to_bytes().hex()
    tables: dict[int, list[TableState]] = {
        number: [] for number, variable in enumerate(manifest["variables"]) if variable.get("table")
    }
    for place, saved in enumerate(files):
        held = [Slice(*part) for part in saved["slices"]]
        wanted = [part for part in held if part.variable in parts and parts[part.variable].overlaps(part)]
        has_ids = bool(tables) and (place == index or not same_buckets)
        if not wanted and place != scalars_from and not has_ids:
            continue
        path = folder / saved["name"]
        try:
            check_file(path, SavedFile.of(saved))
        except CheckpointError as error:
            raise CheckpointError(f"{error} Start from another version.") from error
        try:
            with safe_open(path, framework="np") as file:
                names = list(file.keys())
                own = {name: file.get_tensor(name) for name in names if has_ids and name.startswith("table/")}
                for number, state in table_state.from_tensors(own).items():
                    tables[number].append(state.part(index, buckets))
                by_variable = _by_variable(names)
                for part in wanted:
                    assembly = parts[part.variable]
                    for name, slot in by_variable.get(part.variable, []):
                        if name.startswith("extra/"):
                            extras_seen[part.variable, slot] = file.get_tensor(name)
                        else:
                            assembly.fill(slot, part, file, name)
                if place == scalars_from:
                    result.optimizer = (file.metadata() or {}).get("optimizer", "")
                    result.shared = {
                        name.partition("/")[2]: file.get_tensor(name) for name in names if name.startswith("shared/")
                    }
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"The checkpoint file {path} can't be read: {error}.") from error
    result.tables = {number: table_state.joined(states) for number, states in tables.items() if states}
    for variable, assembly in parts.items():
        for slot, array in assembly.arrays.items():
            missing = assembly.slice.elements - assembly.filled[slot]
            if missing:
                raise CheckpointError(
                    f"The checkpoint {folder} lacks {missing} elements of {slot or 'the weights'} of "
                    f"{specs[variable].path!r}."
                )
            if slot:
                result.slots[variable, slot] = array
            else:
                result.weights[variable] = array
        if variable not in result.weights:
            raise CheckpointError(f"The checkpoint {folder} lacks the weights of {specs[variable].path!r}.")
    result.extras = extras_seen
    return result


class _Assembly:
    """One variable's wanted slice, put together from the slices of the files."""

    def __init__(self, part: Slice, spec: VariableSpec) -> None:
        self.slice, self._spec = part, spec
        self.arrays: dict[str, Array] = {}  # by slot; "" is the weight itself
        self.filled: dict[str, int] = {}

    def overlaps(self, held: Slice) -> bool:
        if not self.slice.elements:
            return True
        return held.start < self.slice.stop and self.slice.start < held.stop

    def fill(self, slot: str, held: Slice, file: Any, name: str) -> None:
        first, last = self.slice.row_range(self._spec)
        held_first, held_last = held.row_range(self._spec)
        start, stop = max(first, held_first), min(last, held_last)
        if held == self.slice:
            array = file.get_tensor(name)
            self.arrays[slot] = np.array(array).reshape(self.slice.shape(self._spec))
            self.filled[slot] = self.slice.elements
            return
        if slot not in self.arrays:
            self.arrays[slot] = np.empty(self.slice.shape(self._spec), _dtype(file, name))
            self.filled[slot] = 0
        if start < stop:
            rows = file.get_slice(name)[start - held_first : stop - held_first]
            self.arrays[slot][start - first : stop - first] = rows
            self.filled[slot] += (stop - start) * self._spec.row_elements


def _dtype(file: Any, name: str) -> np.dtype[Any]:
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
        if kind in ("weight", "slot", "extra"):
            variable, _, slot = rest.partition("/")
            found.setdefault(int(variable), []).append((name, slot))
    return found


# ------------------------------------------------------------------ the master's side


def version_folder(version: int) -> str:
    return f"version-{version:08d}"


def begin_version(directory: str | Path, version: int) -> Path:
    """Makes the empty temporary folder that the servers write version `version` into.

    Each has a name of its own, since a server may still write what an earlier one was made for.
    """
    folder = Path(directory) / f"{_TEMPORARY}{version_folder(version)}-{secrets.token_hex(4)}"
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise CheckpointError(
            f"The checkpoint folder {folder} can't be made: {error}. Check --checkpoint_dir."
        ) from error
    return folder


def abandon_version(folder: str | Path) -> None:
    """Removes what `begin_version` made, and what is in it."""
    shutil.rmtree(folder, ignore_errors=True)


def write_manifest(
    folder: str | Path,
    *,
    version: int,
    specs: Sequence[VariableSpec],
    parts: Sequence[Sequence[Slice]],
    files: Sequence[SavedFile],
    buckets: BucketMap | None = None,
    extra: Mapping[str, Any] | None = None,
) -> Path:
    """Makes a temporary folder of `begin_version` valid: checks its files, writes the manifest, renames it.

    Args:
        version: of the model.
        specs: the model's variables.
        parts: what each server holds, as `partition` gives it.
        files: what each server's `Save` answered, in the order of the servers.
        buckets: by which the servers hold rows of embedding tables; None: as nobody knows.
        extra: what else the master wants to keep, as JSON: the task queue, the epoch.

    Returns the folder's final path. Raises `CheckpointError` when a file is not as the server said.
    """
    folder = Path(folder)
    for saved in files:
        path = folder / saved.name
        if not path.is_file() or path.stat().st_size != saved.bytes:
            raise CheckpointError(
                f"A parameter server wrote {saved.bytes} bytes to {path}, but the master does not see them. "
                "The checkpoint folder must be one that all processes of the job share."
            )
    manifest = {
        "format": FORMAT,
        "version": version,
        "variables": [_described(spec) for spec in specs],
        "files": [
            {
                "name": saved.name,
                "bytes": saved.bytes,
                "sha256": saved.sha256,
                "slices": [list(part) for part in slices],
            }
            for saved, slices in zip(files, parts, strict=True)
        ],
        "extra": dict(extra or {}),
    } | ({} if buckets is None else {"buckets": buckets.to_bytes().hex()})
    final = folder.parent / version_folder(version)
    try:
        unfinished = folder / (_TEMPORARY + MANIFEST)
        with unfinished.open("w", encoding="utf-8") as file:
            json.dump(manifest, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        unfinished.rename(folder / MANIFEST)
        if final.exists():  # the same version, written again after a restart
            shutil.rmtree(final)
        folder.rename(final)
        _sync_folder(folder.parent)
    except OSError as error:
        raise CheckpointError(f"The checkpoint {final} can't be finished: {error}.") from error
    return final


def read_manifest(folder: str | Path) -> dict[str, Any]:
    """The manifest of one version. Raises `CheckpointError` when there is none that can be read."""
    path = Path(folder) / MANIFEST
    try:
        manifest: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if manifest["format"] != FORMAT:
            raise CheckpointError(
                f"The checkpoint {folder} has the format {manifest['format']}; this release reads {FORMAT}."
            )
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder} is no whole checkpoint: it has no {MANIFEST}. It was not finished, or it is another "
            "folder; name the folder of a version, or the one that holds the versions."
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"The manifest {path} can't be read: {error!r}.") from error
    return manifest


def find_versions(directory: str | Path) -> list[Path]:
    """The folders of all whole versions in `directory`, oldest first."""
    found = []
    if Path(directory).is_dir():
        for folder in Path(directory).iterdir():
            match = _VERSION_FOLDER.fullmatch(folder.name)
            if match and (folder / MANIFEST).is_file():
                found.append((int(match[1]), folder))
    return [folder for _, folder in sorted(found)]


def find_latest(directory: str | Path) -> Path:
    """The newest finished version in `directory`, which may also be the folder of a version itself. Its files are
    not looked at.

    Raises `CheckpointError` when there is none.
    """
    if (Path(directory) / MANIFEST).is_file():
        return Path(directory)
    return _finished_versions(directory)[-1]


def find_undamaged(directory: str | Path, warn: Callable[[str], None]) -> Path:
    """The newest version in `directory` whose files are all as they were written.

    It reads all files of the version through, for their SHA-256; servers do that again when they load it.

    Args:
        directory: a folder of versions; or that of one version, which is taken as it is, unread: nothing could take
            its place, and loading it tells what is damaged.
        warn: is told of each version passed over, and what is wrong with it.

    Raises `CheckpointError` when there is none: it names each version with its fault.
    """
    if (Path(directory) / MANIFEST).is_file():
        return Path(directory)

    def checked(name: str) -> Path:
        folder = Path(directory) / name
        verify(folder)
        return folder

    return newest_usable([folder.name for folder in _finished_versions(directory)], checked, directory, warn)


def newest_usable(
    versions: Sequence[str], checked: Callable[[str], Path], directory: str | Path, warn: Callable[[str], None]
) -> Path:
    """The folder of the newest version that `checked` takes.

    Args:
        versions: names, oldest first.
        checked: the folder of a version on a disk; raises `CheckpointError` when it is damaged.
        directory: that holds them, for the error.
        warn: as of `find_undamaged`.

    Raises `CheckpointError` when there is none: it names each version with its fault.
    """
    faults = []
    for name in reversed(versions):
        try:
            folder = checked(name)
        except CheckpointError as error:
            faults.append(f"{name}: {error}")
            continue
        for fault in faults:
            warn(f"Passed over {fault}")
        return folder
    raise CheckpointError(
        f"No checkpoint in {directory} can be used. Name another folder, or begin without one.\n" + "\n".join(faults)
    )


def _finished_versions(directory: str | Path) -> list[Path]:
    """As `find_versions`. Raises `CheckpointError` when there is none."""
    versions = find_versions(directory)
    if not versions:
        raise CheckpointError(
            f"There is no whole checkpoint in {directory}: a folder version-… with a {MANIFEST} was expected."
        )
    return versions


def prune(directory: str | Path, keep_max: int) -> list[Path]:
    """Deletes all but the newest `keep_max` versions (0: none) and unfinished leftovers; what was deleted.

    The one that was written last stays, too: a job that began from an older version has damaged or unwanted ones
    above it.
    """
    versions = find_versions(directory)
    last = max(versions, key=_finished_at, default=None)
    old = [folder for folder in versions[:-keep_max] if folder != last] if keep_max > 0 else []
    old += [path for path in Path(directory).glob(f"{_TEMPORARY}version-*") if path.is_dir()]
    for folder in old:
        # Without its manifest a folder that is half deleted is no checkpoint.
        with contextlib.suppress(OSError):
            (folder / MANIFEST).unlink(missing_ok=True)
            shutil.rmtree(folder, ignore_errors=True)
    return old


def _finished_at(folder: Path) -> int:
    try:
        return (folder / MANIFEST).stat().st_mtime_ns
    except OSError:  # deleted meanwhile
        return 0


def verify(version_directory: str | Path) -> dict[str, Any]:
    """Reads all files of a version through and gives back the manifest.

    Raises `CheckpointError` that names the first missing or damaged file.
    """
    folder = Path(version_directory)
    manifest = read_manifest(folder)
    try:
        files = [SavedFile.of(saved) for saved in manifest["files"]]
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"The manifest {folder / MANIFEST} can't be read: {error!r}.") from error
    for saved in files:
        check_file(folder / saved.name, saved)
    return manifest


def check_variables(manifest: Mapping[str, Any], specs: Sequence[VariableSpec], folder: str | Path) -> None:
    """Raises `CheckpointError` when the checkpoint's variables are not `specs`: names the differences."""
    saved = manifest["variables"]
    given = [_described(spec) for spec in specs]
    differences = []
    for place in range(max(len(saved), len(given))):
        old = saved[place] if place < len(saved) else None
        new = given[place] if place < len(given) else None
        # Keras numbers layers per process, so a path may differ where shape and dtype do not.
        if old is None or new is None or _comparable(old) != _comparable(new):
            differences.append(f"variable {place}: {_shown(old)} in the checkpoint, {_shown(new)} in the model")
    if differences:
        more = f" and {len(differences) - 5} more" if len(differences) > 5 else ""
        raise CheckpointError(
            f"The checkpoint {folder} is of another model: {'; '.join(differences[:5])}{more}. Use the model "
            "that wrote it (same --model_def and --model_params)."
        )


def _comparable(variable: Mapping[str, Any]) -> dict[str, Any]:
    """Without the path, and how a table's first rows are made; but a table is no dense variable."""
    return {**variable, "path": "", "table": bool(variable.get("table"))}


def _described(spec: VariableSpec) -> dict[str, Any]:
    described = {"path": spec.path, "shape": list(spec.shape), "dtype": spec.dtype, "trainable": spec.trainable}
    return described | ({"table": spec.table} if spec.table else {})


def _shown(variable: Mapping[str, Any] | None) -> str:
    if variable is None:
        return "none"
    kind = "" if variable["trainable"] else " (not trainable)"
    kind += " (embedding table)" if variable.get("table") else ""
    return f"{variable['path']!r} {variable['dtype']}{variable['shape']}{kind}"


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
