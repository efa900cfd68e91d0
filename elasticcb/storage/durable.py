"""Durable writes of files that a job relies on later.

A file is replaced atomically: it is written next to its destination under a temporary name, synced to disk, read back
and compared, and renamed; until then, the previous file is unchanged. JSON documents contain a checksum.
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

TEMPORARY = ".tmp-"  # prefix of unfinished files
PRIVATE, SHARED = 0o600, 0o666
_CHECKSUM, _SEALED = "checksum", "sealed"  # keys in documents: both, so that damage to one does not hide the other
_CHUNK_BYTES = 4 << 20


class DamagedFileError(ValueError):
    """A file is damaged: its content is not what was written."""


class ReplacedFileError(Exception):
    """The file to append to was replaced or is gone."""


class NewerFormatError(Exception):
    """A later release wrote the file."""


class Digest(NamedTuple):
    bytes: int
    sha256: str


@contextlib.contextmanager
def replacing(
    path: Path, check: Callable[[Path], object] = lambda unfinished: None, sync_names: bool = True
) -> Iterator[Path]:
    """Yields a path next to `path` to write a file to, which replaces `path` at the end of the block.

    Args:
        check: called with the unfinished file when it is on the disk; raises if its content is wrong.
        sync_names: whether the rename is durable afterwards; if not, the previous file may reappear after a crash of
            the machine until the caller has called `sync` for its folder.

    Raises `OSError`; then, and if the block raises, `path` is unchanged and the temporary file is removed.
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


def write(path: Path, content: bytes, mode: int = PRIVATE, sync_names: bool = True) -> None:
    """Writes a file.

    Args:
        mode: permissions, reduced by the umask: `PRIVATE`, or `SHARED` with other users.

    Raises `OSError`, as for `replacing`.
    """

    def check(unfinished: Path) -> None:
        if unfinished.read_bytes() != content:
            raise OSError(f"the content of {unfinished} is not what was written to it")

    with replacing(path, check, sync_names) as unfinished:
        descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        try:
            _write_all(descriptor, content)
        except OSError as error:
            error.filename = str(path)
            raise
        finally:
            os.close(descriptor)


def write_document(path: Path, document: Mapping[str, Any]) -> None:
    """Writes a JSON object with its checksum, like `write`."""
    write(path, document_of(document))


def document_of(document: Mapping[str, Any]) -> bytes:
    """The content of the file with a JSON object and its checksum, for `document_in`."""
    return json.dumps({**document, _SEALED: True, _CHECKSUM: _checksum(document)}, indent=1).encode() + b"\n"


def read_document(path: Path) -> dict[str, Any]:
    """Reads a document of `write_document`. Raises `OSError` if that can't be done, and the errors of `document_in`."""
    return document_in(path.read_bytes(), path)


def document_in(content: bytes, place: Path | str, newest_format: int | None = None) -> dict[str, Any]:
    """The document in the content of the file at `place`; an object without a checksum is not verified.

    Args:
        newest_format: newest format that this release supports, for documents that have a "format".

    Raises:
        DamagedFileError: the file is damaged.
        NewerFormatError: its format is newer.
    """
    try:
        document = json.loads(content)
        sealed, expected = document.pop(_SEALED, None), document.pop(_CHECKSUM, None)
    except (ValueError, AttributeError, TypeError, RecursionError) as error:
        raise DamagedFileError(f"{place} is damaged: {error!r}") from error
    if newest_format is not None:
        refuse_newer(place, document.get("format", 1), newest_format)
    if (sealed is not None or expected is not None) and expected != _checksum(document):
        raise DamagedFileError(f"{place} is damaged: its content does not match its checksum")
    return dict(document)


def misfit(value: Any, shape: Any, name: str = "") -> str:
    """Which part of a JSON object has not its shape, for example "files[0].bytes"; "": all have.

    Args:
        shape: a type; {key: shape}, where other keys are free; or [the shape of all items].
    """
    if not isinstance(value, type(shape) if isinstance(shape, (dict, list)) else shape):
        return name or "it"
    if isinstance(shape, dict):
        parts = (misfit(dict(value).get(key), each, f"{name}.{key}".lstrip(".")) for key, each in shape.items())
    else:
        items = enumerate(value) if isinstance(shape, list) else ()
        parts = (misfit(each, shape[0], f"{name}[{index}]") for index, each in items)
    return next(filter(None, parts), "")


def refuse_newer(path: Path | str, format: Any, newest: int) -> None:
    """Raises `NewerFormatError` if a file's format is newer than this release supports."""
    if not isinstance(format, int):
        raise DamagedFileError(f"{path} is damaged: its format is {format!r}")
    if format > newest:
        raise NewerFormatError(
            f"{path} has the format {format} of a later release of ElasticCB; this release supports formats up to "
            f"{newest}. Use that release or a later one."
        )


def drop_unfinished(folder: Path) -> None:
    """Removes unfinished files of killed processes from a folder that nobody else is writing to."""
    for path in folder.glob(f"{TEMPORARY}*"):
        if path.is_file():
            with contextlib.suppress(OSError):
                path.unlink()


def append(descriptor: int, content: bytes) -> None:
    """Appends to an open file; if it raises `OSError`, the file is unchanged.

    Raises `ReplacedFileError` if the file was replaced or removed.
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
        if error.errno == errno.ESTALE:  # NFS reports a removed file in this way
            raise ReplacedFileError from error
        raise


def _write_all(descriptor: int, content: bytes) -> None:
    """`os.write` may write only a part, for example if the disk is full; the next call then raises the reason."""
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def digest_of(path: Path) -> Digest:
    """SHA-256 of a file, which is read completely."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            size += len(chunk)
    return Digest(size, digest.hexdigest())


def _checksum(document: Mapping[str, Any]) -> str:
    # As it will be read: JSON converts number keys to text.
    text = json.dumps(json.loads(json.dumps(document)), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def sync_all(folder: Path) -> None:
    """Syncs all files below a folder to disk."""
    for path in [*folder.rglob("*"), folder]:
        sync(path)


def sync(path: Path) -> None:
    """Syncs a file, or the names in a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
