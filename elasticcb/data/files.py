"""Finds the files of a data origin."""

from __future__ import annotations

import fnmatch
import functools
import logging
import os
import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import PurePosixPath

from elasticcb.data.content import COMPRESSIONS
from elasticcb.errors import DataError
from elasticcb.process.wording import how_many
from elasticcb.storage.remote_files import as_path, is_url

logger = logging.getLogger(__name__)

_PART_OF_MANY = re.compile(r"-\d+-of-\d+(?=\.|$)")  # train.tfrecord-00000-of-00010
_MAGIC = frozenset("*?[")


def endings_of(name: str) -> tuple[str, str]:
    """The file extensions of format and compression: (".csv", ".gz"), (".npy", "")."""
    path = PurePosixPath(_PART_OF_MANY.sub("", name.lower()))
    compression = path.suffix if path.suffix in COMPRESSIONS else ""
    return PurePosixPath(path.name.removesuffix(compression)).suffix, compression


def list_files(origin: str, may_lack: bool = False, before: Collection[str] = ()) -> list[str]:
    """The files of `origin`, sorted and without duplicates: absolute paths or URLs.

    `origin` is a path, a glob, a folder (searched recursively, following links), a URL of one of these, or several
    joined by commas. Folders and globs skip files and folders whose names start with `.` or `_`; globs also skip
    folders that can't be listed. If links give a local file several names, the first one is used.

    Args:
      may_lack: a part may match nothing.
      before: names of an earlier listing: a new name of one of these files is not used.

    Raises `DataError` if a part matches nothing, a folder can't be listed, or a link in a folder is broken.
    """
    if not is_url(origin) and os.path.isfile(os.path.expanduser(origin)):
        # its name may contain a comma or a star
        return _with_readable_names([os.path.abspath(os.path.expanduser(origin))])
    parts = [part.strip() for part in origin.split(",") if part.strip()]
    if not parts:
        raise DataError(
            f"The data origin {origin!r} is empty. Expected a path, a glob, a folder or a URL, or several joined by "
            "commas."
        )
    return _with_readable_names(
        _without_doubles(sorted({name for part in parts for name in _files_of(part, may_lack)}), before)
    )


def _with_readable_names(names: list[str]) -> list[str]:
    """Checks that `names` are valid text, because they are sent between processes."""
    for name in names:
        try:
            name.encode()
        except UnicodeEncodeError:
            raise DataError(f"The name of the file {os.fsencode(name)!r} is not UTF-8. Rename it.") from None
    return names


def _without_doubles(names: Sequence[str], before: Collection[str]) -> list[str]:
    first: dict[str, str] = {}  # names by real path
    for name in sorted(names, key=lambda name: name not in before):
        kept = first.setdefault(name if is_url(name) else os.path.realpath(name), name)
        if kept != name:
            _log_once(logging.INFO, f"Skipping {name}: it is the same file as {kept}, by links.")
    return sorted(first.values())


@functools.lru_cache(1000)
def _log_once(level: int, text: str) -> None:
    """Folders may be listed every second."""
    logger.log(level, "%s", text)


def _files_of(part: str, may_lack: bool) -> list[str]:
    part = as_path(part)
    try:
        found = _remote_files(part) if is_url(part) else list(_local_files(part))
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"The data at {part} can't be listed: {type(error).__name__}: {error}") from error
    if not found and not may_lack:
        raise DataError(
            f"There is no data at {part}: it is neither a file nor a folder or glob with files (names that start with "
            "'.' or '_' are ignored). Check the path."
        )
    return found


def _local_files(part: str) -> Iterator[str]:
    path = os.path.abspath(os.path.expanduser(part))
    if os.path.exists(path):
        yield from _files_at(path, skips=False)
    else:
        for match in expanded_glob(path):
            yield from _files_at(match, skips=True)


def _files_at(path: str, skips: bool) -> Iterator[str]:
    """A file, or those in a folder; `skips` folders that can't be listed."""
    if _is_file(path):
        yield path
    for folder in _folders_below(path, skips):
        yield from (
            entry.path for entry in _entries(folder, skips) if not _is_hidden(entry.name) and _is_file(entry.path)
        )


def _is_file(path: str) -> bool:
    """Whether the file exists. Raises `DataError` for a broken link, whose records would otherwise be missing
    silently."""
    if os.path.islink(path) and not os.path.exists(path):
        raise DataError(f"{path} is a link to {os.readlink(path)}, which does not exist. Fix or remove the link.")
    return os.path.isfile(path)


def expanded_glob(path: str) -> Iterator[str]:
    """The files and folders that match a glob, an absolute path. Folders that can't be listed are skipped.

    Not Python's glob, which enters `_temporary` and follows a link to a parent folder 40 times.
    """
    root, *pieces = path.split(os.sep)
    yield from _expanded(root + os.sep, [piece for piece in pieces if piece])


def _expanded(folder: str, pieces: Sequence[str]) -> Iterator[str]:
    if not pieces:
        yield folder
        return
    piece, rest = pieces[0], pieces[1:]
    if piece == "**":
        for below in _folders_below(folder, skips=True):
            if rest:
                yield from _expanded(below, rest)
            else:
                entries = _entries(below, skips=True)
                yield from (entry.path for entry in entries if not (_is_folder(entry) or _is_hidden(entry.name)))
    elif not _MAGIC & set(piece):
        if os.path.exists(os.path.join(folder, piece)):
            yield from _expanded(os.path.join(folder, piece), rest)
    elif os.path.isdir(folder):
        for entry in _entries(folder, skips=True):
            if fnmatch.fnmatchcase(entry.name, piece) and not _is_hidden(entry.name, piece):
                yield from _expanded(entry.path, rest)


def _folders_below(folder: str, skips: bool, above: frozenset[str] = frozenset()) -> Iterator[str]:
    """`folder` and all visible folders below it, following links, except links to a parent folder."""
    real = os.path.realpath(folder)
    if real in above or not os.path.isdir(folder):
        return
    yield folder
    for entry in _entries(folder, skips):
        if _is_folder(entry) and not _is_hidden(entry.name):
            yield from _folders_below(entry.path, skips, above | {real})


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself, or to an inaccessible folder
        return False


def _entries(folder: str, skips: bool) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except PermissionError as error:
        if not skips:
            raise
        _log_once(logging.WARNING, f"Skipping the folder {folder} because it can't be listed: {error}")
        return []


def _remote_files(part: str) -> list[str]:
    import fsspec

    file_system, path = fsspec.core.url_to_fs(part)
    file_system.invalidate_cache()  # s3fs keeps listings
    if file_system.isfile(path):
        return [part]
    if _MAGIC & set(path):
        matches = file_system.glob(path, detail=True)
        folders = [name for name, info in matches.items() if info["type"] == "directory" and "**" not in path]
        found = {*matches, *(below for folder in folders for below in file_system.find(folder))}
    else:
        found = set(file_system.find(path))
    patterns = PurePosixPath(path).parts
    fixed = next((place for place, piece in enumerate(patterns) if _MAGIC & set(piece)), len(patterns))
    visible = [
        name
        for name in found
        if not any(_is_hidden(piece, *patterns[fixed:]) for piece in PurePosixPath(name).parts[fixed:])
    ]
    # Not `unstrip_protocol`, which drops the host of sftp:// and hdfs:// URLs.
    whole = part.rstrip("/")
    prefix = whole.removesuffix(path)
    names = [name for name in visible if file_system.isfile(name)]
    return [file_system.unstrip_protocol(name) if prefix == whole else prefix + name for name in names]


def _is_hidden(name: str, *patterns: str) -> bool:
    """Whether readers ignore a file or folder, as in Hadoop and Spark, unless a pattern includes it."""
    asked_for = any(pattern.startswith((".", "_")) and fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
    return name.startswith((".", "_")) and not asked_for


def listed(files: Sequence[str]) -> str:
    """The first names, for messages."""
    return ", ".join(files[:3]) + (f" and {how_many(len(files) - 3, 'more file')}" if len(files) > 3 else "")
