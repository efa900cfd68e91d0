"""Client of the process that forks the others (launch/fork_process.py), for masters and their supervisor."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from elasticcb.process.import_path import python_code
from elasticcb.process.log_files import FILE_VARIABLE


@dataclass(frozen=True)
class Launch:
    """The specification of a process to start.

    Attributes:
        arguments: arguments of the `elasticcb` command.
        environment: its complete environment, except the variable of the log.
        log: file to which standard output and standard error are appended.
        own_path: don't pass on this process's import path, which belongs to another program (Ray).
    """

    arguments: tuple[str, ...]
    environment: dict[str, str]
    log: Path
    own_path: bool = False

    @property
    def full_environment(self) -> dict[str, str]:
        return self.environment | {FILE_VARIABLE: str(self.log.absolute())}

    @property
    def command(self) -> list[str]:
        return [sys.executable, "-c", python_code("elasticcb.cli.main", self.own_path), *self.arguments]


@dataclass(frozen=True)
class Ending:
    """How a process ended: `reason` as text; `failed`: with an error of its own.

    `code` is its exit code, or minus the signal that killed it; None: unknown.
    """

    reason: str
    failed: bool
    code: int | None = None

    @classmethod
    def of(cls, code: int) -> Ending:
        """Derived from an exit code; a negative one is the signal that killed the process."""
        return cls(f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}", code > 0, code)


class Child(Protocol):
    """One process."""

    @property
    def pid(self) -> int:
        """Waits until the process exists, if it is being started."""

    def poll(self) -> Ending | None:
        """How it ended; None while it runs."""

    def send_signal(self, number: int) -> None:
        """Does nothing if the process has ended."""

    def wait(self, seconds: float | None = None) -> bool:
        """Whether it ended within `seconds`."""


class SpawnedChild:
    """A process started as a new program, not forked."""

    def __init__(self, launch: Launch) -> None:
        with launch.log.open("ab") as log:
            self._process = subprocess.Popen(
                launch.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=launch.full_environment,
                # In its own session, so that Ctrl-C reaches only the master, which then ends the others in order.
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> Ending | None:
        code = self._process.poll()
        return None if code is None else Ending.of(code)

    def send_signal(self, number: int) -> None:
        self._process.send_signal(number)

    def wait(self, seconds: float | None = None) -> bool:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        return self._process.returncode is not None


logger = logging.getLogger(__name__)

_MESSAGE_BYTES = 1 << 16
_TOLD_SECONDS = 2.0  # within which the end of a process is reported
_UNKNOWN = Ending("its exit code is unknown, because the process that started it is gone", False)


def can_fork() -> bool:
    """Whether this system supports it: Linux with pidfds."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:
        return False
    return True


class Forked(NamedTuple):
    """A process that was forked for an earlier master. `watch` is its pidfd."""

    number: int
    pid: int
    watch: int
    arguments: Sequence[str]


class ForkServer:
    """Starts processes by forking one that has imported everything.

    It accepts requests at once and serves them when ready. If it dies, its pending processes are started without it,
    and running ones continue.

    Args:
        process: the fork process, if it ends with this object.
    """

    def __init__(
        self,
        control: socket.socket,
        process: subprocess.Popen[bytes] | None = None,
        forked: Sequence[Forked] = (),
    ) -> None:
        self.lost = False
        self._ended = False  # by `give_up_waiting`
        self._control, self._process = control, process
        self._started: dict[int, ForkedChild] = {}  # by number; requested or running, until they end
        self._count = max((each.number for each in forked), default=0)
        self.taken_over: list[tuple[Sequence[str], ForkedChild]] = []
        for each in forked:
            child = self._started[each.number] = ForkedChild(self, None)
            child.runs(each.pid, each.watch)
            self.taken_over.append((each.arguments, child))

    @classmethod
    def launch(cls, environment: dict[str, str], log: Path, watch: int) -> ForkServer:
        """Starts a new fork process.

        Args:
            environment: variables that must be set before TensorFlow is imported.
            watch: file that becomes readable when it must end with all that it forked.
        """
        control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, log.open("ab") as file:
            process = subprocess.Popen(
                [sys.executable, "-c", python_code("elasticcb.launch.fork_process"), str(theirs.fileno()), str(watch)],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env=environment,
                pass_fds=[theirs.fileno(), watch],
                start_new_session=True,
            )
        return cls(control, process)

    @property
    def files(self) -> list[int]:
        """A file that becomes readable when there is something to `attend`."""
        return [] if self.lost else [self._control.fileno()]

    def start(self, launch: Launch) -> Child:
        """Starts a process, which may exist only some moments later."""
        if self.lost:
            return SpawnedChild(launch)
        request = {
            "arguments": launch.arguments,
            "environment": launch.full_environment,
            "directory": os.getcwd(),
            "log": str(launch.log.absolute()),
        }
        try:
            return self._ask(request, launch)
        except OSError as error:  # it is gone, or the environment is too large for a message
            logger.warning("Starting a process without forking, because forking failed: %s", error)
            return SpawnedChild(launch)

    def start_master(self, request: dict[str, Any]) -> ForkedChild:
        """Starts a master, which writes to standard output and standard error of this process.

        Raises `OSError` if the request can't be sent.
        """
        return self._ask({**request, "master": True}, None, (1, 2))

    def _ask(self, request: dict[str, Any], launch: Launch | None, files: Sequence[int] = ()) -> ForkedChild:
        self._count += 1
        socket.send_fds(self._control, [json.dumps({**request, "number": self._count}).encode()], files)
        child = self._started[self._count] = ForkedChild(self, launch)
        return child

    def attend(self, seconds: float | None = 0.0) -> None:
        """Processes messages; waits up to `seconds` (None: forever) for one."""
        while not self.lost and _readable(seconds, self._control.fileno()):
            seconds = 0.0
            try:
                data, files, _, _ = socket.recv_fds(self._control, _MESSAGE_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
            except OSError:
                data, files = b"", []
            if not data:
                self._lose()
                return
            self._note(json.loads(data), files)

    def _note(self, message: dict[str, Any], files: list[int]) -> None:
        child = self._started[message["number"]]
        if "pid" in message:
            if not files:  # the system drops descriptors for which there is no number
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            child.runs(message["pid"], files[0])
            return
        del self._started[message["number"]]
        if "code" in message:
            child.ended(Ending.of(message["code"]))
        else:
            logger.warning("Starting a process without forking, because forking failed: %s", message["error"])
            child.start_from_nothing()

    def _lose(self) -> None:
        self.lost = True
        self._control.close()
        children, self._started = list(self._started.values()), {}
        if children and not self._ended:
            logger.warning(
                "The fork process is gone. Running processes continue; new ones are started without forking."
            )
        for child in children:
            if child.is_waited_for:
                child.start_from_nothing()

    def how_ended(self) -> str:
        """How the lost fork process ended, as text."""
        assert self._process is not None
        return f"the fork process ended ({Ending.of(self._process.wait()).reason})"

    def give_up_waiting(self) -> None:
        """Cancels processes that have not been started yet."""
        self.attend()
        waiting = [child for child in self._started.values() if child.is_waited_for]
        for child in waiting:
            child.cancelled = True
        if waiting and self._process is not None:
            self._ended = True
            self._process.kill()
            self._process.wait()
            self.attend()
        while any(child.is_waited_for for child in waiting):
            self.attend(None)

    def close(self) -> None:
        """Releases or ends the fork process; none of its processes may still run."""
        if not self.lost:
            self._started.clear()
            self._lose()
        if self._process is not None:
            self._process.kill()
            self._process.wait()


class ForkedChild:
    """A process that a `ForkServer` starts. Only `ForkServer` creates it."""

    def __init__(self, server: ForkServer, launch: Launch | None) -> None:
        self._server = server
        self._launch = launch  # starts it without forking; None if impossible
        self._pid = 0
        self._watch = -1  # its pidfd, once it runs
        self._ending: Ending | None = None
        self._instead: SpawnedChild | None = None
        self.cancelled = False  # it must end as soon as it exists

    # ------------------------------------------------------------ messages from the server

    @property
    def is_waited_for(self) -> bool:
        """Whether no message about it has arrived yet."""
        return not self._pid and self._ending is None and self._instead is None

    def runs(self, pid: int, watch: int) -> None:
        self._pid, self._watch = pid, watch
        if self.cancelled:
            self.send_signal(signal.SIGKILL)

    def ended(self, ending: Ending) -> None:
        self._ending = ending
        if self._watch >= 0:
            os.close(self._watch)
            self._watch = -1

    def start_from_nothing(self) -> None:
        if self.cancelled or self._launch is None:
            self._ending = Ending("it was never started", False)
        else:
            self._instead = SpawnedChild(self._launch)

    # ------------------------------------------------------------ as a Child

    @property
    def pid(self) -> int:
        while self.is_waited_for:
            self._server.attend(None)
        return self._pid if self._instead is None else self._instead.pid

    def poll(self) -> Ending | None:
        self._server.attend()
        if self._instead is not None:
            return self._instead.poll()
        if self._ending is None and self._server.lost and _readable(0.0, self._watch):
            self.ended(_UNKNOWN)
        return self._ending

    def send_signal(self, number: int) -> None:
        if self._instead is not None:
            self._instead.send_signal(number)
        elif self.is_waited_for:
            self.cancelled = True
        elif self._watch >= 0:
            try:
                signal.pidfd_send_signal(self._watch, number)
            except ProcessLookupError:
                return

    def wait(self, seconds: float | None = None) -> bool:
        give_up = None if seconds is None else time.monotonic() + seconds
        while self.poll() is None:
            left = None if give_up is None else give_up - time.monotonic()
            if left is not None and left <= 0:
                return False
            if self._instead is not None:
                return self._instead.wait(left)
            if self._watch >= 0 and _readable(0.0, self._watch):
                self._server.attend(_TOLD_SECONDS)
                if self._ending is None:
                    self.ended(_UNKNOWN)
            else:
                _readable(left, *self._server.files, *([self._watch] if self._watch >= 0 else []))
        return True


def _readable(seconds: float | None, *files: int) -> bool:
    poller = select.poll()
    for file in files:
        poller.register(file, select.POLLIN)
    return bool(poller.poll(None if seconds is None else seconds * 1000.0))
