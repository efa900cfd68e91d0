"""Folders of jobs: the names of new ones, how commands find them, and `elasticcb clean`, which removes old ones."""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import rich_click as click

from elasticcb.cli.command import CONTEXT
from elasticcb.clients.local_job import StoredJob
from elasticcb.clients.running_master import COMMAND_LOCK, MASTER_FILE, holds_job, is_of_cluster, refuse_cluster
from elasticcb.errors import (
    CallbackError,
    CheckpointError,
    DataError,
    ElasticCBError,
    ExitCode,
    ModelFileError,
    UsageError,
)
from elasticcb.process.wording import how_many
from elasticcb.security import socket_folder
from elasticcb.settings import JOB_FILE, JOURNAL_FILE, RECOVERY_FOLDER, STATUS_FILE, Command
from elasticcb.storage import durable, local_folders
from elasticcb.storage.folder_lock import held_if_free
from elasticcb.storage.remote_files import is_url

JOBS = "jobs"  # below the working directory
LATEST = "latest"
_NAME = re.compile(r"[a-z]+-(.+)-(\d{8}-\d{6})(?:-(\d+))?")  # command, job, time, number
_STAMP = "%Y%m%d-%H%M%S"
_MOST_LISTED = 3
_REFUSALS = (CallbackError, CheckpointError, DataError, ModelFileError)


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


def was_refused(folder: Path) -> bool:
    """Whether a job has failed before its first task by what its user gave it: its error tells all. (Of processes that
    could not start, the logs tell more.)"""
    with contextlib.suppress(OSError, ValueError):
        status = durable.read_document(folder / STATUS_FILE)
        return not status.get("tasks") and status.get("error_type") in {each.__name__ for each in _REFUSALS}
    return False


def remove_unbegun(folder: Path) -> None:
    """Removes the folder that a command created for a job, which was refused before it began."""
    from elasticcb.master.journal import Journal

    journal = folder / JOURNAL_FILE
    with contextlib.suppress(OSError, ElasticCBError):
        if journal.exists() and journal.stat().st_size and Journal(journal).memory.begun:
            return
        shutil.rmtree(folder, ignore_errors=True)
        if folder.parent == Path.cwd() / JOBS:
            folder.parent.rmdir()  # unless it has other jobs


@contextlib.contextmanager
def resumes(folder: Path) -> Iterator[None]:
    """While active, the job in a folder is resumed. If that fails before anything is trained, commands list the job as
    they did before."""
    lock = folder / COMMAND_LOCK
    version, begun = _version(folder), lock.stat() if lock.exists() else None
    try:
        yield
    except (ElasticCBError, SystemExit) as error:
        code = error.code if isinstance(error, SystemExit) else error.exit_code
        if begun is not None and code != ExitCode.INTERRUPTED and _version(folder) == version:
            os.utime(lock, ns=(begun.st_atime_ns, begun.st_mtime_ns))
        raise


def _version(folder: Path) -> int:
    """The version of the model that a job's tasks have reached."""
    from elasticcb.master.journal import memory_in

    with contextlib.suppress(ElasticCBError):
        return memory_in(folder / JOURNAL_FILE).version
    return 0


def known_jobs(parent: Path) -> list[tuple[Path, float]]:
    """The folders of jobs and of Python programs in `parent`, newest first, each with when it was last started or
    resumed, in seconds since 1970."""
    try:
        entries = [entry for entry in parent.iterdir() if entry.is_dir()]
    except OSError:
        return []
    begun = {entry: found for entry in entries if (found := _begun(entry) or _begun_by_program(entry)) is not None}
    return [(entry, begun[entry][0]) for entry in sorted(begun, key=begun.__getitem__, reverse=True)]


def _begun_by_program(folder: Path) -> tuple[float, int] | None:
    for name in (MASTER_FILE, "logs") if is_of_cluster(folder) else ():
        with contextlib.suppress(OSError):
            return (folder / name).stat().st_mtime, 1
    return None


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
    of_commands = (folder for folder, _ in known_jobs(parent) if not is_of_cluster(folder))
    found = [folder for folder in of_commands if not only_training or _trains(folder)]
    names = [folder.name for folder in found]
    folders = [Path(job).expanduser().absolute(), parent / job]
    for folder in folders:
        if holds_job(folder):
            return folder
    for folder in found:
        if job == LATEST or ((match := _NAME.fullmatch(folder.name)) and job == match[1]):
            return folder
    for folder in filter(os.path.isdir, folders):
        os.listdir(folder)  # of another user, it can't be read
        refuse_cluster(folder)
        raise UsageError(f"{folder} is not the folder of a job. {_expected(job, names)}")
    kind = "training jobs" if only_training else "jobs"
    tried = f"neither {folders[0]} nor {folders[1]} exists" if job != LATEST else f"{parent} contains no {kind}"
    what = "latest job" if job == LATEST else f"job {job}"
    raise UsageError(f"There is no {what}: {tried}. {_expected(job, names)}")


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
    return folder.name.startswith(f"{Command.TRAIN.value}-") or os.path.exists(folder / JOB_FILE)


def _expected(job: str, names: list[str]) -> str:
    text = "Expected the folder that the job printed in its first line, or the name of a job"
    close = difflib.get_close_matches(Path(job).name, names, n=_MOST_LISTED, cutoff=0.5) or names[:_MOST_LISTED]
    text += f". Jobs here: {', '.join(close)}" if close else ""
    return f"{text}. A job on Kubernetes needs --namespace."


@click.command(context_settings=CONTEXT)
@click.argument("jobs", metavar="[JOB]...", nargs=-1)
@click.option("--dry_run", is_flag=True, help="Show what would be removed, without removing anything.")
def clean(jobs: tuple[str, ...], dry_run: bool) -> None:
    """Remove leftovers of old jobs from this machine.

    Leftovers are temporary folders and sockets of killed jobs, and recovery files of finished jobs. JOB is the folder
    or the name of a job, as for `status`; without it, all jobs below `jobs` are checked. Files of jobs that are running
    or can be resumed are kept, as are logs, checkpoints and files of other users.

    \b
    Examples:
      elasticcb clean --dry_run
      elasticcb clean jobs/train-mnist-20260101-120000
    """
    total = count = 0
    parent = Path.cwd() / JOBS
    folders = [find_job(job) for job in jobs] or sorted(parent.iterdir() if parent.is_dir() else ())
    for found in (local_folders.abandoned_folders(), socket_folder.abandoned_folders(), _recovery_folders(folders)):
        for folder in found:
            size = _bytes_of(folder)
            if not dry_run:
                shutil.rmtree(folder, ignore_errors=True)
            print(f"{size / 1e6:10,.1f} MB  {folder}")
            total, count = total + size, count + 1
    print(f"{'Would remove' if dry_run else 'Removed'} {how_many(count, 'folder')}, {total / 1e6:,.1f} MB.")


def _recovery_folders(jobs: list[Path]) -> Iterator[Path]:
    """Folders of finished jobs; each is locked until the next one is requested."""
    for job in jobs:
        folder = job / RECOVERY_FOLDER
        if os.path.isdir(folder) and folder.stat().st_uid == os.getuid():
            with held_if_free(job) as is_free:
                if is_free and _is_done(job):
                    yield folder


def _is_done(job: Path) -> bool:
    from elasticcb.master.journal import memory_in

    with contextlib.suppress(ElasticCBError):  # damaged, or of a later release
        return memory_in(job / JOURNAL_FILE).over
    return False


def _bytes_of(folder: Path) -> int:
    paths = (os.path.join(place, name) for place, _, names in os.walk(folder) for name in names)
    return sum(os.lstat(path).st_size for path in paths if os.path.lexists(path))
