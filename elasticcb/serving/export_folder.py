"""The folder of a periodic export, as its writer uses it: a local folder, or below a URL, where renames are not
reliable."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from elasticcb.checkpoint.manifest import MANIFEST, manifest_in, manifest_of
from elasticcb.errors import CheckpointError, StoreError, UsageError
from elasticcb.serving.exports import CURRENT, Export, version_of
from elasticcb.storage import durable
from elasticcb.storage.durable import TEMPORARY
from elasticcb.storage.folder_lock import FolderLock
from elasticcb.storage.job_store import JobStore
from elasticcb.storage.remote_files import is_url
from elasticcb.storage.store_lock import StoreLock, locked

SNAPSHOT = "snapshot-"  # begin of the names of folders with what a full export is made of
_SNAPSHOT = re.compile(rf"{SNAPSHOT}\d{{8,}}-[0-9a-f]{{8}}")
_LOCK = ".exports.lock"


class ExportFolder:
    """Not thread-safe. Its methods raise `StoreError` when the folder can't be read or written now.

    Attributes:
        place: path or URL.
    """

    def __init__(self, place: str) -> None:
        self.place = place.rstrip("/")
        self._here = None if is_url(place) else Path(place)
        self._store = JobStore(self.place)
        self._lock: FolderLock | StoreLock | None = None

    def own(self, run: str, folder: str, say: Callable[[str], None]) -> None:
        """Makes a training the only one that writes here. Raises `UsageError` when another does.

        Args:
            run, folder, say: as for `StoreLock`.
        """
        if self._lock is None:
            self._lock = locked(self.place, _LOCK, self.place, folder, run, say)

    def check_owner(self) -> None:
        """Raises `UsageError` when another training has taken the URL meanwhile."""
        if self._lock is not None and (problem := self._lock.problem()):
            raise UsageError(problem)

    def leave(self) -> None:
        """Lets others write here."""
        if self._lock is not None:
            self._lock.release()
        self._store.close()

    def begin(self, name: str) -> str:
        """The place of a new folder, to which servers write."""
        if self._here is not None:
            with _local(self.place):
                (self._here / name).mkdir(parents=True, exist_ok=True)
        return f"{self.place}/{name}"

    def put(self, name: str, content: bytes) -> None:
        """Writes or replaces a file; in a local folder, at once."""
        if self._here is None:
            self._store.put(name, content)
            return
        with _local(self.place):
            durable.write(self._here / name, content, durable.SHARED)

    def finish(self, name: str, **content: Any) -> None:
        """Writes the manifest of a folder, whose files must be there; `content` as for `manifest_of`."""
        there, wanted = self._store.names(name), [each.name for own in content["files"] for each in own]
        if missing := sorted({*wanted} - {*there}):
            raise CheckpointError(
                f"A parameter server has written {missing[0]}, but it is not in {self.place}/{name} here. All "
                "processes must share the folder of exports. Use a shared folder or a URL."
            )
        self.put(f"{name}/{MANIFEST}", manifest_of(**content))

    def remove(self, name: str) -> None:
        """Removes a folder; its manifest first, so that what is left of it is not finished."""
        self._store.remove(f"{name}/{MANIFEST}")
        self._store.remove_all(name)

    def begin_again(self) -> tuple[dict[str, float], int]:
        """Removes what killed exporters have not finished; returns when each finished export was written, by name, and
        the newest version in a name."""
        written, newest = dict[str, float](), 0
        for name in self._store.names("", unfinished=True):
            if name.startswith(TEMPORARY) and CURRENT in name:
                self._store.remove(name)
            newest = max(newest, version_of(name))
            if version_of(name) < 0 and not _SNAPSHOT.fullmatch(name):  # others are not ours
                continue
            try:
                written[name] = self._export(name).written
            except StoreError:
                raise
            except CheckpointError:
                with contextlib.suppress(StoreError):  # a server may still be writing there, for a killed master
                    self.remove(name)
        return written, newest

    def _export(self, name: str) -> Export:
        """Raises `CheckpointError` unless it is a finished export."""
        try:
            content = self._store.get(f"{name}/{MANIFEST}")
        except FileNotFoundError:
            raise CheckpointError(f"{name} is not finished.") from None
        return Export.of(manifest_in(content, f"{self.place}/{name}/{MANIFEST}"), name)


@contextlib.contextmanager
def _local(place: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreError(f"The folder of exports {place} can't be written: {error}.") from error
