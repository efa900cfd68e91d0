"""`elasticcb clean`: removes leftovers of old jobs."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import rich_click as click

from elasticcb.cli.command import CONTEXT
from elasticcb.cli.job_folders import JOBS, find_job
from elasticcb.errors import ElasticCBError
from elasticcb.process.wording import how_many
from elasticcb.security import socket_folder
from elasticcb.settings import JOURNAL_FILE, RECOVERY_FOLDER
from elasticcb.storage import temporary
from elasticcb.storage.folder_lock import held_if_free


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
    for found in (temporary.abandoned_folders(), socket_folder.abandoned_folders(), _recovery_folders(folders)):
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
        if folder.is_dir() and folder.stat().st_uid == os.getuid():
            with held_if_free(job) as is_free:
                if is_free and _is_done(job):
                    yield folder


def _is_done(job: Path) -> bool:
    from elasticcb.master.journal import Journal

    path = job / JOURNAL_FILE
    try:
        return path.is_file() and Journal(path).memory.over
    except ElasticCBError:  # damaged, or of a later release
        return False


def _bytes_of(folder: Path) -> int:
    paths = (os.path.join(place, name) for place, _, names in os.walk(folder) for name in names)
    return sum(os.lstat(path).st_size for path in paths if os.path.lexists(path))
