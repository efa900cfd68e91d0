"""Whether a job could write where its flags say, tried out before it starts: rights, read-only mounts, odd names."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path


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
