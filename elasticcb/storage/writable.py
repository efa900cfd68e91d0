"""Tests whether a job can write to its folders before it starts: permissions, read-only mounts, invalid names."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path


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
        return f"can't be written to because {nearest} can't: {error.strerror}"
    try:
        Path(trial, path.relative_to(nearest)).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return f"can't be created: {error.strerror}"
    finally:
        shutil.rmtree(trial, ignore_errors=True)
    return ""
