"""Folders of jobs: the names of new ones, and how commands find them."""

from __future__ import annotations

import difflib
import re
import time
from collections.abc import Sequence
from pathlib import Path

from elasticcb.clients.running_master import holds_job, refuse_cluster
from elasticcb.errors import UsageError
from elasticcb.settings import Command

JOBS = "jobs"  # below the working directory
LATEST = "latest"
_NAME = re.compile(r"[a-z]+-(.+)-(\d{8}-\d{6})(?:-(\d+))?")  # command, job, time, number
_MOST_LISTED = 3


def new_folder(parent: Path, command: Command, name: str) -> Path:
    """Creates a folder that no other job has, even one started in the same second.

    Raises `UsageError` if it can't be created.
    """
    stamp = f"{command.value}-{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    for number in range(1, 1000):
        path = parent / (stamp if number == 1 else f"{stamp}-{number}")
        try:
            path.mkdir(mode=0o700, parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise UsageError(f"The job's folder {path} can't be created: {error}. Choose another --job_dir.") from error
        return path
    raise UsageError(f"No unused folder name like {parent / stamp} was found. Choose a --job_dir.")


def find_job(job: str) -> Path:
    """The folder of a job, running or ended.

    Args:
        job: the folder, its name below `jobs`, a `--job_name` (the newest such job), or "latest".

    Raises:
        UsageError: there is none, or the folder is that of a `Cluster`.
    """
    parent = Path.cwd() / JOBS
    found = _newest_first(parent)
    names = [match[0] for match in found]
    folders = [Path(job).expanduser().absolute(), parent / job]
    for folder in folders:
        if holds_job(folder):
            return folder
    for match in found:
        if job in (LATEST, match[1]):
            return parent / match[0]
    for folder in filter(Path.is_dir, folders):
        refuse_cluster(folder)
        raise UsageError(f"{folder} is not the folder of a job. {_expected(job, names)}")
    tried = f"neither {folders[0]} nor {folders[1]} exists" if job != LATEST else f"{parent} contains no jobs"
    raise UsageError(f"There is no job {job}: {tried}. {_expected(job, names)}")


def _newest_first(parent: Path) -> Sequence[re.Match[str]]:
    """The names of the folders that commands have made there."""
    try:
        found = [match for entry in parent.iterdir() if (match := _NAME.fullmatch(entry.name))]
    except OSError:
        return []
    return sorted(found, key=lambda match: (match[2], int(match[3] or 1)), reverse=True)


def _expected(job: str, names: list[str]) -> str:
    text = "Expected the folder that the job printed in its first line, or the name of a job"
    close = difflib.get_close_matches(Path(job).name, names, n=_MOST_LISTED, cutoff=0.5) or names[:_MOST_LISTED]
    text += f". Jobs here: {', '.join(close)}" if close else ""
    return f"{text}. A job on Kubernetes needs --namespace."
