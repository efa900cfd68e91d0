"""Folders of jobs: the names of new ones, and how commands find them."""

from __future__ import annotations

import contextlib
import difflib
import re
import time
from pathlib import Path

from elasticcb.clients.running_master import COMMAND_LOCK, holds_job, refuse_cluster
from elasticcb.clients.stored_job import StoredJob
from elasticcb.errors import UsageError
from elasticcb.settings import JOB_FILE, Command
from elasticcb.storage.remote_files import is_url

JOBS = "jobs"  # below the working directory
LATEST = "latest"
_NAME = re.compile(r"[a-z]+-(.+)-(\d{8}-\d{6})(?:-(\d+))?")  # command, job, time, number
_STAMP = "%Y%m%d-%H%M%S"
_MOST_LISTED = 3


def new_folder(parent: Path, command: Command, name: str) -> Path:
    """Creates a folder that no other job has, even one started in the same second.

    Raises `UsageError` if it can't be created.
    """
    stamp = f"{command.value}-{name}-{time.strftime(_STAMP)}"
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


def find_job(job: str, only_training: bool = False) -> Path:
    """The folder of a job, running or ended.

    Args:
        job: the folder, its URL, its name below `jobs`, a `--job_name` (the newest such job), or "latest".
        only_training: of the jobs of a name, and for "latest", find the newest training job, because the command has
            no use for jobs that evaluate or predict.

    Raises:
        UsageError: there is none, or the folder is that of a `Cluster`, or on another machine.
    """
    if is_url(job):
        return StoredJob(job).folder()
    parent = Path.cwd() / JOBS
    found = [folder for folder in _newest_first(parent) if not only_training or _trains(folder)]
    names = [folder.name for folder in found]
    folders = [Path(job).expanduser().absolute(), parent / job]
    for folder in folders:
        if holds_job(folder):
            return folder
    for folder in found:
        if job == LATEST or ((match := _NAME.fullmatch(folder.name)) and job == match[1]):
            return folder
    for folder in filter(Path.is_dir, folders):
        refuse_cluster(folder)
        raise UsageError(f"{folder} is not the folder of a job. {_expected(job, names)}")
    kind = "training jobs" if only_training else "jobs"
    tried = f"neither {folders[0]} nor {folders[1]} exists" if job != LATEST else f"{parent} contains no {kind}"
    what = "latest job" if job == LATEST else f"job {job}"
    raise UsageError(f"There is no {what}: {tried}. {_expected(job, names)}")


def _newest_first(parent: Path) -> list[Path]:
    """The folders of commands' jobs there, by when a command last started or resumed the job."""
    try:
        begun = {entry: found for entry in parent.iterdir() if (found := _begun(entry)) is not None}
    except OSError:
        return []
    return sorted(begun, key=begun.__getitem__, reverse=True)


def _begun(folder: Path) -> tuple[float, int] | None:
    """When a command last had the job in a folder, in seconds since the epoch, and the number of its name; None: it is
    not the folder of a command's job."""
    match = _NAME.fullmatch(folder.name)
    number = int(match[3] or 1) if match else 1
    with contextlib.suppress(OSError):
        return (folder / COMMAND_LOCK).stat().st_mtime, number
    with contextlib.suppress(ValueError):
        return (time.mktime(time.strptime(match[2], _STAMP)), number) if match else None
    return None


def _trains(folder: Path) -> bool:
    return folder.name.startswith(f"{Command.TRAIN.value}-") or (folder / JOB_FILE).exists()


def _expected(job: str, names: list[str]) -> str:
    text = "Expected the folder that the job printed in its first line, or the name of a job"
    close = difflib.get_close_matches(Path(job).name, names, n=_MOST_LISTED, cutoff=0.5) or names[:_MOST_LISTED]
    text += f". Jobs here: {', '.join(close)}" if close else ""
    return f"{text}. A job on Kubernetes needs --namespace."
