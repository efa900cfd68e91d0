"""The folders of checkpoints: one for each version (`version-00000100`).

The master makes a folder with a temporary name, each server writes its file into it (parts.py), the master writes the
manifest (manifest.py) and renames the folder. A folder without a manifest is no checkpoint.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from elasticcb.checkpoint.manifest import MANIFEST, read_manifest, verify, write_manifest
from elasticcb.checkpoint.shard_file import SavedFile
from elasticcb.errors import CheckpointError
from elasticcb.sharding.bucket_map import BucketMap
from elasticcb.sharding.partition import Slice, VariableSpec
from elasticcb.storage import durable
from elasticcb.storage.durable import TEMPORARY

_VERSION_FOLDER = re.compile(r"version-(\d{8,})")
_OLD = "-old"  # behind the name of an unfinished folder: what it is about to replace


def version_folder(version: int) -> str:
    return f"version-{version:08d}"


def begin_version(directory: str | Path, version: int) -> Path:
    """Makes the empty temporary folder that the servers write version `version` into.

    Each has a name of its own, since a server may still write what an earlier one was made for.
    """
    folder = Path(directory) / f"{TEMPORARY}{version_folder(version)}-{secrets.token_hex(4)}"
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise CheckpointError(
            f"The checkpoint folder {folder} can't be made: {error}. Check --checkpoint_dir."
        ) from error
    return folder


def finish_version(
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
    final = folder.parent / version_folder(version)
    try:
        write_manifest(folder, version=version, specs=specs, parts=parts, files=files, buckets=buckets, extra=extra)
        durable.sync(folder)
        old = folder.with_name(f"{folder.name}{_OLD}")  # as unfinished: `prune` removes it
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
    """Gives a version its name again that was about to be replaced when its job was killed. For who owns the folder."""
    for old in Path(directory).glob(f"{TEMPORARY}version-*{_OLD}"):
        match = _VERSION_FOLDER.match(old.name.removeprefix(TEMPORARY))
        if match is not None and not (old.parent / match[0]).exists():
            with contextlib.suppress(OSError):
                old.rename(old.parent / match[0])


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


def newest_of_run(directory: str | Path, run: str) -> str:
    """The newest undamaged version in `directory` that a certain training has written; "": there is none."""
    for folder in reversed(find_versions(directory)):
        with contextlib.suppress(CheckpointError):
            if read_manifest(folder).get("extra", {}).get("run") == run:
                verify(folder)
                return str(folder)
    return ""


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
    old += [path for path in Path(directory).glob(f"{TEMPORARY}version-*") if path.is_dir()]
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
