"""The manifest of a checkpoint: its variables, and its files with sizes and SHA-256."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from elasticcb.checkpoint.shard_file import SavedFile, check_file
from elasticcb.errors import CheckpointError
from elasticcb.sharding.partition import Slice, VariableSpec
from elasticcb.sharding.shard_map import ShardMap
from elasticcb.storage import durable

MANIFEST = "manifest.json"
_FORMAT = 2  # 1: rows were spread over the files in other ways


def write_manifest(
    folder: Path,
    *,
    version: int,
    specs: Sequence[VariableSpec],
    parts: Sequence[Sequence[Slice]],
    files: Sequence[SavedFile],
    extra: Mapping[str, Any] | None,
) -> None:
    """Writes the manifest of the files in `folder`; arguments as for `versions.finish_version`. Raises `OSError`."""
    manifest = {
        "format": _FORMAT,
        "version": version,
        "variables": [_described(spec) for spec in specs],
        "files": [
            dataclasses.asdict(saved) | {"slices": [list(part) for part in slices]}
            for saved, slices in zip(files, parts, strict=True)
        ],
        "extra": dict(extra or {}),
    }
    durable.write_document(folder / MANIFEST, manifest, mode=durable.SHARED)


def map_in(manifest: Mapping[str, Any]) -> ShardMap | None:
    """The map by which the rows of tables are spread over the files; None: unknown."""
    return ShardMap(len(manifest["files"])) if manifest["format"] == _FORMAT else None


def read_manifest(folder: str | Path) -> dict[str, Any]:
    """The manifest of a version. Raises `CheckpointError` if there is no readable manifest."""
    path = Path(folder) / MANIFEST
    try:
        return durable.read_document(path, _FORMAT)
    except durable.NewerFormatError as error:
        raise CheckpointError(str(error)) from error
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder} is not a complete checkpoint: it has no {MANIFEST}. Either it was not finished, or it is "
            "another folder. Pass the folder of a version, or the folder that contains the versions."
        ) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"The manifest {path} can't be read: {error}.") from error


def verify(version_directory: str | Path) -> dict[str, Any]:
    """Verifies all files of a version and returns the manifest.

    Raises a `CheckpointError` that names the first missing or damaged file.
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
    """Raises a `CheckpointError` with the differences if the checkpoint's variables are not `specs`."""
    saved = manifest["variables"]
    given = [_described(spec) for spec in specs]
    differences = []
    for place in range(max(len(saved), len(given))):
        old = saved[place] if place < len(saved) else None
        new = given[place] if place < len(given) else None
        # Keras numbers layers per process, so a path may differ even if shape and dtype agree.
        if old is None or new is None or _comparable(old) != _comparable(new):
            differences.append(f"variable {place}: {_shown(old)} in the checkpoint, {_shown(new)} in the model")
    if differences:
        more = f" and {len(differences) - 5} more" if len(differences) > 5 else ""
        raise CheckpointError(
            f"The checkpoint {folder} belongs to another model: {'; '.join(differences[:5])}{more}. Use the model "
            "that wrote it, with the same parameters. To initialize another model from matching variables, use "
            "--init_from."
        )


def _comparable(variable: Mapping[str, Any]) -> dict[str, Any]:
    """Without the path and a table's initializer; but a table differs from a dense variable."""
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
