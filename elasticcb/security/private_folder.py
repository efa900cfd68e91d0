"""Folders for what a job keeps to its user: its token, the key of its CA, its logs."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from pathlib import Path

from elasticcb.errors import UsageError


def make_private(folder: Path, by_link: bool = True) -> None:
    """Makes a folder, or one that is there, its owner's alone, as far as this process may.

    One that is there for all users (as /tmp) stays so.

    Args:
        by_link: whether `folder` may be a symbolic link to one.

    Raises:
        UsageError: it is another user's. Root may use it (as one that is mounted into a container), and all may use
            root's.
        OSError: it can't be made.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat() if by_link else folder.lstat()
    if stat.S_ISLNK(found.st_mode):
        raise UsageError(f"{folder} is a symbolic link. Expected a folder, or nothing there. Remove the link.")
    if _is_another_users(folder, found.st_uid):
        raise UsageError(
            f"{folder} belongs to another user (uid {found.st_uid}), who could read and replace "
            "the keys of a job there. Name a folder of your own, or one that does not exist."
        )
    if found.st_mode & 0o077 and not found.st_mode & stat.S_ISVTX:
        with contextlib.suppress(OSError):  # root's, or its file system knows no modes
            folder.chmod(0o700)


def check_temporary(place: str) -> None:
    """Raises `UsageError` when all users may replace what this one makes in a folder for temporary files: they may
    write to it, or to a folder above it, and it is not sticky. A group is trusted with the folders that it shares."""
    path = Path(place).resolve()
    for folder in (path, *path.parents):
        mode = folder.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise UsageError(
                f"{folder} can be written to by all users (mode {stat.S_IMODE(mode):o}), who could replace the files "
                f"of a job in {place}. Make it sticky (chmod +t {folder}), or name another folder for temporary files "
                "by the environment variable TMPDIR."
            )


def _is_another_users(folder: Path, owner: int) -> bool:
    if os.geteuid() in (0, owner) or owner == 0:
        return False
    with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=folder) as own:
        return os.fstat(own.fileno()).st_uid != owner  # a file system may take all users for one, as NFS can
    return True
