"""Local folders: temporary ones, whose use other processes can detect; and whether a job can write to a folder, before
it starts: permissions, read-only mounts, invalid names.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from elasticcb.storage.folder_lock import FolderLock, held_if_free

_PREFIX = "elasticcb-"
_YOUNG_SECONDS = 60.0  # its owner may be about to lock it


class TemporaryFolder:
    """A new folder that only this user can read, locked until it is removed or this process ends. A context manager
    that yields its path.
    """

    def __init__(self, parent: Path | None = None) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        self._lock = FolderLock(self.path)
        self._lock.take()

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.release()

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *error: object) -> None:
        self.remove()


def abandoned_folders(parent: Path | None = None, least_age_seconds: float = _YOUNG_SECONDS) -> Iterator[Path]:
    """Such folders of this user whose owners were killed; each is locked until the next one is requested.

    Args:
        least_age_seconds: younger folders are skipped; 0 if nobody creates any meanwhile.
    """
    for folder in sorted((parent or Path(tempfile.gettempdir())).glob(f"{_PREFIX}*")):
        with contextlib.suppress(OSError):  # it no longer exists
            status = folder.lstat()
            is_young = time.time() - status.st_mtime < least_age_seconds
            if status.st_uid != os.getuid() or folder.is_symlink() or is_young:
                continue
            with held_if_free(folder) as is_free:
                if is_free:
                    yield folder


def problem_of_folder(path: Path) -> str:
    """Why a folder can't be created at `path` or written to; "": it can. Leaves nothing behind.

    Args:
        path: absolute path; it and its parent folders need not exist.
    """
    nearest = path
    while not os.path.lexists(nearest) and nearest != nearest.parent:
        nearest = nearest.parent
    if not nearest.is_dir():
        return "is not a folder" if nearest == path else f"can't be created because {nearest} is not a folder"
    try:
        trial = tempfile.mkdtemp(prefix=".elasticcb-", dir=nearest)
    except OSError as error:
        because = "" if nearest == path else f" because {nearest} can't"
        return f"can't be written to{because}: {error.strerror}"
    try:
        Path(trial, path.relative_to(nearest)).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return f"can't be created: {error.strerror}"
    finally:
        shutil.rmtree(trial, ignore_errors=True)
    return ""


def files_below(folder: Path) -> list[tuple[str, Path]]:
    """All files below a folder, in order: names with `/`, and paths."""
    return [(path.relative_to(folder).as_posix(), path) for path in sorted(folder.rglob("*")) if path.is_file()]


def next_numbered(folder: str | Path) -> Path:
    """The path of the next numbered version in a folder: TensorFlow Serving loads the highest number."""
    there = Path(folder)
    names = [entry.name for entry in there.iterdir()] if there.is_dir() else []
    return there / str(max((int(name) for name in names if name.isdecimal()), default=0) + 1)
