"""The folder of a periodic export, as its writer uses it: a local folder, or below a URL, where renames are not
reliable."""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from elasticcb.checkpoint.manifest import MANIFEST, read_manifest, write_manifest
from elasticcb.errors import CheckpointError, StoreError, UsageError
from elasticcb.serving.exports import Export, version_of
from elasticcb.storage import durable
from elasticcb.storage.folder_lock import ENDING_SECONDS, FolderLock
from elasticcb.storage.job_store import JobStore
from elasticcb.storage.local_folders import TemporaryFolder
from elasticcb.storage.remote_files import is_url

SNAPSHOT = "snapshot-"  # begin of the names of folders with what a full export is made of
_SNAPSHOT = re.compile(rf"{SNAPSHOT}\d{{8,}}-[0-9a-f]{{8}}")
OWNER_SECONDS = 60.0  # for how long a URL is in use by an owner who has said nothing
_OWNER, _LOCK = "owner.json", ".exports.lock"


class ExportFolder:
    """Not thread-safe. Its methods raise `StoreError` when the folder can't be read or written now.

    Attributes:
        place: path or URL.
    """

    def __init__(self, place: str) -> None:
        self.place = place.rstrip("/")
        self._here = None if is_url(place) else Path(place)
        self._store = JobStore(self.place if self._here is None else f"file://{place}")
        self._lock = None if self._here is None else FolderLock(self._here, str(place), ENDING_SECONDS, _LOCK)
        self._owner = ""

    @property
    def is_local(self) -> bool:
        return self._here is not None

    # -------------------------------------------------------------- who writes

    def own(self, owner: str) -> None:
        """Makes `owner`, the name of a training, the only one that writes. Raises `UsageError` when another does."""
        if self._lock is not None and self._here is not None:
            with _local(self.place):
                self._here.mkdir(parents=True, exist_ok=True)  # which other users may read
                self._lock.take()
            return
        age = self._age_of_other(owner)
        if age < OWNER_SECONDS:
            self._owner = ""  # `leave` must not remove the other one's file
            raise UsageError(
                f"{self.place} is in use: another training wrote there {max(age, 0):.0f} s ago, and two would remove "
                "each other's exports. Choose another folder, or stop the other one; if it was killed, the folder is "
                f"free {OWNER_SECONDS:.0f} s later."
            )
        self._owner = owner
        self._store.put(_OWNER, json.dumps({"owner": owner}).encode())

    def stay_owner(self) -> None:
        """Call it often. Raises `UsageError` when another owner has come meanwhile."""
        if self._lock is None:
            self.own(self._owner)

    def leave(self) -> None:
        """Lets others write here."""
        if self._lock is not None:
            self._lock.release()
        elif self._owner:
            with contextlib.suppress(StoreError):
                self._store.remove(_OWNER)
        self._store.close()

    def _age_of_other(self, owner: str) -> float:
        """Seconds since another owner of the URL has said that it is there, by the clock of the store."""
        try:
            if json.loads(self._store.get(_OWNER))["owner"] != owner:
                return self._store.now() - self._store.changed(_OWNER)
        except (FileNotFoundError, ValueError, KeyError):
            pass
        return math.inf

    # -------------------------------------------------------------- files

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
        """Writes the manifest of a folder, whose files must be there; `content` as for `write_manifest`."""
        there, wanted = self._store.names(name), [each.name for own in content["files"] for each in own]
        if missing := sorted({*wanted} - {*there}):
            raise CheckpointError(
                f"A parameter server has written {missing[0]}, but it is not in {self.place}/{name} here. All "
                "processes must share the folder of exports. Use a shared folder or a URL."
            )
        with TemporaryFolder() as here:
            write_manifest(here, **content)
            self.put(f"{name}/{MANIFEST}", (here / MANIFEST).read_bytes())

    def remove(self, name: str) -> None:
        """Removes a folder; its manifest first, so that what is left of it is not finished."""
        self._store.remove(f"{name}/{MANIFEST}")
        self._store.remove_all(name)

    def begin_again(self) -> tuple[dict[str, float], int]:
        """Removes what killed exporters have not finished; returns when each finished export was written, by name, and
        the newest version in a name."""
        written, newest = dict[str, float](), 0
        for name in self._store.names(""):
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
        with TemporaryFolder() as here:
            (here / MANIFEST).write_bytes(content)
            return Export.of(read_manifest(here), name)


@contextlib.contextmanager
def _local(place: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreError(f"The folder of exports {place} can't be written: {error}.") from error


def files_below(folder: Path) -> Sequence[tuple[str, Path]]:
    """All files below a folder: names with `/`, and paths."""
    return [(path.relative_to(folder).as_posix(), path) for path in sorted(folder.rglob("*")) if path.is_file()]


def upload(folder: Path, place: str) -> None:
    """Copies all files below a folder to a URL."""
    with contextlib.closing(JobStore(place)) as store:
        for name, path in files_below(folder):
            store.put_file(name, path)
