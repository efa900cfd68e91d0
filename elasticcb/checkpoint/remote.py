"""A server's files of snapshots, in a local folder or below a URL, where renames are not reliable.

A version consists of the same files in both (versions.py). Its manifest is the last to be written and the first to be
deleted: a folder without a manifest is not a checkpoint. The master copies a version from which a model is to start to
its disk, and checks each file's SHA-256 there, before servers read it.
"""

from __future__ import annotations

import contextlib
import logging
import posixpath
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from elasticcb.checkpoint.manifest import MANIFEST, file_names, read_manifest, verify, write_manifest
from elasticcb.checkpoint.shard_file import SavedFile
from elasticcb.checkpoint.versions import newest_usable, version_folder, version_of
from elasticcb.errors import CheckpointError, StoreError, describe
from elasticcb.storage.job_store import JobStore
from elasticcb.storage.local_folders import TemporaryFolder
from elasticcb.storage.remote_files import is_url, opened


@contextlib.contextmanager
def writable(place: str, scratch: Path | None) -> Iterator[Path]:
    """The path at which to write the file for `place`; for a URL, a temporary one, which is then copied there.

    Args:
        scratch: folder for temporary files; None: the system's.

    Raises `CheckpointError` if it can't be copied.
    """
    if not is_url(place):
        yield Path(place)
        return
    folder, name = posixpath.split(place)
    with _temporary(scratch) as here, contextlib.closing(JobStore(folder)) as store:
        yield here / name
        store.put_file(name, here / name)


def _temporary(scratch: Path | None) -> TemporaryFolder:
    try:
        return TemporaryFolder(scratch)
    except OSError as error:
        raise CheckpointError(f"No folder for files on their way to or from a URL can be made: {error}.") from error


class Files:
    """The files in a folder, while they are read: a context manager. Those of a URL are copied when they are needed."""

    def __init__(self, folder: str, scratch: Path | None) -> None:
        self.name = folder
        self._until_end = contextlib.ExitStack()
        self._store: JobStore | None = None
        if is_url(folder):
            self._store = self._until_end.enter_context(contextlib.closing(JobStore(folder)))
            self._here = self._until_end.enter_context(_temporary(scratch))
        else:
            self._here = Path(folder)

    def path(self, name: str) -> Path:
        """Where the file is here. Raises `CheckpointError` if it can't be copied."""
        path = self._here / name
        if self._store is not None and not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                self._store.get_file(name, path)
            except FileNotFoundError:
                raise CheckpointError(f"The file {self.name}/{name} is missing.") from None
        return path

    def __enter__(self) -> Files:
        return self

    def __exit__(self, *error: object) -> None:
        self._until_end.close()


logger = logging.getLogger(__name__)


def place_of(url: str, version: int) -> str:
    """The folder for a version below `url`. What servers write there may be of a version a little later; it must not
    replace files, since the same version may have been written before a restart."""
    return posixpath.join(url, version_folder(version))


def newest_version(url: str) -> str:
    """The name of the newest complete version below `url`; "": there is none. Raises `CheckpointError`."""
    with _connected(url, "can't be read") as (files, root):
        return (_versions(files, root) or [""])[-1]


def finish(folder: str, keep_max: int, run: str = "", **content: Any) -> None:
    """Checks what the servers have written to a folder of `place_of`, writes its manifest, and deletes old and
    incomplete versions in the same place.

    Args:
        keep_max: number of versions to keep; 0: all.
        run: the training; versions of others are deleted. "": they stay.
        content: arguments of `write_manifest`, where each server has one file.

    Raises `CheckpointError` if that fails; existing versions are kept, except this one.
    """
    url, name = posixpath.split(folder)
    written: list[SavedFile] = content.pop("files")
    with _connected(url, "can't be written") as (files, root), TemporaryFolder() as here:
        files.invalidate_cache()
        for saved in written:
            arrived = files.info(posixpath.join(root, name, saved.name))["size"]
            if arrived != saved.bytes:
                raise OSError(f"{arrived} bytes of {saved.name} arrived, {saved.bytes} were sent")
        write_manifest(here, files=[[each] for each in written], **content)
        files.put_file(str(here / MANIFEST), posixpath.join(root, name, MANIFEST))
        whole = _versions(files, root)
        if name not in whole:
            raise OSError(f"{name}/{MANIFEST} did not arrive")
        foreign = [each for each in whole if run and _run_of(files, posixpath.join(root, each)) not in ("", run)]
        whole = [each for each in whole if each not in foreign]
        unfinished = [each for each in _folders(files, root) if each not in whole]
        for old in [*(whole[:-keep_max] if keep_max else []), *foreign, *unfinished]:
            if old != name:
                _delete(files, posixpath.join(root, old, MANIFEST))
                files.rm(posixpath.join(root, old), recursive=True)
        known = {MANIFEST, *(saved.name for saved in written)}
        for path in files.ls(posixpath.join(root, name), detail=False):
            if posixpath.basename(path) not in known:  # of an attempt that failed
                _delete(files, path)


def newest_of_run(url: str, run: str) -> str:
    """The newest undamaged version below `url` that a given training wrote; "": there is none.

    Raises `StoreError` if the URL can't be read now.
    """
    with _connected(url, "can't be read") as (files, root):
        for name in reversed(_versions(files, root)):
            if _run_of(files, posixpath.join(root, name)) == run:
                return posixpath.join(url, name)
    return ""


def _run_of(files: Any, folder: str) -> str:
    """The training that wrote a version; "": its manifest is damaged."""
    with contextlib.suppress(CheckpointError), TemporaryFolder() as here:
        files.get_file(posixpath.join(folder, MANIFEST), str(here / MANIFEST))
        return str(read_manifest(here).get("extra", {}).get("run", ""))
    return ""


def fetch(url: str, to: Path) -> tuple[Path, Sequence[str]]:
    """Copies the newest undamaged version below `url` to disk; returns its folder, and newer ones with their faults.

    Args:
        url: URL of the folder of versions, or of one version, which has no fallback.
        to: created if needed; a complete copy of an earlier call is reused.

    Raises `CheckpointError` if there is none, or the file system can't be read.
    """
    with _connected(url, "can't be read") as (files, root):
        if files.exists(posixpath.join(root, MANIFEST)):
            return _fetched(files, root, to / posixpath.basename(root), url), ()
        versions = _versions(files, root)
        if not versions:
            raise CheckpointError(
                f"There is no complete checkpoint in {url}. Expected a folder version-… with a {MANIFEST}."
            )

        def fetched(name: str) -> Path:
            return _fetched(files, posixpath.join(root, name), to / name, posixpath.join(url, name))

        return newest_usable(versions, fetched, url)


@contextlib.contextmanager
def local_copy(folder: str) -> Iterator[str]:
    """Returns a local folder unchanged; for a URL, a local copy of its newest undamaged version.

    Raises `CheckpointError` like `fetch`.
    """
    if not is_url(folder):
        yield folder
        return
    with TemporaryFolder() as copies:
        copy, skipped = fetch(folder, copies)
        for fault in skipped:
            logger.warning("%s", fault)
        yield str(copy)


def _fetched(files: Any, root: str, to: Path, url: str) -> Path:
    """Copies the version at `url` to disk and verifies it. Raises `CheckpointError` if a file is damaged."""
    with contextlib.suppress(CheckpointError):
        verify(to)
        return to
    shutil.rmtree(to, ignore_errors=True)
    to.mkdir(parents=True)
    files.get_file(posixpath.join(root, MANIFEST), str(to / MANIFEST))
    for name in file_names(read_manifest(to), root):
        with contextlib.suppress(FileNotFoundError):  # `verify` names it
            files.get_file(posixpath.join(root, name), str(to / name))
    try:
        verify(to)
    except CheckpointError as error:
        raise CheckpointError(str(error).replace(str(to), url)) from error
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
    """A connection whose errors become `StoreError`s."""
    try:
        with opened(url) as (files, root):
            yield files, root
    except CheckpointError:
        raise
    except Exception as error:  # each file system has its own error types
        raise StoreError(f"The checkpoint folder {url} {problem}: {describe(error)}.") from error
