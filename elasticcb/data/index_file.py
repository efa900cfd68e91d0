"""Indexes of many files in one: in a job's folder, for its next master; in the user's cache, for the next jobs."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import socket
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from elasticcb.data.content import is_remote
from elasticcb.data.file_index import FileIndex
from elasticcb.storage import durable

logger = logging.getLogger(__name__)

_PARAMETERS = "parameters.json"  # of the reader, and the names of the files in the order of the members
_FORMAT = 1  # of what the cache holds; an index of another release's is not found
_LEAST_BYTES = 64 << 20  # of data: less is scanned as fast as its index is read
_CACHE_BYTES = 2 << 30


def read_indexes(path: Path, parameters: str) -> dict[str, bytes]:
    """What `write_indexes` wrote with the same `parameters`; {} when there is nothing, or nothing that can be used."""
    try:
        with zipfile.ZipFile(path) as archive:
            kept_parameters, files = json.loads(archive.read(_PARAMETERS))
            if kept_parameters != parameters:
                return {}
            return {file: archive.read(str(number)) for number, file in enumerate(files)}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        logger.warning("%s can't be used; the data is scanned again: %s", path, error)
        return {}


def write_indexes(path: Path, parameters: str, indexes: Mapping[str, bytes]) -> None:
    """Writes indexes, as `FileIndex.to_bytes`, by file. Raises `OSError`."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with durable.replacing(path) as unfinished, zipfile.ZipFile(unfinished, "w") as archive:
        for number, index in enumerate(indexes.values()):
            archive.writestr(str(number), index)
        archive.writestr(_PARAMETERS, json.dumps([parameters, list(indexes)]))


class IndexCache:
    """The user's cache, by which a job needs no scan of data that an earlier job has scanned.

    An index in it holds while the file is the same on the same machine: inode, size, and both times of its last change,
    since programs can set one of them. Remote files need a version (an ETag, for example).

    Args:
        files: of one data origin.
        reader: the name of what reads them.
        parameters: of the reader.
    """

    def __init__(self, files: Sequence[str], reader: str, parameters: str) -> None:
        self._parameters = parameters
        self._keys = {file: _key(file) for file in files}
        names = sorted(file if is_remote(file) else os.path.abspath(file) for file in files)
        digest = hashlib.sha256(json.dumps([_FORMAT, reader, parameters, names]).encode())
        folder = _folder()
        self._path = None if folder is None else folder / f"{digest.hexdigest()}.zip"
        self._found: dict[str, bytes] = {}

    def read(self) -> dict[str, bytes]:
        """Indexes that hold, by file."""
        if self._path is None:
            return {}
        kept = read_indexes(self._path, self._parameters)
        with contextlib.suppress(OSError):
            os.utime(self._path)  # used last
        self._found = {file: kept[key] for file, key in self._keys.items() if key in kept}
        return dict(self._found)

    def write(self, indexes: Mapping[str, bytes]) -> None:
        """Keeps what a scan has found after `read`, if the data are so large that it is worth it."""
        if self._path is None or dict(indexes) == self._found:
            return
        unchanged = {file: index for file, index in indexes.items() if self._keys.get(file) == _key(file) != ""}
        identities = {file: FileIndex.from_bytes(index).identity for file, index in unchanged.items()}
        kept = {self._keys[file]: unchanged[file] for file, identity in identities.items() if identity.version}
        if sum(identity.size for identity in identities.values()) < _LEAST_BYTES or not kept:
            return
        try:
            write_indexes(self._path, self._parameters, kept)
            _remove_oldest(self._path.parent)
        except OSError as error:
            logger.info("%s can't be written; the next job will scan the data again: %s", self._path, error)


def _key(file: str) -> str:
    """What a file and its state are found by in the cache; "": it is not there."""
    if is_remote(file):
        return file
    try:
        status = os.stat(file)
    except OSError:
        return ""
    state = status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
    return f"{file} {socket.gethostname()} {' '.join(map(str, state))}"


def _folder() -> Path | None:
    with contextlib.suppress(RuntimeError):  # there is no home
        base = os.environ.get("XDG_CACHE_HOME", "")
        return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "elasticcb" / "indexes"
    return None


def _remove_oldest(folder: Path) -> None:
    """Those used longest ago, until the others fit."""
    room = _CACHE_BYTES
    for path in sorted(folder.glob("*.zip"), key=lambda path: path.stat().st_mtime, reverse=True):
        room -= path.stat().st_size
        if room < 0:
            path.unlink(missing_ok=True)
