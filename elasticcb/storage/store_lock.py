"""Exclusive ownership of a folder below a URL, where files can't be locked: each owner has a number, and writes every
few seconds that it is alive.
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
from typing import Any

from elasticcb.errors import StoreError, UsageError
from elasticcb.process.host import host_name
from elasticcb.storage.folder_lock import ENDING_SECONDS, FolderLock
from elasticcb.storage.job_store import OWNERS, JobStore
from elasticcb.storage.remote_files import as_path, is_url

logger = logging.getLogger(__name__)

SILENCE_SECONDS = 30.0  # after which an owner that has not written is taken for dead
BEAT_SECONDS = 5.0  # between two writes of an owner
_LAST_SECONDS = 10.0  # for what is being written when the owner ends
_TRIES, _TRY_SECONDS = 5, 0.2  # to read what is being written


class Owner:
    """This process as an owner of what is below a URL.

    Args:
        folder: the job's folder, for messages.
        holder: a name: the next owner with the same one need not wait until this one is silent.
    """

    def __init__(self, number: int, folder: Path | str, holder: str) -> None:
        self.number, self.holder, self._folder, self._begun = number, holder, str(folder), time.time_ns()

    def take(self, store: JobStore) -> bool:
        """Becomes the owner; returns whether it is the first with this number."""
        return store.create(_file_of(self.number), self._record())

    def beat(self, store: JobStore, ended: bool = False) -> None:
        """Writes that it is alive, or has `ended`."""
        store.put(_file_of(self.number), self._record(ended))

    def is_replaced(self, store: JobStore) -> bool:
        """Whether there is a later owner."""
        return newest_owner(store)[0] > self.number

    def withdraw(self, store: JobStore) -> None:
        """As if `take` had not been called."""
        store.remove(_file_of(self.number))

    def _record(self, ended: bool = False) -> bytes:
        mine = {"host": host_name(), "process": os.getpid(), "folder": self._folder, "holder": self.holder}
        return json.dumps({**mine, "begun": self._begun, "ended": ended}).encode()


def _file_of(number: int) -> str:
    return f"{OWNERS}/{number:08d}"


def newest_owner(store: JobStore) -> tuple[int, dict[str, Any]]:
    """The number of the last owner, and what it wrote: nothing if it was lost with its machine meanwhile. 0: there was
    none."""
    numbers = [int(name) for name in store.names(OWNERS) if name.isdigit()]
    if not numbers:
        return 0, {}
    for _ in range(_TRIES):
        with contextlib.suppress(FileNotFoundError, TypeError, ValueError):
            return max(numbers), dict(json.loads(store.get(_file_of(max(numbers)))))
        time.sleep(_TRY_SECONDS)  # it is being written
    return max(numbers), {}


def wait_until_free(
    store: JobStore, say: Callable[[str], None], what: str = "", harm: str = "two masters would undo each other's work"
) -> None:
    """Returns when the last owner has ended, is silent, or has removed everything. Raises `UsageError` if it is alive.

    Args:
        what: what it owns, for messages; "": the job there.
        harm: what would happen without this.
    """
    number, owner = newest_owner(store)
    if not number or owner.get("ended"):
        return
    what, name = what or f"The job in {store.url}", _file_of(number)
    who = f"process {owner.get('process')} on {owner.get('host')}"
    with contextlib.suppress(FileNotFoundError):
        first, begun = store.changed(name), time.monotonic()
        silent = store.now() - first
        if silent < SILENCE_SECONDS:
            say(f"{what} was used by {who} {max(silent, 0):.0f} s ago. Waiting until it is silent.")
        while silent < SILENCE_SECONDS:
            time.sleep(min(BEAT_SECONDS, SILENCE_SECONDS - silent + 0.5))
            if store.changed(name) != first:
                if newest_owner(store)[1].get("ended"):
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

    Raises:
        UsageError: another job has it.
        StoreError: the store does not answer.
    """

    def __init__(self, url: str, file: str, name: str, folder: str, run: str, say: Callable[[str], None]) -> None:
        self._name, self._place = name, f"{url.rstrip('/')}/{file}"
        self._owner: Owner | None = None  # None: not locked
        self._asked = JobStore(self._place)  # by `problem`
        self._released = threading.Event()
        self._beating: threading.Thread | None = None
        with JobStore(self._place) as store:
            number, last = newest_owner(store)
            if not number and not store.tells_who_was_first():
                logger.warning(
                    "%s is not locked against other jobs: its file system has no conditional writes, or is that of "
                    "one process. Make sure that no two jobs use it",
                    name,
                )
                return
            if last.get("holder") != run:
                wait_until_free(store, say, name, "two jobs would delete each other's files")
            owner = Owner(number + 1, folder, run)
            if not owner.take(store):  # whoever else has read the same number was the first
                raise UsageError(f"{name} has just been taken by another job. Choose another URL.")
        self._owner = owner
        self._beating = threading.Thread(target=self._beat, args=[owner], name="store lock", daemon=True)
        self._beating.start()

    def problem(self) -> str:
        """Which other job has taken the lock, because this one was silent for long; "": none."""
        with contextlib.suppress(StoreError):  # as in `_beat`
            if self._owner is not None and self._owner.is_replaced(self._asked):
                return f"Another job took {self._name} while this one could not reach it."
        return ""

    def release(self) -> None:
        """Lets other jobs have it at once."""
        self._asked.close()
        self._released.set()
        if self._beating is not None:
            self._beating.join(_LAST_SECONDS)

    def _beat(self, owner: Owner) -> None:
        with JobStore(self._place) as store:
            ended = False
            while not ended:
                ended = self._released.wait(BEAT_SECONDS)
                with contextlib.suppress(StoreError):  # writing to the folder reports it
                    owner.beat(store, ended)


def locked(
    place: str, file: str, name: str, folder: str, run: str, say: Callable[[str], None]
) -> FolderLock | StoreLock:
    """Locks a folder that is given by its path or a URL, until `release`; a `file://` URL is the same as its path.

    Args:
        file, name, folder, run, say: as for `StoreLock`.

    Raises:
        UsageError: another job has it.
        StoreError: it can't be used now.
    """
    local = as_path(place)
    if is_url(local):
        return StoreLock(place, file, name, folder, run, say)
    lock = FolderLock(Path(local), name, ENDING_SECONDS, file)
    try:
        Path(local).mkdir(parents=True, exist_ok=True)  # which other users may read
        lock.take()
    except OSError as error:
        raise StoreError(f"{name} can't be written: {error}.") from error
    return lock
