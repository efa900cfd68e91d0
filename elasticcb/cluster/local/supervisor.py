"""Keeps the master of a training job alive: a process that starts it, and restarts it when it is killed.

A helper process that has imported TensorFlow forks the master, workers and servers (launch/fork_process.py). It lives
as long as this process, so the next master starts at once and finds the running processes.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from elasticcb.cluster.local.fork_server import ForkedChild, ForkServer
from elasticcb.cluster.role import common_environment
from elasticcb.errors import GO_ON
from elasticcb.process.log_files import last_lines
from elasticcb.settings import FORK_LOG, JOURNAL_FILE, JobSettings

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_MOST_VAIN_LIVES = 5  # consecutive masters that are killed without having persisted anything
_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


def keep_master(
    settings: JobSettings, debug: bool, resumed: bool, say: Callable[[str], None], begun: Callable[[], None]
) -> int:
    """Starts the master of a training job, and restarts it when it is killed; returns the exit code of the last one.

    Call it from the main thread.
    """
    # If the fork process is killed, its children become children of this process.
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    journal = Path(settings.directory, JOURNAL_FILE)
    request: dict[str, Any] = {
        "arguments": sys.argv[1:],
        "settings": settings.to_json(),
        "debug": debug,
        "resumed": resumed,
        "since": 0.0,
    }
    vain = 0
    processes = _Processes(settings)
    try:
        while True:
            before = _size(journal)
            code = processes.run_master(request, begun)
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

    def run_master(self, request: dict[str, Any], begun: Callable[[], None]) -> int | None:
        """Waits for a master, passing on signals; returns its exit code, or minus the signal that killed it. None: it
        could not be started."""
        try:
            child = self._server.start_master(request)
        except OSError:  # the fork process has just been killed
            return None
        pid = child.pid  # until then, this process handles signals
        begun()
        passed_on = _wait(child)
        ending = child.poll()
        code = None if ending is None else ending.code
        if code is None and pid:
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
