"""Starts the page of a job beside the job, and ends it with it."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from elasticcb.process.import_path import python_code

_LIBRARIES = ("starlette", "uvicorn")
_END_SECONDS = 10.0  # for a last message to browsers


def missing_libraries() -> str:
    """What has to be installed, in words; "": nothing."""
    missing = [name for name in _LIBRARIES if importlib.util.find_spec(name) is None]
    if not missing:
        return ""
    return f"The dashboard needs the Python module {missing[0]}. Install it with: pip install 'elasticcb[dashboard]'"


@contextlib.contextmanager
def page_beside(folder: str | Path, wanted: bool) -> Iterator[None]:
    """Within it, a process serves the page of the job in a folder, and prints its address once the job has begun.

    Args:
        wanted: else there is none.
    """
    if not wanted:
        yield
        return
    arguments = ["dashboard", str(folder), f"--parent={os.getpid()}"]
    # In a session of its own: Ctrl-C goes to the job, whose end the page is to show.
    process = subprocess.Popen(
        [sys.executable, "-c", python_code("elasticcb.cli.main"), *arguments],
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
