"""A process that imports TensorFlow once, and then forks the workers and parameter servers of a job.

An import takes seconds, a fork some milliseconds, and what was imported is in memory once. TensorFlow and gRPC
outlive a fork only as long as they have done nothing: this process runs no operation, opens no channel and has no
Python thread. The threads that there are after the imports (OpenBLAS, pyarrow's jemalloc) belong to libraries that
handle forks themselves.

It is driven by messages over a socket (fork_server.py), one JSON object each:

    {"number": 1, "arguments": […], "environment": {…}, "directory": "…", "log": "…"}   start a process
    {"number": 1, "pid": 4711}, with a pidfd of the process                             it runs
    {"number": 1, "code": -9}                                                           it has ended
    {"number": 1, "error": "…"}                                                         it could not be forked
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
from typing import Any

from elasticcb.cluster.local import follow_through

MESSAGE_BYTES = 1 << 20  # more than such a socket takes
_READY = b"1"


def main(arguments: list[str]) -> int:
    """Args: the process that this one serves, and the number of the socket's file."""
    parent_pid, control = int(arguments[0]), socket.socket(fileno=int(arguments[1]))
    parent = os.pidfd_open(parent_pid)
    if os.getppid() != parent_pid:
        return 1  # it ended before, and its number may be another's
    import_roles()
    # Python tells of threads that are not its own (see above) at each fork.
    warnings.filterwarnings("ignore", ".*multi-threaded", DeprecationWarning)
    gc.collect()
    gc.freeze()  # collections in children leave these pages shared
    request = _ForkServer(control, parent_pid, parent).serve()
    if request is None:
        os._exit(0)
    # From here on this is a child.
    from elasticcb.cli.main import main as command_line

    return command_line(request["arguments"])


def import_roles() -> None:
    """All that workers and servers need, so that no child imports it again."""
    import elasticcb.cli.main
    import elasticcb.data
    import elasticcb.program
    import elasticcb.ps.server
    import elasticcb.roles
    import elasticcb.worker.functions
    import elasticcb.worker.worker  # noqa: F401


class _ForkServer:
    """Forks what is asked for, and tells what ended."""

    def __init__(self, control: socket.socket, parent_pid: int, parent: int) -> None:
        self._control = control
        self._parent_pid, self._parent = parent_pid, parent
        self._children: dict[int, tuple[int, int]] = {}  # by pidfd: number, pid
        self._poller = select.poll()
        for file in (control.fileno(), parent):
            self._poller.register(file, select.POLLIN)

    def serve(self) -> dict[str, Any] | None:
        """Returns None when nobody asks any more; in a child, its request."""
        while True:
            for file, _ in self._poller.poll():
                if file == self._parent:
                    return None
                if file in self._children:
                    self._ended(file)
                    continue
                data = self._control.recv(MESSAGE_BYTES)
                if not data:
                    return None
                request: dict[str, Any] = json.loads(data)
                if self._fork(request):
                    return request

    def _ended(self, file: int) -> None:
        number, pid = self._children.pop(file)
        self._poller.unregister(file)
        os.close(file)
        self._tell({"number": number, "code": os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])})

    def _fork(self, request: dict[str, Any]) -> bool:
        """Whether this is the child."""
        number = request["number"]
        ours, theirs = socket.socketpair()
        with ours, theirs:
            try:
                pid = os.fork()
            except OSError as error:
                self._tell({"number": number, "error": str(error)})
                return False
            if pid == 0:
                ours.close()
                self._begin(request, theirs)
                return True
            theirs.close()
            watch = os.pidfd_open(pid)
            ours.recv(1)  # nothing, if it is dead already
            self._tell({"number": number, "pid": pid}, watch)
            with contextlib.suppress(BrokenPipeError):
                ours.send(_READY)
        self._children[watch] = number, pid
        self._poller.register(watch, select.POLLIN)
        return False

    def _begin(self, request: dict[str, Any], told: socket.socket) -> None:
        self._control.close()
        for other in self._children:
            os.close(other)
        follow_through(self._parent_pid, self._parent)
        _become(request)
        told.send(_READY)
        if not told.recv(1):  # nobody will ever know of this process
            os._exit(1)

    def _tell(self, message: dict[str, Any], *files: int) -> None:
        # When nobody reads any more, the loop will see it.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            socket.send_fds(self._control, [json.dumps(message).encode()], files)


def _become(request: dict[str, Any]) -> None:
    """Makes this process what it would be had it been started with the request's command."""
    from elasticcb.cluster.process_view import show_process_as

    os.setsid()
    log = os.open(request["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.chdir(request["directory"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv = [str(Path(__file__).parents[1] / "__main__.py"), *request["arguments"]]
    show_process_as([sys.executable, "-m", "elasticcb", *request["arguments"]], request["environment"])
    draw_own_random_numbers()


def draw_own_random_numbers() -> None:
    """Makes NumPy's global generator another one than that of the process that forked this one.

    Python's own, and that of rpc.py, see to it themselves; TensorFlow's are made when they are first used.
    """
    import numpy as np

    np.random.seed()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
