"""How a command finds the master of a job that runs: by a file in the job's folder, which its owner alone can read."""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from elasticcb.errors import UsageError
from elasticcb.security.credentials import Access
from elasticcb.security.socket_folder import port_of
from elasticcb.security.tls import TLS, TLSFiles
from elasticcb.settings import JOB_FILE, STATUS_FILE, ClusterSettings
from elasticcb.storage import durable
from elasticcb.storage.folder_lock import FolderInUseError, FolderLock, is_owned

MASTER_FILE = "master.json"
COMMAND_LOCK = ".command.lock"


class RunningMaster(NamedTuple):
    """Where the master of a job listens, the token that calls to it must carry, and the files of TLS, if any.

    Attributes:
        metrics: where it serves its metrics, "host:port"; "" if it does not.
        health: where it answers health checks, likewise.
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
        """Settings by which another master listens where this one did."""
        addresses = {"port": self.address, "metrics_port": self.metrics, "health_port": self.health}
        ports: dict[str, Any] = {name: port_of(address) for name, address in addresses.items() if address}
        return dataclasses.replace(cluster, **ports)

    @property
    def access(self) -> Access:
        """Raises `UsageError` when the files can't be used."""
        return Access(self.token, None if self.tls is None else TLS.load(TLSFiles(**self.tls)))


@contextlib.contextmanager
def command_runs(folder: Path) -> Iterator[None]:
    """Within it, other commands see that one runs a job in `folder`, also before its master is up, and while a master
    that was killed is replaced."""
    with contextlib.ExitStack() as until_end:
        with contextlib.suppress(FolderInUseError, OSError):  # masters keep each other away by a lock of their own
            until_end.enter_context(FolderLock(folder, file=COMMAND_LOCK))
        yield


def is_starting(folder: Path) -> bool:
    """Whether a command runs a job in a folder whose first master is not up yet. What is written there of how a job has
    ended, or where a master is, is then of an earlier one."""
    began = _written_at(folder / COMMAND_LOCK)  # its owner has written to it
    earlier = all(_written_at(folder / name) < began for name in (MASTER_FILE, STATUS_FILE))
    return earlier and has_command(folder)


def has_command(folder: Path) -> bool:
    """Whether a command runs the job in a folder; false also where that can't be told."""
    with contextlib.suppress(OSError):
        return is_owned(folder, COMMAND_LOCK)
    return False


def _written_at(path: Path) -> int:
    """In nanoseconds; -1: there is no such file."""
    with contextlib.suppress(OSError):
        return path.stat().st_mtime_ns
    return -1


@contextlib.contextmanager
def published(folder: Path, master: RunningMaster) -> Iterator[None]:
    """Within it, commands of the same user find `master` by the job's folder."""
    durable.write_document(folder / MASTER_FILE, master._asdict())
    try:
        yield
    finally:
        with contextlib.suppress(OSError, UsageError):
            if running_master(folder) == master:  # else it is another one's
                (folder / MASTER_FILE).unlink()


def running_master(folder: str | Path) -> RunningMaster:
    """That of the job in a folder. Raises `UsageError` when no job runs there."""
    try:
        return RunningMaster(**durable.read_document(Path(folder, MASTER_FILE)))
    except (OSError, ValueError, TypeError):
        refuse_cluster(Path(folder))
        raise UsageError(f"{folder} is not the folder of a job that runs. {_why_not(Path(folder))}") from None


def refuse_cluster(folder: Path) -> None:
    """Raises `UsageError` for the `job_dir` or `directory` of a `Cluster`, which has no master that others can call."""
    if any((folder / name).exists() for name in (JOB_FILE, MASTER_FILE, STATUS_FILE, COMMAND_LOCK, "logs/master.log")):
        return
    if (folder / "logs" / "zygote.log").exists() or any(folder.glob("fit-*/fit.json")):
        raise UsageError(
            f"{folder} belongs to an elasticcb.Cluster, not to a job of an `elasticcb` command. The program with the "
            "Cluster shows its progress, also as a live page with Cluster(dashboard=True); run it again to resume a "
            "`fit` with job_dir."
        )


def _why_not(folder: Path) -> str:
    if (folder / STATUS_FILE).is_file():
        return f"It has ended: `elasticcb status {shlex.quote(str(folder))}` shows how."
    if (folder / JOB_FILE).is_file() and has_ended(folder):
        return f"It was not finished: `elasticcb resume {shlex.quote(str(folder))}` goes on with it."
    return (
        f"Expected one with the file {MASTER_FILE}, which a job has when it has started, some seconds after its begin."
    )


def has_ended(folder: Path) -> bool:
    """Whether no master owns the folder of a job, and no command: all processes are gone. Where nobody knows of the
    command, another master may be about to take the folder."""
    try:
        return not (has_command(folder) or is_owned(folder))
    except FileNotFoundError:
        return True
    except OSError:
        return not (folder / MASTER_FILE).exists()  # this file system knows no locks
