"""Whether a job could write where its flags say, tried out before it starts: rights, read-only mounts, odd names."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile
from pathlib import Path


def make_private(folder: Path) -> None:
    """Makes a folder, or one that is there, its owner's alone, as far as this process may.

    One that is there for all users (as /tmp) stays so. Raises `OSError` when it can't be made.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    mode = folder.stat().st_mode
    if mode & 0o077 and not mode & stat.S_ISVTX:
        with contextlib.suppress(OSError):  # another user's
            folder.chmod(0o700)


def problem_of_folder(path: Path) -> str:
    """Why no folder can be made at `path`, or nothing in it, in words; "": it can. Nothing is left there.

    Args:
        path: absolute; it and folders above it may not exist.
    """
    nearest = path
    while not os.path.lexists(nearest) and nearest != nearest.parent:
        nearest = nearest.parent
    if not nearest.is_dir():
        return "is not a folder" if nearest == path else f"can't be made, since {nearest} is not a folder"
    try:
        trial = tempfile.mkdtemp(prefix=".elasticcb-", dir=nearest)
    except OSError as error:
        return f"can't be written to, since {nearest} can't: {error.strerror}"
    try:
        Path(trial, path.relative_to(nearest)).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return f"can't be made: {error.strerror}"
    finally:
        shutil.rmtree(trial, ignore_errors=True)
    return ""
