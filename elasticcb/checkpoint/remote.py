"""Checkpoints on a remote file system, where renames are not reliable.

A version consists of the same files as on disk (versions.py). Its manifest is written last and deleted first: a folder
without a manifest is not a checkpoint. To read a version, it is copied to disk, and each file's SHA-256 is checked
there.
"""

from __future__ import annotations

import contextlib
import json
import logging
import posixpath
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from elasticcb.checkpoint.manifest import MANIFEST, verify
from elasticcb.checkpoint.versions import newest_usable, version_of
from elasticcb.errors import CheckpointError, describe
from elasticcb.storage.remote_files import is_url, opened
from elasticcb.storage.temporary import TemporaryFolder

logger = logging.getLogger(__name__)


def put(url: str, folder: Path, keep_max: int) -> str:
    """Copies the folder of a complete version below `url`, and deletes old and incomplete versions there.

    Returns its URL. Raises `CheckpointError` if that fails; existing versions are kept, except this one.
    """
    manifest = folder / MANIFEST
    with _connected(url, "can't be written") as (files, root):
        target = posixpath.join(root, folder.name)
        _delete(files, posixpath.join(target, MANIFEST))  # of the same version, written before a restart
        files.makedirs(target, exist_ok=True)
        names = [saved["name"] for saved in json.loads(manifest.read_text(encoding="utf-8"))["files"]]
        for name in [*names, MANIFEST]:
            place = posixpath.join(target, name)
            files.put_file(str(folder / name), place)
            files.invalidate_cache()
            arrived, sent = files.info(place)["size"], (folder / name).stat().st_size
            if arrived != sent:
                raise OSError(f"{arrived} bytes of {name} arrived, {sent} were sent")
        whole = _versions(files, root)
        old = whole[:-keep_max] if keep_max else []
        for name in [*old, *(name for name in _folders(files, root) if name not in whole)]:
            if name != folder.name:
                _delete(files, posixpath.join(root, name, MANIFEST))
                files.rm(posixpath.join(root, name), recursive=True)
    return posixpath.join(url, folder.name)


def fetch(url: str, to: Path, warn: Callable[[str], None]) -> Path:
    """Copies the newest undamaged version below `url` to disk.

    Args:
        url: URL of the folder of versions, or of one version, which has no fallback.
        to: created if needed; a complete copy of an earlier call is reused.

    Returns its folder. Raises `CheckpointError` if there is none, or the file system can't be read.
    """
    with _connected(url, "can't be read") as (files, root):
        if files.exists(posixpath.join(root, MANIFEST)):
            return _fetched(files, root, to / posixpath.basename(root))
        versions = _versions(files, root)
        if not versions:
            raise CheckpointError(
                f"There is no complete checkpoint in {url}. Expected a folder version-… with a {MANIFEST}."
            )
        return newest_usable(versions, lambda name: _fetched(files, posixpath.join(root, name), to / name), url, warn)


@contextlib.contextmanager
def local_copy(folder: str) -> Iterator[str]:
    """Returns a local folder unchanged; for a URL, a local copy of its newest undamaged version.

    Raises `CheckpointError` like `fetch`.
    """
    if not is_url(folder):
        yield folder
        return
    with TemporaryFolder() as copies:
        yield str(fetch(folder, copies, logger.warning))


def _fetched(files: Any, root: str, to: Path) -> Path:
    """Copies one version to disk and verifies it. Raises `CheckpointError` if a file is damaged."""
    with contextlib.suppress(CheckpointError):
        verify(to)
        return to
    shutil.rmtree(to, ignore_errors=True)
    to.mkdir(parents=True)
    files.get_file(posixpath.join(root, MANIFEST), str(to / MANIFEST))
    try:
        names = [saved["name"] for saved in json.loads((to / MANIFEST).read_text(encoding="utf-8"))["files"]]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"The manifest {posixpath.join(root, MANIFEST)} can't be read: {error!r}.") from error
    for name in names:
        if Path(name).name != name:
            raise CheckpointError(f"The manifest of {root} lists the file {name!r}, which is outside of its folder.")
        with contextlib.suppress(FileNotFoundError):  # `verify` names it
            files.get_file(posixpath.join(root, name), str(to / name))
    verify(to)
    return to


def _versions(files: Any, root: str) -> list[str]:
    """The names of all complete versions, oldest first."""
    names = [name for name in _folders(files, root) if files.exists(posixpath.join(root, name, MANIFEST))]
    return sorted(names, key=version_of)


def _folders(files: Any, root: str) -> list[str]:
    files.invalidate_cache()
    try:
        names = [posixpath.basename(path.rstrip("/")) for path in files.ls(root, detail=False)]
    except FileNotFoundError:
        return []
    return [name for name in names if version_of(name) >= 0]


def _delete(files: Any, path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        files.rm_file(path)


@contextlib.contextmanager
def _connected(url: str, problem: str) -> Iterator[tuple[Any, str]]:
    """A connection whose errors become `CheckpointError`s."""
    try:
        with opened(url) as (files, root):
            yield files, root
    except CheckpointError:
        raise
    except Exception as error:  # each file system has its own error types
        raise CheckpointError(f"The checkpoint folder {url} {problem}: {describe(error)}.") from error
