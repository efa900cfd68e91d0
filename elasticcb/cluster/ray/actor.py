"""The actor that runs on a Ray node: it starts one process there, and reports how it ended."""

from __future__ import annotations

import os
import signal
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from elasticcb.cluster.local.fork_server import Ending, Launch, SpawnedChild
from elasticcb.cluster.role import RoleProcess
from elasticcb.process.devices import THREADS_VARIABLE, hide_gpus
from elasticcb.process.log_files import last_lines
from elasticcb.security.socket_folder import check_temporary, make_private
from elasticcb.security.tls import TLS
from elasticcb.storage.local_folders import TemporaryFolder

_LOOK_SECONDS = 1.0  # seconds between checks for processes that the kernel killed
_LAST_LINES = 30


class Launched(NamedTuple):
    """A running process: the address of its node, its id, and whether it sees the master's job folder."""

    node: str
    pid: int
    sees_job: bool


class Ended(NamedTuple):
    """How a process ended, with the fields of `Exit`, and the last lines of its log."""

    reason: str
    failed: bool
    log_tail: str


class PlaceOnNode:
    """One process of a job. The master calls its methods, several at once.

    The job's token and private key arrive by a call, not as arguments of the actor, which Ray stores in its tables.
    """

    def __init__(self) -> None:
        self._child: SpawnedChild | None = None
        self._launched: Launched | None = None
        self._log = Path()
        self._keys: TemporaryFolder | None = None  # folder with the TLS files

    def launch(self, process: RoleProcess, directory: str, marker: str, log_level: str, threads: int) -> Launched:
        """Starts the process, unless it was started before.

        Args:
            process: the master's specification; this node chooses the listening address and the paths of TLS files.
            directory: the job's folder, which is created on this node if it is not shared.
            marker: a file in it that the master created.

        Raises `OSError` if the folder or the process can't be created, and `UsageError` if the folder belongs to
        another user, or other users could replace its TLS files.
        """
        if self._launched is not None:
            return self._launched
        import ray

        node = ray.util.get_node_ip_address()
        sees_job = Path(directory, marker).exists()
        logs = Path(directory, "logs")
        make_private(Path(directory))
        logs.mkdir(exist_ok=True)
        self._log = logs / f"{process.role}-{process.index}.log"
        access = replace(process.access, tls=self._own_tls(process.access.tls))
        process = replace(process, host=node, parent_pid=os.getpid(), access=access)
        environment = os.environ | process.environment(log_level)
        environment.setdefault(THREADS_VARIABLE, str(threads))
        hide_gpus(environment)  # it has reserved none, and newer releases of Ray leave all of them visible
        self._child = SpawnedChild(Launch(process.arguments, environment, self._log, own_path=True))
        self._launched = Launched(node, self._child.pid, sees_job)
        return self._launched

    def wait(self) -> Ended:
        """Waits for its end."""
        assert self._child is not None
        before = _killed_for_memory()
        while not self._child.wait(_LOOK_SECONDS) and self._child.poll() is None:
            before = _killed_for_memory()
        ending = self._child.poll()
        assert ending is not None
        self._remove_keys()
        return Ended(_reason(ending, _killed_for_memory() > before), ending.failed, self.log_tail(_LAST_LINES))

    def log_tail(self, lines: int) -> str:
        """The last lines of its log."""
        return last_lines(self._log, lines)

    def end(self) -> None:
        """Ends it at once."""
        if self._child is not None:
            self._child.send_signal(signal.SIGKILL)
            self._child.wait()
        self._remove_keys()

    def _own_tls(self, tls: TLS | None) -> TLS | None:
        """The master's credentials, in files of this node."""
        if tls is None:
            return None
        check_temporary(tempfile.gettempdir())
        self._keys = TemporaryFolder()
        for name, content in tls.contents.items():
            (self._keys.path / name).write_bytes(content)
        return tls.at(str(self._keys.path))

    def _remove_keys(self) -> None:
        if self._keys is not None:
            self._keys.remove()


def _reason(ending: Ending, short_of_memory: bool) -> str:
    if ending.code == -signal.SIGKILL and short_of_memory:
        return "out of memory: the system killed it because its node or container had no memory left"
    return ending.reason


def _killed_for_memory() -> int:
    """How many processes this system has killed for lack of memory."""
    try:
        counts = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
        return int(counts["oom_kill"])
    except (OSError, KeyError, ValueError):
        return 0
