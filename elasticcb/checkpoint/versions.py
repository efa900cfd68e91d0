"""The folders of checkpoints: one for each version (`version-00000100`).

The master creates a folder with a temporary name, each server writes its file into it (parts.py), and the master writes
the manifest (manifest.py) and renames the folder. A folder without a manifest is not a checkpoint.
"""

from __future__ import annotations

import contextlib
import logging
import re
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from elasticcb.checkpoint.manifest import MANIFEST, read_manifest, verify, write_manifest
from elasticcb.checkpoint.shard_file import SavedFile
from elasticcb.errors import CheckpointError, StoreError
from elasticcb.sharding.partition import Slice, VariableSpec
from elasticcb.storage import durable
from elasticcb.storage.durable import TEMPORARY

logger = logging.getLogger(__name__)

_VERSION_FOLDER = re.compile(r"version-(\d{8,})")
_OLD = "-old"  # suffix of a version that is about to be replaced


def version_folder(version: int) -> str:
    return f"version-{version:08d}"


def version_of(name: str) -> int:
    """The version in a folder of this name; -1: the name is not one of `version_folder`."""
    match = _VERSION_FOLDER.fullmatch(name)
    return int(match[1]) if match else -1


def server_file(index: int, num_ps: int, suffix: str = "") -> str:
    """The name of a server's file in the folder of a version."""
    return f"server-{index:05d}-of-{num_ps:05d}{suffix}.safetensors"


def begin_version(directory: str | Path, version: int) -> Path:
    """Creates the empty temporary folder for version `version`, to which the servers write.

    Each has a unique name, because a server may still be writing to an earlier one.
    """
    folder = Path(directory) / f"{TEMPORARY}{version_folder(version)}-{secrets.token_hex(4)}"
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise CheckpointError(
            f"The checkpoint folder {folder} can't be created: {error}. Check checkpoint_dir."
        ) from error
    return folder


def finish_version(
    folder: str | Path,
    *,
    version: int,
    specs: Sequence[VariableSpec],
    parts: Sequence[Sequence[Slice]],
    files: Sequence[SavedFile],
    extra: Mapping[str, Any] | None = None,
) -> Path:
    """Finishes a temporary folder of `begin_version`: checks its files, writes the manifest, renames it.

    Returns the folder's final path. Raises `CheckpointError` if a file does not match the server's report.
    """
    folder = Path(folder)
    for saved in files:
        path = folder / saved.name
        if not path.is_file() or path.stat().st_size != saved.bytes:
            raise CheckpointError(
                f"A parameter server wrote {saved.bytes} bytes to {path}, but the master does not see them. All "
                "processes of the job must share the checkpoint folder."
            )
    final = folder.parent / version_folder(version)
    try:
        write_manifest(folder, version=version, specs=specs, parts=parts, files=[[each] for each in files], extra=extra)
        durable.sync(folder)
        old = folder.with_name(f"{folder.name}{_OLD}")  # named as unfinished, so that `prune` removes it
        if final.exists():  # the same version, written again after a restart
            final.rename(old)
        try:
            folder.rename(final)
        except OSError:
            if old.exists():
                old.rename(final)
            raise
        shutil.rmtree(old, ignore_errors=True)
        durable.sync(folder.parent)
    except OSError as error:
        raise CheckpointError(f"The checkpoint {final} can't be finished: {error}.") from error
    return final


def put_back(directory: str | Path) -> None:
    """Restores the name of a version that was about to be replaced when its job was killed. Only for the folder's
    owner."""
    for old in Path(directory).glob(f"{TEMPORARY}version-*{_OLD}"):
        match = _VERSION_FOLDER.match(old.name.removeprefix(TEMPORARY))
        if match is not None and not (old.parent / match[0]).exists():
            with contextlib.suppress(OSError):
                old.rename(old.parent / match[0])


def find_versions(directory: str | Path) -> list[Path]:
    """The folders of all complete versions in `directory`, oldest first."""
    found = []
    if Path(directory).is_dir():
        for folder in Path(directory).iterdir():
            if version_of(folder.name) >= 0 and (folder / MANIFEST).is_file():
                found.append(folder)
    return sorted(found, key=lambda folder: version_of(folder.name))


def find_latest(directory: str | Path) -> Path:
    """The newest complete version in `directory`, which may itself be the folder of a version. Its files are not
    checked.

    Raises `CheckpointError` when there is none.
    """
    if (Path(directory) / MANIFEST).is_file():
        return Path(directory)
    return _finished_versions(directory)[-1]


def find_undamaged(directory: str | Path) -> tuple[Path, Sequence[str]]:
    """The newest version in `directory` with undamaged files, and the newer ones, each with its fault.

    It reads all files of the version to check their SHA-256; servers repeat that when they load it.

    Args:
        directory: a folder of versions; or the folder of one version, which is returned unchecked, because it has no
            alternative, and loading it reports damage.

    Raises `CheckpointError` if there is none; the message lists each version with its fault.
    """
    if (Path(directory) / MANIFEST).is_file():
        return Path(directory), ()

    def checked(name: str) -> Path:
        folder = Path(directory) / name
        verify(folder)
        return folder

    return newest_usable([folder.name for folder in _finished_versions(directory)], checked, directory)


def newest_of_run(directory: str | Path, run: str) -> str:
    """The newest undamaged version in `directory` that a given training wrote; "": none. Logs what it skips."""
    for folder in reversed(find_versions(directory)):
        try:
            if read_manifest(folder)["extra"].get("run") == run:
                verify(folder)
                return str(folder)
        except CheckpointError as error:
            logger.warning("Skipped %s: %s", folder.name, error)
    return ""


def _run_of(folder: Path) -> str:
    """The training that wrote a version; "": unknown."""
    with contextlib.suppress(CheckpointError):
        return str(read_manifest(folder)["extra"].get("run", ""))
    return ""


def newest_usable(
    versions: Sequence[str], checked: Callable[[str], Path], directory: str | Path
) -> tuple[Path, Sequence[str]]:
    """The folder of the newest version that `checked` accepts, and the newer ones, each with its fault.

    Args:
        checked: returns the local folder of a version; raises `CheckpointError` if it is damaged, and `StoreError` if
            that is not known.

    Raises `CheckpointError` if there is none; the message lists each version with its fault.
    """
    faults: list[str] = []
    for name in reversed(versions):
        try:
            return checked(name), [f"Skipped {fault}" for fault in faults]
        except StoreError:
            raise
        except CheckpointError as error:
            faults.append(f"{name}: {error}")
    raise CheckpointError(
        f"No checkpoint in {directory} can be used. Choose another folder, or start without a checkpoint.\n"
        + "\n".join(faults)
    )


def _finished_versions(directory: str | Path) -> list[Path]:
    """Like `find_versions`. Raises `CheckpointError` if there is none."""
    versions = find_versions(directory)
    if not versions:
        raise no_checkpoint_in(directory)
    return versions


def no_checkpoint_in(place: str | Path) -> CheckpointError:
    """The error for a folder or URL without a complete version."""
    return CheckpointError(
        f"There is no complete checkpoint in {place}. Expected a folder version-… with a {MANIFEST}. Those of a job "
        "are in the folder model of its folder, or in its --checkpoint_dir."
    )


def prune(directory: str | Path, keep_max: int, run: str = "") -> list[Path]:
    """Deletes all but the newest `keep_max` versions (0: all stay), those of other trainings than `run` ("": any), and
    unfinished leftovers; returns what was deleted.

    The last written version is kept as well (a job that started from an older one has unwanted newer ones), and links.
    """
    versions = [folder for folder in find_versions(directory) if not folder.is_symlink()]
    foreign = [folder for folder in versions if run and _run_of(folder) not in ("", run)]
    versions = [folder for folder in versions if folder not in foreign]
    last = max(versions, key=_finished_at, default=None)
    old = [folder for folder in versions[:-keep_max] if folder != last] if keep_max > 0 else []
    unfinished = Path(directory).glob(f"{TEMPORARY}version-*")
    old += [*foreign, *(path for path in unfinished if path.is_dir() and not path.is_symlink())]
    for folder in old:
        # Without its manifest, a partly deleted folder is not a checkpoint.
        with contextlib.suppress(OSError):
            (folder / MANIFEST).unlink(missing_ok=True)
            shutil.rmtree(folder, ignore_errors=True)
    return old


def _finished_at(folder: Path) -> int:
    try:
        return (folder / MANIFEST).stat().st_mtime_ns
    except OSError:  # deleted meanwhile
        return 0
