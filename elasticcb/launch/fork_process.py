"""The fork process: imports TensorFlow and the Keras backend once, and then forks the processes of a job.

An import takes seconds, a fork takes milliseconds, and imported code is in memory only once. TensorFlow and gRPC
survive a fork only if they are unused: this process runs no operations, opens no channels and has no Python threads.
The threads that exist after the imports (OpenBLAS, pyarrow's jemalloc) belong to libraries that handle forks
themselves.

It is driven by messages over a socket (fork_server.py), one JSON object each:

    {"number": 1, "arguments": […], "environment": {…}, "directory": "…", "log": "…"}   start a process
    {"number": 1, "pid": 4711}, with a pidfd of the process                             it runs
    {"number": 1, "code": -9}                                                           it has ended
    {"number": 1, "error": "…"}                                                         it could not be forked

A request with "master" starts the master of a training job, which writes to the two files that come with the request,
and gets its own socket to request workers and servers. If it is killed, they keep running, and the next master takes
them over.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import socket
import sys
import warnings
from pathlib import Path
from typing import Any, NamedTuple

from elasticcb.cluster.local.fork_server import Forked, ForkServer
from elasticcb.compute.registry import VARIABLE, backend_class, chosen_backend
from elasticcb.launch import fresh_process
from elasticcb.process.devices import gpus_hidden, visible_gpus
from elasticcb.process.import_path import follow_caller
from elasticcb.process.system import follow_file, show_as

MESSAGE_BYTES = 1 << 20  # more than such a socket takes
_READY = b"1"


def main() -> int:
    """The command line has the numbers of two files: the socket, and a file that becomes readable when this process and
    all its children must end."""
    control, watch = (int(number) for number in sys.argv[1:])
    show_as("fork-process")
    with gpus_hidden():  # Keras on PyTorch looks for one at its import, and CUDA does not outlive a fork
        import_roles()
    follow_caller()
    # Python warns about foreign threads (see above) at each fork.
    warnings.filterwarnings("ignore", ".*multi-threaded", DeprecationWarning)
    gc.collect()
    gc.freeze()  # garbage collections in children leave these pages shared
    service = _ForkService(socket.socket(fileno=control), watch)
    request = service.serve()
    if request is None:
        os._exit(0)
    # From here on this is a child.
    other_backend = request.get("environment", {}).get(VARIABLE, chosen_backend()) != chosen_backend()
    if other_backend or (service.handed_over is None and visible_gpus() and not backend_class().forks_with_gpus):
        fresh_process.begin(watch, request["arguments"])
    from elasticcb.cli.main import main as command_line

    if service.handed_over is None:
        return command_line(request["arguments"])
    from elasticcb.cli.job import run_as_master

    return run_as_master(request, service.handed_over)


def import_roles() -> None:
    """Imports everything that masters, workers and servers need, so that children don't."""
    import elasticcb.cli.main
    import elasticcb.cli.progress
    import elasticcb.data
    import elasticcb.master.job
    import elasticcb.master.keras_host
    import elasticcb.model.program
    import elasticcb.ps.server
    import elasticcb.roles.master
    import elasticcb.roles.ps
    import elasticcb.roles.worker
    import elasticcb.worker.functions
    import elasticcb.worker.worker  # noqa: F401

    backend_class()


class _Child(NamedTuple):
    number: int
    pid: int
    is_master: bool
    arguments: list[str]


class _ForkService:
    """Forks requested processes, and reports which have ended.

    Attributes:
        handed_over: in a child that is a master, its connection to this process.
    """

    def __init__(self, control: socket.socket, watch: int) -> None:
        self._control, self._watch = control, watch
        self._for_launcher = False  # whether it is the launcher, which requests masters
        self._master: socket.socket | None = None  # socket of the current master
        self._children: dict[int, _Child] = {}  # by pidfd
        self.handed_over: ForkServer | None = None
        self._poller = select.poll()
        for file in (watch, control.fileno()):
            self._poller.register(file, select.POLLIN)

    def serve(self) -> dict[str, Any] | None:
        """Returns None when nobody sends requests any more; in a child, its request."""
        while True:
            file, _ = self._poller.poll()[0]  # one at a time, because handling it may close others
            if file == self._watch:
                return None
            if file in self._children:
                self._ended(file)
                continue
            asker = self._control if self._master is None or file != self._master.fileno() else self._master
            try:
                data, files, _, _ = socket.recv_fds(asker, MESSAGE_BYTES, 2, socket.MSG_CMSG_CLOEXEC)
            except ConnectionResetError:
                data, files = b"", []
            if data:
                request: dict[str, Any] = json.loads(data)
                if self._fork(request, files):
                    return request
                for output in files:
                    os.close(output)
            elif asker is self._control:
                return None
            else:
                self._forget_master()

    def _forget_master(self) -> None:
        if self._master is not None:
            self._poller.unregister(self._master)
            self._master.close()
            self._master = None

    def _ended(self, file: int) -> None:
        child = self._children.pop(file)
        self._poller.unregister(file)
        os.close(file)
        message = {"number": child.number, "code": os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1])}
        self._tell(child.is_master, message)

    def _fork(self, request: dict[str, Any], files: list[int]) -> bool:
        """Whether this is the child."""
        number, is_master = request["number"], "master" in request
        of_master = None
        if is_master:
            self._for_launcher = True
            self._forget_master()
            self._master, of_master = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._poller.register(self._master, select.POLLIN)
        ours, theirs = socket.socketpair()
        with ours, theirs:
            try:
                pid = os.fork()
            except OSError as error:
                self._tell(is_master, {"number": number, "error": str(error)})
                return False
            if pid == 0:
                ours.close()
                self._begin(request, files, of_master, theirs)
                return True
            theirs.close()
            watch = os.pidfd_open(pid)
            ours.recv(1)  # does nothing if it is dead already
            self._tell(is_master, {"number": number, "pid": pid}, watch)
            with contextlib.suppress(BrokenPipeError):
                ours.send(_READY)
        if of_master is not None:
            of_master.close()
        self._children[watch] = _Child(number, pid, is_master, request["arguments"])
        self._poller.register(watch, select.POLLIN)
        return False

    def _begin(
        self, request: dict[str, Any], files: list[int], to_here: socket.socket | None, told: socket.socket
    ) -> None:
        self._control.close()
        if self._master is not None:
            self._master.close()
        follow_file(self._watch)
        if to_here is None:
            for other in self._children:
                os.close(other)
            files = [os.open(request["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)]
            os.chdir(request["directory"])
            os.environ.clear()
            os.environ.update(request["environment"])
        else:
            forked = [
                Forked(child.number, child.pid, watch, child.arguments)
                for watch, child in self._children.items()
                if not child.is_master
            ]
            self.handed_over = ForkServer(to_here, forked=forked)
        _become(request["arguments"], files)
        told.send(_READY)
        if not told.recv(1):  # nobody knows about this process
            os._exit(1)

    def _tell(self, of_master: bool, message: dict[str, Any], *files: int) -> None:
        """Reports to the requester what happened to a process; for a master, to the launcher."""
        to = self._control if of_master or not self._for_launcher else self._master
        if to is not None:  # otherwise, the next master gets it when it takes over
            # If nobody reads any more, the loop will notice.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                socket.send_fds(to, [json.dumps(message).encode()], files)


def _become(arguments: list[str], files: list[int]) -> None:
    """Makes this process look as if it had been started with a command."""
    os.setsid()
    os.dup2(files[0], 1)
    os.dup2(files[-1], 2)
    for file in files:
        os.close(file)
    sys.argv = [str(Path(__file__).parents[1] / "__main__.py"), *arguments]
    show_as(arguments[0])
    draw_own_random_numbers()


def draw_own_random_numbers() -> None:
    """Reseeds NumPy's global generator, so that it differs from the parent's.

    Python's own and that of rpc/connection.py do so themselves; TensorFlow's are created on first use.
    """
    import numpy as np

    np.random.seed()
