"""Stores indexes of many files in one: in a job's folder, for its next master; in the user's cache, for later jobs."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import socket
import stat
import time
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from elasticcb.data.content import Identity, is_remote
from elasticcb.storage import durable

logger = logging.getLogger(__name__)

_PARAMETERS = "parameters.json"  # digest of the reader's parameters, and names of the files in the order of the members
_FORMAT = 2  # version of the cache's format; indexes of other releases are not found
_NAME = re.compile(r"[0-9a-f]{64}\.zip")  # names of files in the cache
_LEAST_BYTES = 64 << 20  # bytes of data; scanning less is as fast as reading an index
_CACHE_BYTES = 2 << 30  # maximum size of the cache
_UNFINISHED_SECONDS = 3600.0  # longer than writing an index takes


def read_indexes(path: Path, parameters: str) -> dict[str, bytes]:
    """Indexes that `write_indexes` wrote with the same `parameters`; {} if there are none, or they can't be used."""
    try:
        with zipfile.ZipFile(path) as archive:
            kept_parameters, files = json.loads(archive.read(_PARAMETERS))
            if kept_parameters != _digest(parameters):
                return {}
            return {file: archive.read(str(number)) for number, file in enumerate(files)}
    except FileNotFoundError:
        return {}
    except Exception as error:  # for damaged archives, zipfile raises a dozen error types
        logger.warning("%s can't be used; scanning the data again: %s", path, error)
        return {}


def write_indexes(path: Path, parameters: str, indexes: Mapping[str, bytes]) -> None:
    """Writes indexes, as `FileIndex.to_bytes`, by file. Raises `OSError`."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with durable.replacing(path) as unfinished, zipfile.ZipFile(unfinished, "w") as archive:
        unfinished.chmod(durable.PRIVATE)
        for number, index in enumerate(indexes.values()):
            archive.writestr(str(number), index)
        archive.writestr(_PARAMETERS, json.dumps([_digest(parameters), list(indexes)]))


def _digest(*parts: Any) -> str:
    """A digest of values that may contain passwords; only for comparison."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


class IndexCache:
    """The user's cache of indexes, so that jobs don't rescan data that an earlier job has scanned.

    It is not used if another user can write to its folder.

    An index is valid while the file is unchanged on the same machine: inode, size, and both change times, because
    programs can set one of them. Remote files need a version, for example an ETag.
    """

    def __init__(self, files: Sequence[str], reader: str, parameters: str) -> None:
        self._parameters = parameters
        self._keys = {file: _key(file) for file in files}
        names = sorted(file if is_remote(file) else os.path.abspath(file) for file in files)
        folder = _folder()
        self._path = None if folder is None else folder / f"{_digest(_FORMAT, reader, parameters, names)}.zip"
        self._found: dict[str, bytes] = {}

    def read(self) -> dict[str, bytes]:
        """Valid indexes, by file."""
        if self._path is None:
            return {}
        kept = read_indexes(self._path, self._parameters)
        with contextlib.suppress(OSError):
            os.utime(self._path)  # marks it as used
        self._found = {file: kept[key] for file, key in self._keys.items() if key in kept}
        return dict(self._found)

    def write(self, indexes: Mapping[str, bytes], identities: Mapping[str, Identity]) -> None:
        """Stores the results of a scan after `read`, if the data is large enough."""
        large = sum(identity.size for identity in identities.values()) >= _LEAST_BYTES
        if self._path is None or not large or dict(indexes) == self._found:
            return
        kept = {
            self._keys[file]: index
            for file, index in indexes.items()
            if identities[file].version and self._keys.get(file) == _key(file) != ""
        }
        if not kept or sum(map(len, kept.values())) > _CACHE_BYTES:
            return
        try:
            write_indexes(self._path, self._parameters, kept)
            _remove_oldest(self._path.parent)
        except OSError as error:
            logger.info("%s can't be written; the next job will scan the data again: %s", self._path, error)


def _key(file: str) -> str:
    """The key of a file and its state in the cache; "": the file does not exist."""
    if is_remote(file):
        return _digest(file)
    try:
        status = os.stat(file)
    except OSError:
        return ""
    state = status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
    return _digest(file, socket.gethostname(), *state)


def _folder() -> Path | None:
    with contextlib.suppress(RuntimeError):  # there is no home folder
        base = os.environ.get("XDG_CACHE_HOME", "")
        folder = (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "elasticcb" / "indexes"
        if all(_is_own(each) for each in (folder, folder.parent)):
            return folder
        logger.info("Other users can write to %s, so indexes of data are not cached there", folder)
    return None


def _is_own(folder: Path) -> bool:
    """Whether only this user can write to a folder, or the folder does not exist yet."""
    try:
        found = folder.lstat()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022


def _remove_oldest(folder: Path) -> None:
    """Removes the least recently used files until the others fit, and leftovers of killed jobs. Several jobs may do so
    at once."""
    room, found = _CACHE_BYTES, []
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):
            status = path.stat()
            if _NAME.fullmatch(path.name):
                found.append((status.st_mtime, status.st_size, path))
            elif path.name.startswith(durable.TEMPORARY) and status.st_mtime < time.time() - _UNFINISHED_SECONDS:
                path.unlink(missing_ok=True)
    for _, size, path in sorted(found, reverse=True):
        room -= size
        if room < 0:
            path.unlink(missing_ok=True)
