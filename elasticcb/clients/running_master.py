"""How a command finds the master of a running job: through a file in the job's folder that only its owner can read."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from elasticcb.errors import UsageError
from elasticcb.security.credentials import Access
from elasticcb.security.socket_folder import port_of
from elasticcb.security.tls import TLS, TLSFiles
from elasticcb.settings import FIT_FILE, FORK_LOG, HISTORY_FILE, JOB_FILE, JOURNAL_FILE, STATUS_FILE, ClusterSettings
from elasticcb.storage import durable
from elasticcb.storage.folder_lock import FolderLock, is_owned

MASTER_FILE = "master.json"
COMMAND_LOCK = ".command.lock"
_OF_COMMANDS = (JOB_FILE, COMMAND_LOCK)  # files that no `Cluster` has


class RunningMaster(NamedTuple):
    """Address of a job's master, the token for calls, and its TLS files, if any.

    Attributes:
        metrics: address of its metrics, "host:port"; "" if disabled.
        health: address of its health checks, likewise.
    """

    address: str
    token: str
    tls: dict[str, str] | None
    metrics: str = ""
    health: str = ""

    @classmethod
    def of(cls, address: str, access: Access, metrics: str, health: str) -> RunningMaster:
        files = None if access.tls is None else dataclasses.asdict(access.tls.files)
        return cls(address, access.token, files, metrics, health)

    def at_same_ports(self, cluster: ClusterSettings) -> ClusterSettings:
        """Settings for another master to listen on the same ports."""
        addresses = {"port": self.address, "metrics_port": self.metrics, "health_port": self.health}
        ports: dict[str, Any] = {name: port_of(address) for name, address in addresses.items() if address}
        return dataclasses.replace(cluster, **ports)

    @property
    def access(self) -> Access:
        """Raises `UsageError` when the files are unusable."""
        return Access(self.token, None if self.tls is None else TLS.load(TLSFiles(**self.tls)))


@contextlib.contextmanager
def command_runs(folder: Path) -> Iterator[None]:
    """While active, other commands see that a job runs in `folder`, even before its master is up, and while a killed
    master is replaced."""
    with contextlib.ExitStack() as until_end:
        with contextlib.suppress(UsageError):  # masters exclude each other by their own lock
            until_end.enter_context(FolderLock(folder, file=COMMAND_LOCK))
        yield


def is_starting(folder: Path) -> bool:
    """Whether a command runs a job in a folder whose first master is not up yet. Any final state or master address
    found there belongs to an earlier job."""
    began = _written_at(folder / COMMAND_LOCK)  # its owner has written to it
    earlier = all(_written_at(folder / name) < began for name in (MASTER_FILE, STATUS_FILE))
    return earlier and has_command(folder)


def has_command(folder: Path) -> bool:
    """Whether a command runs the job in a folder; False also if unknown."""
    with contextlib.suppress(OSError):
        return is_owned(folder, COMMAND_LOCK)
    return False


def _written_at(path: Path) -> int:
    """In nanoseconds; -1: no such file."""
    with contextlib.suppress(OSError):
        return path.stat().st_mtime_ns
    return -1


@contextlib.contextmanager
def published(folder: Path, master: RunningMaster) -> Iterator[None]:
    """While active, commands of the same user find `master` through the job's folder."""
    durable.write_document(folder / MASTER_FILE, master._asdict())
    try:
        yield
    finally:
        with contextlib.suppress(OSError, UsageError):
            if running_master(folder) == master:  # else it belongs to another master
                (folder / MASTER_FILE).unlink()


def running_master(folder: str | Path) -> RunningMaster:
    """The master of the job in a folder. Raises `UsageError` when no job runs there."""
    try:
        return RunningMaster(**durable.read_document(Path(folder, MASTER_FILE)))
    except (OSError, ValueError, TypeError):
        refuse_cluster(Path(folder))
        raise UsageError(f"{folder} is not the folder of a running job. {_why_not(Path(folder))}") from None


def can_resume(folder: Path) -> bool:
    """Whether `elasticcb resume` can continue the job in a folder, or says that it is done."""
    return all(os.path.isfile(folder / name) for name in (JOB_FILE, JOURNAL_FILE))


def forget_earlier_job(folder: Path) -> None:
    """Removes what an earlier training job left in a folder to be resumed, when a new one begins there."""
    for name in (JOURNAL_FILE, JOB_FILE, FIT_FILE, HISTORY_FILE):
        (folder / name).unlink(missing_ok=True)


def holds_job(folder: Path) -> bool:
    """Whether a folder has a file of a job of a command, or of the processes of a `Cluster`."""
    return _has_any(folder, (MASTER_FILE, STATUS_FILE, "logs", *_OF_COMMANDS))


def is_of_cluster(folder: Path) -> bool:
    """Whether it is the `job_dir` or `directory` of a `Cluster`."""
    begun = _has_any(folder, ("logs/master.log", f"logs/{FORK_LOG}")) or any(folder.glob(f"fit-*/{FIT_FILE}"))
    return begun and not _has_any(folder, _OF_COMMANDS)


def refuse_cluster(folder: Path) -> None:
    """Raises `UsageError` for the folder of a `Cluster`, whose program does not run."""
    if is_of_cluster(folder):
        raise UsageError(
            f"{folder} belongs to an elasticcb.Cluster, and its Python program does not run it now. See its log: "
            f"elasticcb logs {shlex.quote(str(folder))}. Run the program again to resume a `fit` with job_dir."
        )


def _has_any(folder: Path, names: Iterable[str]) -> bool:
    return any(os.path.exists(folder / name) for name in names)  # False for another user's folder, or a long name


def _why_not(folder: Path) -> str:
    if os.path.isfile(folder / STATUS_FILE):
        return f"The job has ended: `elasticcb status {shlex.quote(str(folder))}` shows how."
    if has_ended(folder) and can_resume(folder):
        return f"The job was not finished: `elasticcb resume {shlex.quote(str(folder))}` resumes it."
    if has_ended(folder) and os.path.exists(folder / COMMAND_LOCK):
        return "The job left no final state: it was interrupted before it began, or was killed. Start it again."
    return (
        f"Pass the job directory that `elasticcb train` printed. Its file {MASTER_FILE} appears some seconds after the "
        "job starts."
    )


def has_ended(folder: Path) -> bool:
    """Whether no master and no command own the folder of a job: all processes are gone. If the command is unknown,
    another master may be about to take the folder."""
    try:
        return not (has_command(folder) or is_owned(folder))
    except FileNotFoundError:
        return True
    except OSError:
        return not os.path.exists(folder / MASTER_FILE)  # this file system does not support locks
