"""Starts the dashboard of a job together with the job, and ends it with the job."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from elasticcb.process.import_path import python_code
from elasticcb.process.system import missing_module
from elasticcb.storage import durable

PAGE_FILE = "dashboard.json"
_LIBRARIES = ("starlette", "uvicorn")
_END_SECONDS = 10.0  # seconds for a last message to browsers


def missing_libraries() -> str:
    """Message about what must be installed; "": nothing."""
    return missing_module("The dashboard", "dashboard", *_LIBRARIES)


def line_about(address: str) -> str:
    """The message with the address of a dashboard."""
    return f"The dashboard of the job: {address}"


def published_address(folder: str | Path) -> str:
    """Address of the dashboard of the job in a folder; "": it is not served yet."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        return str(durable.read_document(Path(folder, PAGE_FILE))["address"])
    return ""


@contextlib.contextmanager
def page_beside(folder: str | Path, wanted: bool, displayed: bool = False) -> Iterator[None]:
    """While it is active, a process serves the dashboard of the job in a folder, once the job has started.

    Args:
        displayed: the job's display shows the address from `published_address`, because it would overwrite the output
            of another process on a terminal. Otherwise the dashboard process prints the address.
    """
    if not wanted:
        yield
        return
    arguments = ["dashboard", str(folder), f"--parent={os.getpid()}", *(["--publish"] if displayed else [])]
    Path(folder, PAGE_FILE).unlink(missing_ok=True)  # of a killed command
    # In its own session: Ctrl-C goes to the job, and the page must show how the job ends.
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
