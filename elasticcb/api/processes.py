"""The processes and other resources of a `Cluster`, from its first call until it is closed.

Open clusters are closed when the interpreter exits, also on SIGTERM.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import tempfile
import threading
from pathlib import Path
from typing import Any, Protocol

from elasticcb.clients.running_master import RunningMaster, published
from elasticcb.cluster.base import BackendContext, ClusterBackend
from elasticcb.cluster.registry import backend_of, make_backend
from elasticcb.dashboard.beside import page_beside
from elasticcb.data.batch_sources.service import DataService
from elasticcb.master.master import Master
from elasticcb.process.log_files import close_log, log_to
from elasticcb.process.signals import end_as_by_sigterm
from elasticcb.roles.master import STOP_SECONDS, keep_status
from elasticcb.roles.run import run_role
from elasticcb.security.socket_folder import check_temporary, make_private
from elasticcb.settings import STATUS_FILE, ClusterSettings
from elasticcb.storage.local_folders import TemporaryFolder

logger = logging.getLogger(__name__)


class ClusterProcesses:
    """A master in this process, and workers and servers started by the backend.

    Args:
        directory: folder for logs and data; None: a temporary folder, removed by `close`.

    Attributes:
        data_service: serves batches of data without an index, at the master's port.
    """

    def __init__(self, settings: ClusterSettings, directory: str | os.PathLike[str] | None, log_level: str) -> None:
        self._settings = settings
        self._given = directory
        self._log_level = log_level
        self._directory: Path | None = None
        self._temporary: TemporaryFolder | None = None
        self._master: Master | None = None
        self._backend: ClusterBackend | None = None
        self._until_stopped = contextlib.ExitStack()
        self._log: logging.Logger | None = None  # of the master, for `elasticcb logs`
        self.data_service = DataService()

    @property
    def directory(self) -> str:
        """Folder of the logs; "" if there is none."""
        return "" if self._directory is None else str(self._directory)

    @property
    def started(self) -> bool:
        """Whether there is a master with started processes."""
        return self._master is not None

    @property
    def where_logs_are(self) -> str:
        """A sentence about logs for messages; "" if there are none."""
        where = backend_of(self._settings.kind).where_logs_are
        if where is None:
            return ""
        if self._given is None:
            return "To keep the logs of the processes, give the Cluster a `directory`."
        return f"The logs of the processes are in {self._directory}/logs{where}."

    def start(self) -> Master:
        """Starts the processes unless they are running; if one of them has ended, ends the others first."""
        if self._master is not None and self._backend is not None and not self._backend.poll():
            return self._master
        self.stop()
        try:
            folder = str(self._make_directory())
            Path(folder, STATUS_FILE).unlink(missing_ok=True)  # of the program's last run
            context = BackendContext(self._settings, folder, self._log_level, _say, run_role)
            self._backend = make_backend(context)
            self._backend.prepare()
            self._log = log_to(Path(folder, "logs", "master.log"), "master")
            self._master = Master(self._settings, self._backend, self.warn, self._backend.access)
            self._master.add(self.data_service.frames())
            self._master.start()
            self._master.server.start_processes()
            self._publish(self._master, self._backend)
            return self._master
        except BaseException:
            self.close()
            raise

    def stop(self, failure: BaseException | None = None) -> None:
        """Ends the processes, and records how the last job has ended: with `failure`, if there was one."""
        master, self._master = self._master, None
        backend, self._backend = self._backend, None
        if master is not None and self._given is not None and master.observe().command is not None:
            keep_status(Path(self.directory), master, failure)
        self._until_stopped.close()
        if master is not None:
            master.shut_down(STOP_SECONDS)
        elif backend is not None:
            backend.stop(STOP_SECONDS)
        if self._log is not None:
            close_log(self._log)
            self._log = None

    def note(self, text: str) -> None:
        """Writes a line to the master's log."""
        if self._log is not None:
            self._log.info("%s", text)

    def warn(self, text: str) -> None:
        """Shows the user of the program a line, and writes it to the master's log."""
        _say(text)
        self.note(text)

    def close(self) -> None:
        """Ends the processes, and removes everything that `start` created."""
        with contextlib.ExitStack() as stack:
            if self._temporary is not None:
                stack.callback(self._temporary.remove)
                self._temporary = self._directory = None
            self.stop()

    def _publish(self, master: Master, backend: ClusterBackend) -> None:
        """Lets commands find the master, and shows the page."""
        folder = Path(self.directory)
        running = RunningMaster.of(master.address, backend.access, master.metrics_address, master.health_address)
        self._until_stopped.enter_context(published(folder, running))
        self._until_stopped.enter_context(page_beside(folder, wanted=self._settings.dashboard))

    def _make_directory(self) -> Path:
        if self._directory is None:
            if self._given is None:
                check_temporary(tempfile.gettempdir())
                self._temporary = TemporaryFolder()
                self._directory = self._temporary.path
            else:
                self._directory = Path(self._given).absolute()
                make_private(self._directory)
        return self._directory


def _say(text: str) -> None:
    logger.warning("%s", text)


class _Closable(Protocol):
    def _close(self) -> None: ...


_open: list[_Closable] = []
_process = 0  # the registering process; forks of it don't touch its processes


def close_at_exit(cluster: _Closable) -> None:
    """Closes `cluster` at exit, unless it is forgotten before.

    In the main thread, SIGTERM raises `SystemExit` until then, unless the program has its own handler. By default, it
    would end the program at once and leave files of the cluster behind.
    """
    global _process
    if _process != os.getpid():
        _process = os.getpid()
        _open.clear()
        # Not `atexit`: its functions run after the threads that answer the processes' calls have ended.
        threading._register_atexit(_close_all)  # type: ignore[attr-defined]
    if cluster not in _open:
        _open.append(cluster)
    _replace_handler(signal.SIG_DFL, _end)


def forget(cluster: _Closable) -> None:
    """Unregisters `cluster`, which was closed."""
    if cluster in _open:
        _open.remove(cluster)
    if not _open:
        _replace_handler(_end, signal.SIG_DFL)


def _replace_handler(present: Any, new: Any) -> None:
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == present:
        signal.signal(signal.SIGTERM, new)


def _end(number: int, frame: object) -> None:
    if _process != os.getpid():
        end_as_by_sigterm()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a second one ends it at once
    raise SystemExit(128 + number)


def _close_all() -> None:
    if _process == os.getpid():
        for cluster in list(_open):
            cluster._close()
