"""Keeps the master of a training job alive: a process that does nothing but start it, and another when it is killed."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from elasticcb.settings import JOURNAL_FILE

GO_ON = 75  # exit code of a master after which another one is to go on; EX_TEMPFAIL of sysexits.h
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_MOST_VAIN_LIVES = 5  # masters that are killed one after another without having written anything down


def become_master(directory: str, say: Callable[[str], None]) -> bool:
    """Forks. The child returns, and is the master; this process waits for it, and ends as it does.

    Call it before anything that starts threads. When the master is killed by a signal that did not come through this
    process, or ends with `GO_ON`, another child returns, which is to go on with the job.

    Args:
        directory: the job's.
        say: shows a line to the user.

    Returns whether the child is to go on with the job of a master that was killed.
    """
    vain, restarts = 0, 0
    journal = Path(directory, JOURNAL_FILE)
    while True:
        before = _size(journal)
        child = _fork()
        if child == 0:
            return restarts > 0
        code = _wait(child)
        if code >= 0 and code != GO_ON:
            sys.exit(code)
        what = "ended" if code == GO_ON else f"was killed by {signal.Signals(-code).name}"
        vain = 0 if _size(journal) != before else vain + 1
        if vain == _MOST_VAIN_LIVES:
            say(f"Error: The master {what}, {vain} times without having come further. Look into its log.")
            sys.exit(1)
        restarts += 1
        say(f"The master {what}; another one goes on with the job.")


def _fork() -> int:
    own = os.getpid()
    child = os.fork()
    if child == 0:
        # Only here: the process that waits needs none of what it imports.
        from elasticcb.cluster.local import follow_parent

        os.setpgid(0, 0)  # Ctrl-C in a terminal comes through the launcher, once
        follow_parent(own)
    return child


def _wait(child: int) -> int:
    """Waits for the master, to which signals are passed on; its exit code, or minus the signal that killed it."""
    passed_on = False

    def pass_on(number: int, frame: Any) -> None:
        nonlocal passed_on
        passed_on = True
        os.kill(child, number)

    # What a shell has made ignored stays so.
    before = {number: signal.getsignal(number) for number in _FORWARDED}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, pass_on)
    try:
        ended = 0
        while ended != child:  # as the first process of a container it gets orphans, too
            ended, status = os.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    code = os.waitstatus_to_exitcode(status)
    return 128 - code if code < 0 and passed_on else code


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
