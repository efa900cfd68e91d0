"""Workers and parameter servers as processes of this machine."""

from __future__ import annotations

import logging
import os
import select
import signal
import threading
import time
from pathlib import Path

from elasticcb.cluster.base import ClusterBackend, Exit
from elasticcb.cluster.child import Child, Launch, SpawnedChild, common_environment
from elasticcb.cluster.fork_server import ForkServer, can_fork
from elasticcb.security.credentials import TOKEN_VARIABLE

logger = logging.getLogger(__name__)


class LocalCluster(ClusterBackend):
    """Processes of this machine that end with this one, however it ends.

    Where the system allows it, they are forked by a process that has imported TensorFlow for all of them
    (launch/fork_process.py).

    Args:
        directory: the job's; logs go to `logs/ROLE-INDEX.log` below it.
        log_level: TensorFlow's own messages are kept quiet unless this is DEBUG.
        fork_server: has forked this process; None starts one when processes are needed.
    """

    def __init__(self, directory: str, log_level: str = "INFO", fork_server: ForkServer | None = None) -> None:
        self._logs = Path(directory) / "logs"
        self._logs.mkdir(parents=True, exist_ok=True)
        self._common = common_environment(log_level)
        self._children: dict[tuple[str, int], Child] = {}
        self._fork_server = fork_server
        self._gpus = visible_gpus()
        for arguments, child in [] if fork_server is None else fork_server.taken_over:
            self._children[arguments[0], int(arguments[arguments.index("--index") + 1])] = child

    def prepare(self) -> None:
        if self._fork_server is None and can_fork():
            watch = os.pidfd_open(os.getpid())
            try:
                self._fork_server = ForkServer.launch(os.environ | self._common, self._logs / "zygote.log", watch)
            finally:
                os.close(watch)

    def start(self, role: str, index: int, master_address: str) -> None:
        self.kill(role, index)  # one that has said goodbye, and is still there
        self.prepare()
        tls = () if self.access.tls is None else self.access.tls.files.flags
        arguments = (role, "--master", master_address, "--index", str(index), "--parent_pid", str(os.getpid()), *tls)
        launch = Launch(arguments, self._environment(role, index), self._log_path(role, index))
        server = self._fork_server
        self._children[role, index] = SpawnedChild(launch) if server is None else server.start(launch)

    def pid(self, role: str, index: int) -> int:
        """The id of the process in a place, for which it waits. Raises `KeyError` when there is none."""
        return self._children[role, index].pid

    def poll(self) -> list[Exit]:
        exits = []
        for (role, index), child in list(self._children.items()):
            ending = child.poll()
            if ending is not None:
                del self._children[role, index]
                log = str(self._log_path(role, index))
                exits.append(Exit(role, index, child.pid, ending.reason, ending.failed, log))
        return exits

    def kill(self, role: str, index: int) -> None:
        child = self._children.pop((role, index), None)
        if child is not None:
            child.send_signal(signal.SIGKILL)
            child.wait()

    @property
    def taken_over(self) -> dict[tuple[str, int], int]:
        return {place: child.pid for place, child in self._children.items()}

    def end_taken_over(self) -> None:
        for role, index in list(self._children):
            self.kill(role, index)

    def stop(self, grace_seconds: float) -> None:
        children = list(self._children.values())
        server, self._fork_server = self._fork_server, None
        self._children.clear()
        try:
            if server is not None:
                server.give_up_waiting()
        finally:
            # SIGTERM would make them put down their work with care, and nobody will go on with it.
            for child in children:
                child.send_signal(signal.SIGKILL)
            for child in children:
                child.wait()
            if server is not None:
                server.close()

    def log_tail(self, role: str, index: int, lines: int = 30) -> str:
        try:
            text = self._log_path(role, index).read_text(errors="replace")
        except OSError:
            return ""
        return "\n".join(text.splitlines()[-lines:])

    def _log_path(self, role: str, index: int) -> Path:
        return self._logs / f"{role}-{index}.log"

    def _environment(self, role: str, index: int) -> dict[str, str]:
        environment = self._common | {TOKEN_VARIABLE: self.access.token}
        if self._gpus:
            # One GPU per worker; servers would only take memory from them.
            environment["CUDA_VISIBLE_DEVICES"] = self._gpus[index % len(self._gpus)] if role == "worker" else "-1"
        return os.environ | environment


def visible_gpus() -> list[str]:
    """The ids of the NVIDIA GPUs that this process may use."""
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if allowed is not None:
        return [gpu for gpu in allowed.split(",") if gpu and gpu != "-1"]
    folder = Path("/proc/driver/nvidia/gpus")
    return [str(i) for i, _ in enumerate(folder.iterdir())] if folder.is_dir() else []


_watch: int | None = None  # a file that becomes readable when this process is to end


def follow_file(watch: int) -> None:
    """Lets `follow_parent` follow a file instead, which becomes readable when this process is to end."""
    global _watch
    _watch = watch


def follow_parent(parent_pid: int) -> None:
    """Makes this process end when its parent does, even by SIGKILL.

    Call it before anything slow. A parent that is gone already ends the process here.
    """
    if _watch is None and os.getppid() != parent_pid:
        os._exit(1)
    # Not by prctl(PR_SET_PDEATHSIG): that is sent when the thread ends which started this process.
    if _watch is None:
        thread = threading.Thread(target=_watch_parent, args=(parent_pid,), name="parent", daemon=True)
    else:
        thread = threading.Thread(target=_watch_file, args=(_watch,), name="parent", daemon=True)
    thread.start()


def _watch_parent(parent_pid: int) -> None:
    while os.getppid() == parent_pid:
        time.sleep(0.5)
    os._exit(1)


def _watch_file(watch: int) -> None:
    poller = select.poll()
    poller.register(watch, select.POLLIN)
    poller.poll()
    os._exit(1)
