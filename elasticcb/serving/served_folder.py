"""Reads the folder of a periodic export, and pins its version for all who serve it."""

from __future__ import annotations

import json
import os
import posixpath
from pathlib import Path

from elasticcb.checkpoint.manifest import MANIFEST
from elasticcb.checkpoint.remote import Files
from elasticcb.errors import CheckpointError, UsageError
from elasticcb.serving.exports import CURRENT, Current, version_of, way_to
from elasticcb.storage.job_store import JobStore
from elasticcb.storage.remote_files import is_url, problem_of, without_password

PINNED = "pinned.json"  # the version that all who follow the folder serve, until it is unpinned


class ServedFolder:
    """A folder or URL that `PeriodicExport` writes to. Not thread-safe.

    All methods raise `CheckpointError`, and `StoreError` if it can't be reached; the constructor `UsageError`, if it is
    a file, or a URL that can't be used.
    """

    def __init__(self, place: str | Path) -> None:
        if is_url(str(place)) and (problem := problem_of(str(place))):
            raise UsageError(f"{without_password(str(place))} {problem}")
        self.place = str(place) if is_url(str(place)) else str(Path(place).expanduser().absolute())
        if os.path.isfile(self.place):
            raise UsageError(f"{self.place} is a file. Expected the folder or URL of --export_dir or PeriodicExport.")
        self._store = JobStore(self.place)

    def current(self) -> Current:
        try:
            return Current.of(self._store.get(CURRENT), posixpath.join(self.place, CURRENT))
        except FileNotFoundError:
            raise CheckpointError(
                f"{self.place} has no {CURRENT}: nothing was exported there yet. Expected a folder of --export_dir or "
                "PeriodicExport, not of --output."
            ) from None

    def pinned(self) -> int | None:
        """The pinned version; None: the newest is served."""
        try:
            return int(json.loads(self._store.get(PINNED))["version"])
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{self.place}/{PINNED} can't be read: {error!r}. Run `elasticcb serve rollback` with --version or "
                "--undo."
            ) from None

    def pin(self, version: int) -> None:
        """Raises `UsageError` if there is no way to the version."""
        way = self.way_to(version)
        for name in way:
            try:
                self._store.get(posixpath.join(name, MANIFEST))
            except FileNotFoundError:
                raise UsageError(f"The export {self.place}/{name} is not complete. Choose another version.") from None
        self._store.put(PINNED, json.dumps({"version": version}).encode())

    def unpin(self) -> None:
        self._store.remove(PINNED)

    def names(self) -> list[str]:
        """The names of all exports; some may not be finished."""
        return [name for name in self._store.names("") if version_of(name) >= 0]

    def way_to(self, version: int) -> list[str]:
        """The names of a full export, and of the deltas that lead from it to a version. Raises `UsageError` if there is
        no way."""
        names = self.names()
        way = way_to(names, version)
        if not way or version_of(way[-1]) != version:
            versions = sorted({version_of((way_to(names, version_of(name)) or [""])[-1]) for name in names})
            kept = ", ".join(str(each) for each in versions[-20:] if each >= 0) or "none"
            raise UsageError(f"{self.place} does not keep version {version}. The newest that it keeps: {kept}.")
        return way

    def files(self, name: str) -> Files:
        """The files of an export, while they are read."""
        return Files(posixpath.join(self.place, name), parent=self._store)

    def close(self) -> None:
        self._store.close()
