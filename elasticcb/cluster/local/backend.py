"""Workers and parameter servers as processes on this machine, and a process that keeps their master alive."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from elasticcb.clients.running_master import forget_earlier_job
from elasticcb.cluster.base import BackendContext, ClusterBackend, Exit, MasterRun
from elasticcb.cluster.local.fork_server import Child, ForkedChild, ForkServer, Launch, SpawnedChild, can_fork
from elasticcb.cluster.role import Place, RoleProcess, common_environment
from elasticcb.errors import GO_ON
from elasticcb.process.devices import GPUS_VARIABLE, SHARED_GPU, limit_threads, visible_gpus
from elasticcb.process.log_files import last_lines
from elasticcb.security.socket_folder import SocketFolder
from elasticcb.settings import FORK_LOG, JOURNAL_FILE, Command, JobSettings
from elasticcb.storage.folder_lock import ENDING_SECONDS, FolderLock

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_MOST_VAIN_LIVES = 5  # consecutive masters that are killed without having persisted anything
_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


class LocalCluster(ClusterBackend):
    """Processes on this machine that end with this process, however it ends.

    Where the system supports it, they are forked by a process that has imported TensorFlow once for all of them
    (launch/fork_process.py).
    """

    name = "local"
    summary = "processes on this machine"
    one_machine = True
    scales = True
    where_logs_are = ""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self._logs = Path(context.directory) / "logs"
        self._logs.mkdir(parents=True, exist_ok=True)
        self._children: dict[Place, Child] = {}
        self._fork_server = fork_server = context.fork_server
        self._gpus = visible_gpus()
        self._sockets = SocketFolder()
        for arguments, child in [] if fork_server is None else fork_server.taken_over:
            given = dict(itertools.pairwise(arguments))
            self._children[arguments[0], int(given["--index"])] = child
            self._sockets = SocketFolder(given["--master"])

    @classmethod
    def run_master(cls, run: MasterRun) -> None:
        """Runs the master in a process that is restarted when killed, if the job can be resumed."""
        settings = run.settings
        resumable = settings.command is Command.TRAIN and settings.checkpoint.interval_seconds
        if not (run.own_process and resumable and can_fork()):
            super().run_master(run)
            return
        with FolderLock(Path(settings.directory), wait_seconds=ENDING_SECONDS):  # afterwards, the master takes it
            if not run.resumed:
                forget_earlier_job(Path(settings.directory))
        sys.exit(_keep_master(run))

    def prepare(self) -> None:
        if self._fork_server is None and can_fork():
            watch = os.pidfd_open(os.getpid())
            try:
                environment = os.environ | common_environment(self.context.log_level)
                self._fork_server = ForkServer.launch(environment, self._logs / FORK_LOG, watch)
            finally:
                os.close(watch)

    @property
    def host(self) -> str:
        return super().host if self.access.tls or self.context.settings.port else self._sockets.host

    def start(self, role: str, index: int, master_address: str) -> None:
        self.kill(role, index)  # a process that has deregistered, and still exists
        self.prepare()
        process = RoleProcess(role=role, master=master_address, index=index, access=self.access, parent_pid=os.getpid())
        launch = Launch(process.arguments, self.environment(process), self._log_path(role, index))
        server = self._fork_server
        self._children[role, index] = SpawnedChild(launch) if server is None else server.start(launch)

    def pid(self, role: str, index: int) -> int:
        """Waits for the process with an index; returns its id. Raises `KeyError` if there is none."""
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
    def taken_over(self) -> dict[Place, int]:
        return {place: child.pid for place, child in self._children.items()}

    def end_taken_over(self) -> None:
        for role, index in list(self._children):
            self.kill(role, index)

    def stop(self, grace_seconds: float) -> None:
        children = list(self._children.values())
        server, self._fork_server = self._fork_server, None
        self._children.clear()
        with contextlib.ExitStack() as last:  # even after a second Ctrl-C
            last.callback(self._sockets.remove)
            if server is not None:
                last.callback(server.close)
            last.callback(_kill, children)
            if server is not None:
                server.give_up_waiting()

    def log_tail(self, role: str, index: int, lines: int = 30) -> str:
        return last_lines(self._log_path(role, index), lines)

    def _log_path(self, role: str, index: int) -> Path:
        return self._logs / f"{role}-{index}.log"

    def environment(self, process: RoleProcess) -> dict[str, str]:
        """The complete environment of a process."""
        role, index = process.place
        environment = os.environ | process.environment(self.context.log_level)
        if self._gpus and role == "worker":
            environment[GPUS_VARIABLE] = self._gpus[index % len(self._gpus)]
            environment = SHARED_GPU | environment
        # Servers are idle while workers compute, so workers share all cores.
        settings = self.context.settings
        limit_threads(environment, settings.num_workers + (settings.num_ps if role == "ps" else 0))
        return environment


def _kill(children: list[Child]) -> None:
    # SIGTERM would make them save their state carefully, but nobody will continue it.
    for child in children:
        child.send_signal(signal.SIGKILL)
    for child in children:
        child.wait()


def _keep_master(run: MasterRun) -> int:
    """Starts the master of a training job, and restarts it when it is killed; returns the exit code of the last one.

    A helper process that has imported TensorFlow forks the master, workers and servers (launch/fork_process.py). It
    lives as long as this process, so the next master starts at once and finds the running processes.

    Call it from the main thread.
    """
    # If the fork process is killed, its children become children of this process.
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    settings, say = run.settings, run.say
    journal = Path(settings.directory, JOURNAL_FILE)
    request: dict[str, Any] = {
        "arguments": sys.argv[1:],
        "settings": settings.to_json(),
        "debug": run.debug,
        "resumed": run.resumed,
        "since": 0.0,
    }
    vain = 0
    processes = _Processes(settings)
    try:
        while True:
            before = _size(journal)
            code = processes.run_master(request, run)
            if code is None:
                end = last_lines(processes.log, 20)
                last_words = f" The end of {processes.log}:\n{end}" if end else ""
                say(f"Error: The master could not be started: {processes.how_ended()}.{last_words}")
                return 1
            if code >= 0 and code != GO_ON:
                return code
            what = "ended" if code == GO_ON else f"was killed by {signal.Signals(-code).name}"
            vain = 0 if _size(journal) != before else vain + 1
            if vain == _MOST_VAIN_LIVES:
                say(
                    f"Error: The master {what} {vain} times in a row without progress. See its log in the job's folder."
                )
                return 1
            request |= {"resumed": True, "since": time.monotonic()}
            anew = code == GO_ON or processes.can_start_no_more
            say(f"The master {what}; a new one continues the job{' with new processes' if anew else ''}.")
            if anew:
                processes.end()
                processes = _Processes(settings)
    finally:
        processes.end()


class _Processes:
    """The fork process and its children, which end with this object or this process."""

    def __init__(self, settings: JobSettings) -> None:
        logs = Path(settings.directory, "logs")
        logs.mkdir(parents=True, exist_ok=True)
        self.log = logs / FORK_LOG
        watch, self._lifeline = os.pipe()
        try:
            environment = os.environ | common_environment(settings.log_level)
            self._server = ForkServer.launch(environment, self.log, watch)
        finally:
            os.close(watch)

    @property
    def can_start_no_more(self) -> bool:
        self._server.attend()
        return self._server.lost

    def run_master(self, request: dict[str, Any], run: MasterRun) -> int | None:
        """Waits for a master, passing on signals; returns its exit code, or minus the signal that killed it. None: it
        could not be started."""
        try:
            child = self._server.start_master(request)
        except OSError:  # the fork process has just been killed
            return None
        pid = child.pid  # until then, this process handles signals
        run.begun()
        passed_on = _wait(child)
        ending = child.poll()
        code = None if ending is None else ending.code
        if code is None and pid:
            self._server.close()  # once the fork process is gone, the master is a child of this process
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        return 128 - code if code is not None and code < 0 and passed_on else code

    def how_ended(self) -> str:
        """How the fork process ended, as text."""
        self._server.attend()
        return self._server.how_ended()

    def end(self) -> None:
        """Kills all of them."""
        os.close(self._lifeline)
        self._server.close()


def _wait(child: ForkedChild) -> bool:
    """Waits until a master has ended; returns whether a signal was passed on to it."""
    passed_on = False

    def pass_on(number: int, frame: Any) -> None:
        nonlocal passed_on
        passed_on = True
        child.send_signal(number)

    # Signals that a shell made ignored stay ignored.
    before = {number: signal.getsignal(number) for number in _FORWARDED}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, pass_on)
    try:
        child.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return passed_on


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
