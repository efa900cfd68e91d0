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

from elasticcb.checkpoint import versions
from elasticcb.checkpoint.manifest import MANIFEST, file_names, manifest_in, manifest_of, read_manifest, verify
from elasticcb.checkpoint.shard_file import SavedFile
from elasticcb.checkpoint.versions import newest_usable, no_checkpoint_in, version_folder, version_of
from elasticcb.errors import CheckpointError, StoreError
from elasticcb.settings import RECOVERY_FOLDER
from elasticcb.storage.job_store import JobStore
from elasticcb.storage.local_folders import TemporaryFolder
from elasticcb.storage.remote_files import as_path, is_url

logger = logging.getLogger(__name__)

_TRIES = 5  # while servers replace files


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
    with _temporary(scratch) as here, JobStore(folder) as store:
        yield here / name
        store.put_file(name, here / name)


def _temporary(scratch: Path | None) -> TemporaryFolder:
    try:
        return TemporaryFolder(scratch)
    except OSError as error:
        raise CheckpointError(f"No folder for files on their way to or from a URL can be made: {error}.") from error


class Files:
    """The files in a folder, while they are read: a context manager. Those of a URL are copied when they are needed.

    Args:
        scratch: as for `writable`.
        parent: of the folder above, if it is connected already: a new connection takes longer than a small file.
    """

    def __init__(self, folder: str, scratch: Path | None = None, parent: JobStore | None = None) -> None:
        self.name = folder
        self._until_end = contextlib.ExitStack()
        self._store: JobStore | None = None
        self._below = "" if parent is None else posixpath.basename(folder)
        if is_url(folder):
            self._store = parent or self._until_end.enter_context(JobStore(folder))
            self._here = self._until_end.enter_context(_temporary(scratch))
        else:
            self._here = Path(folder)

    def path(self, name: str) -> Path:
        """Where the file is here. Raises `CheckpointError` if it can't be copied."""
        path = self._here / name
        if self._store is not None and not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                self._store.get_file(posixpath.join(self._below, name), path)
            except FileNotFoundError:
                raise CheckpointError(f"The file {self.name}/{name} is missing.") from None
        return path

    def __enter__(self) -> Files:
        return self

    def __exit__(self, *error: object) -> None:
        self._until_end.close()


def place_of(url: str, version: int) -> str:
    """The folder for a version below `url`. What servers write there may be of a version a little later; it must not
    replace files, since the same version may have been written before a restart."""
    return posixpath.join(url, version_folder(version))


def newest_version(place: str) -> str:
    """The name of the newest complete version in a folder or below a URL; "": there is none. Raises `StoreError`."""
    with JobStore(place) as store:
        return (_versions(store) or [""])[-1]


def finish(folder: str, keep_max: int, run: str = "", **content: Any) -> None:
    """Checks what the servers have written to a folder of `place_of`, writes its manifest, and deletes old and
    incomplete versions in the same place.

    Args:
        keep_max: number of versions to keep; 0: all.
        run: the training; versions of others are deleted. "": they stay.
        content: arguments of `manifest_of`, where each server has one file.

    Raises `StoreError` if that fails; existing versions are kept, except this one.
    """
    url, name = posixpath.split(folder)
    written: list[SavedFile] = content.pop("files")
    known = {saved.name for saved in written}
    with JobStore(url) as store:
        there = {*store.names(name, unfinished=True)}
        if known - there:
            raise StoreError(f"{', '.join(sorted(known - there))} did not arrive in {folder}.")
        store.put(f"{name}/{MANIFEST}", manifest_of(files=[[each] for each in written], **content))
        for other in there - known - {MANIFEST}:  # of an attempt that failed
            store.remove(f"{name}/{other}")
        own = [each for each in _versions(store) if not run or _run_of(store, each) in ("", run)]
        kept = {name, *(own[-keep_max:] if keep_max else own)}
        for old in _folders(store):
            if old not in kept and not Path(as_path(url), old).is_symlink():
                store.remove(f"{old}/{MANIFEST}")
                store.remove_all(old)


def newest_of_run(place: str, run: str) -> str:
    """The newest version in a folder or below a URL that a given training wrote; "": none. Logs what it skips: versions
    with damaged manifests, and in a folder those with other damaged files.

    Raises `StoreError` if the URL can't be read now.
    """
    if not is_url(place):
        return versions.newest_of_run(place, run)
    with JobStore(place) as store:
        own = (name for name in reversed(_versions(store)) if _run_of(store, name, logging.WARNING) == run)
        name = next(own, "")
        return posixpath.join(place, name) if name else ""


def _run_of(store: JobStore, name: str, level: int = logging.DEBUG) -> str:
    """The training that wrote a version; "": its manifest is damaged, which is logged, or was removed just now."""
    with contextlib.suppress(FileNotFoundError):
        content = store.get(f"{name}/{MANIFEST}")
        try:
            return str(manifest_in(content, f"{store.url}/{name}/{MANIFEST}")["extra"].get("run", ""))
        except CheckpointError as error:
            logger.log(level, "Skipped %s: %s", name, error)
    return ""


def fetch(url: str, to: Path) -> tuple[Path, Sequence[str]]:
    """Copies the newest undamaged version below `url` to disk; returns its folder, and newer ones with their faults.

    Args:
        url: URL of the folder of versions, or of one version, which has no fallback.
        to: created if needed; a complete copy of an earlier call is reused.

    Raises `CheckpointError` if there is none, or the file system can't be read.
    """
    url = url.rstrip("/")
    with JobStore(url) as store:
        if MANIFEST in store.names(""):
            return _fetched(store, "", to / posixpath.basename(url), url), ()
        while True:
            names = _versions(store)
            if not names:
                raise no_checkpoint_in(url)
            try:
                return newest_usable(names, lambda name: _fetched(store, f"{name}/", to / name, f"{url}/{name}"), url)
            except CheckpointError:
                if not set(_versions(store)) - set(names):  # else a job replaced them meanwhile
                    raise


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


@contextlib.contextmanager
def recovery_files(job: str) -> Iterator[Path | None]:
    """Returns a local copy of what the servers of the job at a URL saved last; None: nothing, or it is done.

    Raises `CheckpointError` like `fetch`.
    """
    with TemporaryFolder() as copies, JobStore(posixpath.join(job, RECOVERY_FOLDER)) as store:
        for left in reversed(range(_TRIES)):
            names = store.names("")
            manifests = [name for name in names if name.startswith("manifest-")]
            try:
                newest = _fetched(store, "", copies / "saved", store.url, manifests[-1]) if manifests else None
                break
            except StoreError:
                raise
            except CheckpointError:
                if not left or store.names("") == names:  # else servers replaced files meanwhile
                    raise
        yield newest


def _fetched(store: JobStore, prefix: str, to: Path, url: str, manifest: str = MANIFEST) -> Path:
    """Copies the version at `url` to disk and verifies it. Raises `CheckpointError` if a file is damaged."""
    with contextlib.suppress(CheckpointError):
        verify(to)
        return to
    shutil.rmtree(to, ignore_errors=True)
    to.mkdir(parents=True)
    with contextlib.suppress(FileNotFoundError):  # `verify` names what is missing
        store.get_file(prefix + manifest, to / MANIFEST)
    try:
        for name in file_names(read_manifest(to), to):
            with contextlib.suppress(FileNotFoundError):
                store.get_file(prefix + name, to / name)
        verify(to)
    except CheckpointError as error:
        raise type(error)(str(error).replace(str(to), url)) from error
    return to


def _versions(store: JobStore) -> list[str]:
    """The names of all complete versions, oldest first."""
    return sorted((name for name in _folders(store) if MANIFEST in store.names(name)), key=version_of)


def _folders(store: JobStore) -> list[str]:
    return [name for name in store.names("") if version_of(name) >= 0]
