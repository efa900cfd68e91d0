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
from elasticcb.storage import durable

PAGE_FILE = "dashboard.json"
_LIBRARIES = ("starlette", "uvicorn")
_END_SECONDS = 10.0  # for a last message to browsers


def missing_libraries() -> str:
    """What has to be installed, in words; "": nothing."""
    missing = [name for name in _LIBRARIES if importlib.util.find_spec(name) is None]
    if not missing:
        return ""
    return f"The dashboard needs the Python module {missing[0]}. Install it with: pip install 'elasticcb[dashboard]'"


def line_about(address: str) -> str:
    """What people are shown of a page."""
    return f"The dashboard of the job: {address}"


def published_address(folder: str | Path) -> str:
    """Of the page beside the job in a folder; "": none is served yet."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        return str(durable.read_document(Path(folder, PAGE_FILE))["address"])
    return ""


@contextlib.contextmanager
def page_beside(folder: str | Path, wanted: bool, displayed: bool = False) -> Iterator[None]:
    """Within it, a process serves the page of the job in a folder, from when the job has begun.

    Args:
        wanted: else there is none.
        displayed: the job's display shows the page's address, as `published_address` has it: what another process
            prints would be written over on a terminal. Else that process prints the address.
    """
    if not wanted:
        yield
        return
    arguments = ["dashboard", str(folder), f"--parent={os.getpid()}", *(["--publish"] if displayed else [])]
    Path(folder, PAGE_FILE).unlink(missing_ok=True)  # of a command that was killed
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
        with contextlib.suppress(OSError):
            Path(folder, PAGE_FILE).unlink(missing_ok=True)
