"""How a command finds the master of a job that runs: by a file in the job's folder, which its owner alone can read."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from elasticcb.errors import UsageError

_FILE = "master.json"


class RunningMaster(NamedTuple):
    """Where the master of a job listens, and the token that calls to it must carry."""

    address: str
    token: str


@contextlib.contextmanager
def published(folder: Path, master: RunningMaster) -> Iterator[None]:
    """Within it, commands of the same user find `master` by the job's folder."""
    path, unfinished = folder / _FILE, folder / f".tmp-{_FILE}"
    unfinished.unlink(missing_ok=True)
    descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump(master._asdict(), file)
    unfinished.rename(path)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def running_master(job: str) -> RunningMaster:
    """That of the job in a folder. Raises `UsageError` when no job runs there."""
    try:
        return RunningMaster(**json.loads(Path(job, _FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        what = "is not the folder of a job that runs" if Path(job).is_dir() else "is no folder"
        raise UsageError(f"{job} {what}. Expected one with the file {_FILE}, whose master is up.") from None
