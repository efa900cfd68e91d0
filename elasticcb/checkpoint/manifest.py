"""The manifest of a snapshot: its variables, and each server's files with sizes and SHA-256.

Of a checkpoint, a server has one file; of what a lost server is restored from, later files with changes may follow.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from elasticcb.checkpoint.shard_file import SavedFile, check_file
from elasticcb.errors import CheckpointError
from elasticcb.sharding.partition import ShardMap, Slice, VariableSpec
from elasticcb.storage import durable

MANIFEST = "manifest.json"
_FORMAT = 4  # 1: rows were spread over the files in other ways; 2: each server had one file; 3: other names of slots

_FILE = {"name": str, "bytes": int, "sha256": str, "version": int}
_SHAPE = {
    "version": int,
    "variables": [{"path": str, "shape": [int], "dtype": str, "trainable": bool}],
    "servers": [{"slices": [[int]], "files": [_FILE]}],
    "extra": dict,
}


def write_manifest(folder: Path, mode: int = durable.SHARED, **content: Any) -> None:
    """Writes the manifest of the files in `folder`; `content` as of `manifest_of`, `mode` as of `durable.write`. Raises
    `OSError`."""
    durable.write(folder / MANIFEST, manifest_of(**content), mode)


def manifest_of(
    *,
    version: int,
    specs: Sequence[VariableSpec],
    parts: Sequence[Sequence[Slice]],
    files: Sequence[Sequence[SavedFile]],
    extra: Mapping[str, Any] | None = None,
) -> bytes:
    """The content of a manifest, for `manifest_in`.

    Args:
        parts: each server's slices.
        files: each server's: one with everything, then those with later changes.
    """
    manifest = {
        "format": _FORMAT,
        "version": version,
        "variables": [_described(spec) for spec in specs],
        "servers": [
            {"slices": [list(part) for part in slices], "files": [dataclasses.asdict(saved) for saved in own]}
            for own, slices in zip(files, parts, strict=True)
        ],
        "extra": dict(extra or {}),
    }
    return durable.document_of(manifest)


class WrittenPart(NamedTuple):
    """What one server has written: slices of variables, and its files in the order in which they were written."""

    slices: list[Slice]
    files: list[SavedFile]


def written_parts(manifest: Mapping[str, Any], folder: Path) -> list[WrittenPart]:
    """What each server has written, by its index. Raises `CheckpointError` if the manifest of `folder` is damaged."""
    try:
        return [
            WrittenPart([Slice(*part) for part in each["slices"]], [SavedFile.of(file) for file in each["files"]])
            for each in manifest["servers"]
        ]
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"The manifest {folder / MANIFEST} can't be read: {error!r}.") from error


def file_names(manifest: Mapping[str, Any], folder: str | Path) -> list[str]:
    """The names of all files. Raises `CheckpointError` if the manifest of `folder` is damaged or names a file outside
    of it."""
    names = [saved.name for part in written_parts(manifest, Path(folder)) for saved in part.files]
    for name in names:
        if Path(name).name != name:
            raise CheckpointError(f"The manifest of {folder} lists the file {name!r}, which is outside of its folder.")
    return names


def map_in(manifest: Mapping[str, Any]) -> ShardMap:
    """The map by which the rows of tables are spread over the servers."""
    return ShardMap(len(manifest["servers"]))


def read_manifest(folder: str | Path) -> dict[str, Any]:
    """The manifest of a snapshot. Raises `CheckpointError` if there is no readable manifest."""
    path = Path(folder) / MANIFEST
    try:
        return manifest_in(path.read_bytes(), path)
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder} is not a complete checkpoint: it has no {MANIFEST}. Either it was not finished, or it is "
            "another folder. Pass the folder of a version, or the folder that contains the versions."
        ) from None
    except OSError as error:
        raise CheckpointError(f"The manifest {path} can't be read: {error}.") from error


def manifest_in(content: bytes, path: Path | str) -> dict[str, Any]:
    """The manifest in the content of the file at `path`. Raises `CheckpointError` if it can't be read."""
    try:
        manifest = durable.document_in(content, path, _FORMAT)
    except durable.NewerFormatError as error:
        raise CheckpointError(str(error)) from error
    except ValueError as error:
        raise CheckpointError(f"The manifest {path} can't be read: {error}.") from error
    if manifest.get("format") != _FORMAT:
        raise CheckpointError(
            f"{path} has the format {manifest.get('format')} of an earlier release of ElasticCB; this release reads "
            f"the format {_FORMAT}. Use that release."
        )
    if wrong := durable.misfit(manifest, _SHAPE):
        raise CheckpointError(f"The manifest {path} can't be read: {wrong} is missing, or of another type.")
    return manifest


def specs_in(manifest: Mapping[str, Any]) -> list[VariableSpec]:
    """The variables of a snapshot."""
    return [
        VariableSpec(each["path"], tuple(each["shape"]), each["dtype"], each["trainable"], table=each.get("table", ""))
        for each in manifest["variables"]
    ]


def verify(version_directory: str | Path) -> dict[str, Any]:
    """Verifies all files of a version and returns the manifest.

    Raises a `CheckpointError` that names the first missing or damaged file.
    """
    folder = Path(version_directory)
    manifest = read_manifest(folder)
    for part in written_parts(manifest, folder):
        for saved in part.files:
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
            "init_from."
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
