"""Private folders for a job's secrets: its token, the key of its CA, its logs."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from pathlib import Path

from elasticcb.errors import UsageError


def make_private(folder: Path, by_link: bool = True) -> None:
    """Creates a folder, or restricts an existing one, so that only its owner can access it, as far as permitted.

    An existing folder for all users (such as /tmp) is not changed.

    Raises:
        UsageError: it belongs to another user. Root may use any folder (for example one mounted into a container), and
            everyone may use root's.
        OSError: it can't be created.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat() if by_link else folder.lstat()
    if stat.S_ISLNK(found.st_mode):
        raise UsageError(f"{folder} is a symbolic link. Expected a folder or an unused path. Remove the link.")
    if _is_another_users(folder, found.st_uid):
        raise UsageError(
            f"{folder} belongs to another user (uid {found.st_uid}), who could read and replace a job's keys there. "
            "Choose your own folder, or one that does not exist."
        )
    if found.st_mode & 0o077 and not found.st_mode & stat.S_ISVTX:
        with contextlib.suppress(OSError):  # root's, or its file system does not support modes
            folder.chmod(0o700)


def check_temporary(place: str) -> None:
    """Raises `UsageError` if all users can replace files of this user in a folder for temporary files: they can write
    to it or to a parent, and it is not sticky. Members of a group that shares a folder are trusted."""
    path = Path(place).resolve()
    for folder in (path, *path.parents):
        mode = folder.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise UsageError(
                f"All users can write to {folder} (mode {stat.S_IMODE(mode):o}), and could replace a job's files in "
                f"{place}. Make it sticky (chmod +t {folder}), or set the environment variable TMPDIR to another "
                "folder for temporary files."
            )


def _is_another_users(folder: Path, owner: int) -> bool:
    if os.geteuid() in (0, owner) or owner == 0:
        return False
    with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=folder) as own:
        return os.fstat(own.fileno()).st_uid != owner  # a file system may map all users to one, as NFS can
    return True
