"""How a command finds the master of a job that runs: by a file in the job's folder, which its owner alone can read."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

from elasticcb.errors import UsageError
from elasticcb.security.credentials import Access
from elasticcb.security.socket_folder import port_of
from elasticcb.security.tls import TLS, TLSFiles
from elasticcb.settings import STATUS_FILE, ClusterSettings
from elasticcb.storage import durable

MASTER_FILE = "master.json"


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
def published(folder: Path, master: RunningMaster, until_end: contextlib.ExitStack) -> Iterator[None]:
    """Within it, commands of the same user find `master` by the job's folder.

    The file stays locked until `until_end` closes, which tells those who have opened it when the processes are gone.
    """
    path = folder / MASTER_FILE

    files = []

    def lock(unfinished: Path) -> None:
        file = until_end.enter_context(unfinished.open("rb+"))
        files.append(file)
        with contextlib.suppress(OSError):  # some file systems know no locks
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)

    durable.write_document(path, master._asdict(), lock)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            if os.path.samestat(path.stat(), os.fstat(files[0].fileno())):  # else it is another master's
                path.unlink()


def running_master(folder: str | Path) -> RunningMaster:
    """That of the job in a folder. Raises `UsageError` when no job runs there."""
    try:
        return RunningMaster(**durable.read_document(Path(folder, MASTER_FILE)))
    except (OSError, ValueError, TypeError):
        raise UsageError(f"{folder} is not the folder of a job that runs. {_why_not(Path(folder))}") from None


def _why_not(folder: Path) -> str:
    if (folder / STATUS_FILE).is_file():
        return f"It has ended: `elasticcb status {shlex.quote(str(folder))}` shows how."
    return (
        f"Expected one with the file {MASTER_FILE}, which a job has when it has started, some seconds after its begin."
    )


class EndOfJob:
    """Tells when the processes of a job are gone. Make it while its master is up."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / MASTER_FILE
        try:
            self._file: IO[bytes] | None = self._path.open("rb")
        except OSError:
            self._file = None

    @property
    def has_come(self) -> bool:
        if self._file is None:
            return True
        try:
            fcntl.flock(self._file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            return not self._path.exists()  # this file system knows no locks
        return True

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
