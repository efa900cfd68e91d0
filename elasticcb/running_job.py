"""How a command finds the master of a job that runs: by a file in the job's folder, which its owner alone can read."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from elasticcb.access import Access
from elasticcb.errors import UsageError
from elasticcb.settings import ClusterSettings
from elasticcb.tls import TLS, TLSFiles

_FILE = "master.json"


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
        ports: dict[str, Any] = {
            name: int(address.rpartition(":")[2]) for name, address in addresses.items() if address
        }
        return dataclasses.replace(cluster, **ports)

    @property
    def access(self) -> Access:
        """Raises `UsageError` when the files can't be used."""
        return Access(self.token, None if self.tls is None else TLS.load(TLSFiles(**self.tls)))


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
