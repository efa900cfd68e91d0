"""Exclusive ownership of a folder below a URL, where files can't be locked: each owner has a number, and writes every
few seconds that it is alive (job_store.py).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from elasticcb.errors import StoreError, UsageError
from elasticcb.process.host import host_name
from elasticcb.storage.job_store import OWNERS, JobStore

logger = logging.getLogger(__name__)

SILENCE_SECONDS = 30.0  # after which an owner that has not written is taken for dead
BEAT_SECONDS = 5.0  # between two writes of an owner
_LAST_SECONDS = 10.0  # for what is being written when the owner ends


def owner_name(number: int) -> str:
    """The file of an owner."""
    return f"{OWNERS}/{number:08d}"


def owner_record(folder: Path | str, holder: str, ended: bool = False) -> bytes:
    """The content of this process's file as an owner."""
    place = {"host": host_name(), "process": os.getpid(), "folder": str(folder), "holder": holder, "ended": ended}
    return json.dumps(place).encode()


def wait_until_free(
    store: JobStore,
    say: Callable[[str], None],
    what: str = "",
    harm: str = "two masters would undo each other's work",
) -> None:
    """Returns when the last owner has ended, is silent, or has removed everything. Raises `UsageError` if it is alive.

    Args:
        what: what it owns, for messages; "": the job there.
        harm: what would happen without this.
    """
    number, owner = store.newest_owner()
    if not number or owner.get("ended"):
        return
    what, name = what or f"The job in {store.url}", owner_name(number)
    who = f"process {owner.get('process')} on {owner.get('host')}"
    with contextlib.suppress(FileNotFoundError):
        first, begun = store.changed(name), time.monotonic()
        silent = store.now() - first
        if silent < SILENCE_SECONDS:
            say(f"{what} was used by {who} {max(silent, 0):.0f} s ago. Waiting until it is silent.")
        while silent < SILENCE_SECONDS:
            time.sleep(min(BEAT_SECONDS, SILENCE_SECONDS - silent + 0.5))
            if store.changed(name) != first:
                if store.newest_owner()[1].get("ended"):
                    return
                raise UsageError(
                    f"{what} is in use by {who}; {harm}. Wait until it ends, or stop it there (its folder is "
                    f"{owner.get('folder')}); or choose another URL."
                )
            silent = max(store.now() - first, time.monotonic() - begun)  # its clock may have been set back


class StoreLock:
    """The lock of a folder below a URL, held by this job until `release`. Not thread-safe.

    Args:
        url: the folder.
        file: folder of the lock below it, one per purpose.
        name: the user's name of the folder, for messages.
        folder: the job's folder, for messages.
        run: name of the training: its next master need not wait until an earlier one is silent.
        say: shows a line to the user.

    Raises:
        UsageError: another job has it.
        StoreError: the store does not answer.
    """

    def __init__(self, url: str, file: str, name: str, folder: str, run: str, say: Callable[[str], None]) -> None:
        self._name, self._folder, self._run = name, folder, run
        self._place = f"{url.rstrip('/')}/{file}"
        self._number = 0  # 0: not locked
        self._asked = JobStore(self._place)  # by `problem`
        self._released = threading.Event()
        self._beating = threading.Thread(target=self._beat, name="store lock", daemon=True)
        with contextlib.closing(JobStore(self._place)) as store:
            number, owner = store.newest_owner()
            if not number and not store.tells_who_was_first():
                logger.warning(
                    "%s is not locked against other jobs: its file system has no conditional writes, or is that of "
                    "one process. Make sure that no two jobs use it",
                    name,
                )
                return
            if owner.get("holder") != run:
                wait_until_free(store, say, name, "two jobs would delete each other's files")
            # Whoever else has read the same number may create this file before.
            if not store.create(owner_name(number + 1), self._record()):
                raise UsageError(f"{name} has just been taken by another job. Choose another URL.")
            self._number = number + 1
        self._beating.start()

    def problem(self) -> str:
        """Which other job has taken the lock, because this one was silent for long; "": none."""
        newest = 0
        with contextlib.suppress(StoreError):  # as in `_beat`
            newest, _ = self._asked.newest_owner() if self._number else (0, {})
        if newest > self._number:
            return f"Another job took {self._name} while this one could not reach it."
        return ""

    def release(self) -> None:
        """Lets other jobs have it at once."""
        self._asked.close()
        self._released.set()
        if self._beating.ident is not None:
            self._beating.join(_LAST_SECONDS)

    def _record(self, ended: bool = False) -> bytes:
        return owner_record(self._folder, self._run, ended)

    def _beat(self) -> None:
        with contextlib.closing(JobStore(self._place)) as store:
            ended = False
            while not ended:
                ended = self._released.wait(BEAT_SECONDS)
                with contextlib.suppress(StoreError):  # writing to the folder reports it
                    store.put(owner_name(self._number), self._record(ended))
