"""Keeps the master of a training job alive: a process that does nothing but have it started, and another when it is
killed.

What starts it, and workers and servers, is a process that has imported TensorFlow (launch/fork_process.py). It lives
with this one, so that the next master is there at once, and finds what the last one has started.
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
from elasticcb.settings import JOURNAL_FILE, JobSettings

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_MOST_VAIN_LIVES = 5  # masters that are killed one after another without having written anything down
_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


def keep_master(
    settings: JobSettings, debug: bool, resumed: bool, say: Callable[[str], None], begun: Callable[[], None]
) -> int:
    """Has the master of a training job started, and another one when it is killed; the exit code of the last.

    Call it in the main thread.

    Args:
        debug: it shows the traceback of an error.
        resumed: it is to go on with the job in its folder.
        say: shows a line to the user.
        begun: hears of each master that it runs.
    """
    # What the process that starts the others leaves behind when it is killed becomes children of this one.
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
                say(f"Error: The master {what}, {vain} times without having come further. Look into its log.")
                return 1
            request |= {"resumed": True, "since": time.monotonic()}
            anew = code == GO_ON or processes.can_start_no_more
            say(f"The master {what}; another one goes on with the job{', on new processes' if anew else ''}.")
            if anew:
                processes.end()
                processes = _Processes(settings)
    finally:
        processes.end()


class _Processes:
    """The process that starts the others, and those, which end when this object does, or this process."""

    def __init__(self, settings: JobSettings) -> None:
        logs = Path(settings.directory, "logs")
        logs.mkdir(parents=True, exist_ok=True)
        self.log = logs / "zygote.log"
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
        """Waits for a master, to which signals are passed on; its exit code, or minus the signal that killed it. None:
        it could not be started."""
        try:
            child = self._server.start_master(request)
        except OSError:  # the process that was to fork it has just been killed
            return None
        pid = child.pid  # until then signals are for this process
        begun()
        passed_on = _wait(child)
        ending = child.poll()
        code = None if ending is None else ending.code
        if code is None and pid:
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        return 128 - code if code is not None and code < 0 and passed_on else code

    def how_ended(self) -> str:
        """How the process that starts the others ended, in words."""
        self._server.attend()
        return self._server.how_ended()

    def end(self) -> None:
        """Ends all of them at once."""
        os.close(self._lifeline)
        self._server.close()


def _wait(child: ForkedChild) -> bool:
    """Waits until a master has ended; whether a signal was passed on to it."""
    passed_on = False

    def pass_on(number: int, frame: Any) -> None:
        nonlocal passed_on
        passed_on = True
        child.send_signal(number)

    # What a shell has made ignored stays so.
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
