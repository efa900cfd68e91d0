"""The one way in which files are written that a job relies on later.

A file appears whole or not at all: it is written beside its place under a name of its own, forced onto the disk, read
back and compared, and renamed; until then the file that was there stays as it is. JSON documents carry a checksum.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

TEMPORARY = ".tmp-"  # names of what is not finished begin with it
PRIVATE, SHARED = 0o600, 0o666
_CHECKSUM, _SEALED = "checksum", "sealed"  # in documents: both, so that damage to one does not hide the other
_CHUNK_BYTES = 4 << 20


class DamagedFileError(ValueError):
    """The content of a file is not what was written."""


class ReplacedFileError(Exception):
    """What is to be added to has another file in its place, or is gone."""


class NewerFormatError(Exception):
    """A file was written by a later release."""


class Digest(NamedTuple):
    bytes: int
    sha256: str


@contextlib.contextmanager
def replacing(
    path: Path, check: Callable[[Path], object] = lambda unfinished: None, sync_names: bool = True
) -> Iterator[Path]:
    """Gives a path beside `path` to write a file to, which takes the place of `path` when the block has ended.

    Args:
        path: of a file.
        check: is given the unfinished file when it is on the disk; raises unless its content is as it should be.
        sync_names: whether the file is there for certain after that; else, until the caller has called `sync` for its
            folder, the one before it may come back when the machine ends.

    Raises `OSError`; then, as when the block raises, what was at `path` is still there, and nothing beside it.
    """
    unfinished = path.with_name(f"{TEMPORARY}{path.name}-{secrets.token_hex(4)}")
    try:
        yield unfinished
        sync(unfinished)
        check(unfinished)
        os.replace(unfinished, path)
    except BaseException:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise
    if sync_names:
        sync(path.parent)


def write(
    path: Path,
    content: bytes,
    mode: int = PRIVATE,
    sync_names: bool = True,
) -> None:
    """Writes a file.

    Args:
        mode: who may read it, less what the umask forbids: `PRIVATE`, or `SHARED` with other users.
        sync_names: as of `replacing`.

    Raises `OSError`, as of `replacing`.
    """

    def check(unfinished: Path) -> None:
        if unfinished.read_bytes() != content:
            raise OSError(f"{unfinished} does not hold what was written to it")

    with replacing(path, check, sync_names) as unfinished:
        descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        try:
            _write_all(descriptor, content)
        except OSError as error:
            error.filename = str(path)
            raise
        finally:
            os.close(descriptor)


def write_document(path: Path, document: Mapping[str, Any], mode: int = PRIVATE) -> None:
    """Writes a JSON object, with its checksum; as `write`."""
    text = json.dumps({**document, _SEALED: True, _CHECKSUM: _checksum(document)}, indent=1)
    write(path, text.encode() + b"\n", mode)


def read_document(path: Path, newest_format: int | None = None) -> dict[str, Any]:
    """What `write_document` wrote; an object without a checksum, as earlier releases wrote them, is taken as it is.

    Args:
        newest_format: that this release knows, of documents that have a "format".

    Raises:
        OSError: the file can't be read.
        DamagedFileError: it is not what was written.
        NewerFormatError: its format is a later one.
    """
    try:
        document = json.loads(path.read_bytes())
        sealed, expected = document.pop(_SEALED, None), document.pop(_CHECKSUM, None)
    except (ValueError, AttributeError, TypeError) as error:
        raise DamagedFileError(f"{path} is damaged: {error!r}") from error
    if newest_format is not None:
        refuse_newer(path, document.get("format", 1), newest_format)
    if (sealed is not None or expected is not None) and expected != _checksum(document):
        raise DamagedFileError(f"{path} is damaged: its content does not match its checksum")
    return dict(document)


def refuse_newer(path: Path, format: Any, newest: int) -> None:
    """Raises `NewerFormatError` when a file's format is later than the newest that this release knows."""
    if not isinstance(format, int):
        raise DamagedFileError(f"{path} is damaged: its format is {format!r}")
    if format > newest:
        raise NewerFormatError(
            f"{path} has the format {format}, of a later release of ElasticCB; this one knows formats up to {newest}. "
            "Use that release, or a later one."
        )


def drop_unfinished(folder: Path) -> None:
    """Removes what processes that were killed have left in a folder, which nobody else writes to now."""
    for path in folder.glob(f"{TEMPORARY}*"):
        if path.is_file():
            with contextlib.suppress(OSError):
                path.unlink()


def append(descriptor: int, content: bytes) -> None:
    """Adds to a file that was opened for appending; it is as before when `OSError` is raised.

    Raises `ReplacedFileError` when another file has taken its place, or none.
    """
    try:
        before = os.fstat(descriptor)
        if not before.st_nlink:
            raise ReplacedFileError
        try:
            _write_all(descriptor, content)
        except OSError:
            os.ftruncate(descriptor, before.st_size)
            raise
    except OSError as error:
        if error.errno == errno.ESTALE:  # as NFS says that the file is gone
            raise ReplacedFileError from error
        raise


def _write_all(descriptor: int, content: bytes) -> None:
    """`os.write` may write a part alone, as when the room ends there; the next call gives the reason."""
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def digest_of(path: Path) -> Digest:
    """Of a file, which is read through."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            size += len(chunk)
    return Digest(size, digest.hexdigest())


def _checksum(document: Mapping[str, Any]) -> str:
    # As it is read again: keys that are numbers are text then.
    text = json.dumps(json.loads(json.dumps(document)), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def sync_all(folder: Path) -> None:
    """Returns when all files below a folder are on the disk."""
    for path in [*folder.rglob("*"), folder]:
        sync(path)


def sync(path: Path) -> None:
    """Returns when a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
