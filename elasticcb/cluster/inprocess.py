"""Workers and parameter servers as threads of the master's process, for debugging.

They use gRPC, like processes; breakpoints in the model file or in callbacks work.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Iterator

from elasticcb.cluster.base import BackendContext, ClusterBackend, Exit
from elasticcb.cluster.role import Place, RoleProcess
from elasticcb.compute.registry import check_is_of_servers
from elasticcb.errors import UsageError
from elasticcb.security.socket_folder import SocketFolder
from elasticcb.settings import ClusterSettings


class InProcessCluster(ClusterBackend):
    """Threads."""

    name = "inprocess"
    summary = "threads of one process, for breakpoints"
    one_machine = True
    separate = False

    def __init__(self, run: Callable[[RoleProcess], None], settings: ClusterSettings | None = None) -> None:
        self._run = run
        self._settings = settings or ClusterSettings()
        self._sockets = SocketFolder()
        self._threads: dict[Place, _RoleThread] = {}
        self._last_words: dict[Place, str] = {}

    @classmethod
    def make(cls, context: BackendContext) -> InProcessCluster:
        return cls(context.run_role, context.settings)

    @classmethod
    def missing(cls, cluster: ClusterSettings) -> Iterator[str]:
        try:
            check_is_of_servers()
        except UsageError as error:
            yield str(error)

    @property
    def host(self) -> str:
        return super().host if self.access.tls or self._settings.port else self._sockets.host

    def start(self, role: str, index: int, master_address: str) -> None:
        process = RoleProcess(role=role, master=master_address, index=index, access=self.access)
        thread = _RoleThread(f"{role}-{index}", lambda: self._run(process))
        self._threads[role, index] = thread
        thread.start()

    def poll(self) -> list[Exit]:
        exits = []
        for (role, index), thread in list(self._threads.items()):
            if not thread.is_alive():
                del self._threads[role, index]
                self._last_words[role, index] = thread.last_words
                exits.append(Exit(role, index, 0, thread.reason, bool(thread.last_words)))
        return exits

    def kill(self, role: str, index: int) -> None:
        """Abandons a thread, because threads can't be killed: it keeps running in the background."""
        self._threads.pop((role, index), None)

    def stop(self, grace_seconds: float) -> None:
        give_up = time.monotonic() + grace_seconds
        for thread in self._threads.values():
            thread.join(max(0.0, give_up - time.monotonic()))
        self._sockets.remove()

    def log_tail(self, role: str, index: int, lines: int = 30) -> str:
        return self._last_words.get((role, index), "")


class _RoleThread(threading.Thread):
    """Runs one role, and stores how it ended."""

    def __init__(self, name: str, run_role: Callable[[], None]) -> None:
        super().__init__(name=name, daemon=True)
        self._run_role = run_role
        self.reason = "it returned"
        self.last_words = ""  # a traceback; "" after a normal end

    def run(self) -> None:
        try:
            self._run_role()
        except BaseException as error:
            self.reason = f"{type(error).__name__}: {error}"
            self.last_words = traceback.format_exc()
