"""The lock of a checkpoint folder behind a URL, where files can't be locked: each job that takes it has a number, and
says every few seconds that it is alive (job_store.py).
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable

from elasticcb.errors import CheckpointError, StoreError, UsageError
from elasticcb.master.job_copy import BEAT_SECONDS, owner_name, owner_record, wait_until_free
from elasticcb.storage.job_store import JobStore

logger = logging.getLogger(__name__)

_FOLDER = ".checkpoints.lock"  # below the URL
_LAST_SECONDS = 10.0  # for what is being written when the job ends


class CheckpointLock:
    """The lock, held by this job until `release`.

    Args:
        url: the checkpoint folder.
        given: the user's setting with it, for messages.
        folder: the job's folder, for messages.
        run: name of the training: its next master need not wait until an earlier one is silent.
        say: shows a line to the user.

    Raises:
        UsageError: another job has it.
        StoreError: the store does not answer, or can't tell who was first.
    """

    def __init__(self, url: str, given: str, folder: str, run: str, say: Callable[[str], None]) -> None:
        self._given, self._folder, self._run = given, folder, run
        self._place = f"{url.rstrip('/')}/{_FOLDER}"
        with contextlib.closing(JobStore(self._place)) as store:
            number, owner = store.newest_owner()
            if not number and not store.tells_who_was_first():
                raise StoreError("Its file system has no conditional writes, or is that of one process.")
            if owner.get("holder") != run:
                wait_until_free(store, say, given, "two jobs would delete each other's files")
            self._number = number + 1
            if not store.create(owner_name(self._number), self._record()):
                raise UsageError(f"{given} has just been taken by another job. Choose another URL.")
        self._released = threading.Event()
        self._beating = threading.Thread(target=self._beat, name="checkpoint lock", daemon=True)
        self._beating.start()

    def check(self) -> None:
        """Raises `CheckpointError` if another job has taken the lock, because this one was silent for long."""
        newest = 0
        with contextlib.closing(JobStore(self._place)) as store, contextlib.suppress(StoreError):  # as in `_beat`
            newest, _ = store.newest_owner()
        if newest > self._number:
            raise CheckpointError(f"Another job took {self._given} while this one could not reach it.")

    def release(self) -> None:
        """Lets other jobs have it at once."""
        self._released.set()
        self._beating.join(_LAST_SECONDS)

    def _record(self, ended: bool = False) -> bytes:
        return owner_record(self._folder, self._run, ended)

    def _beat(self) -> None:
        with contextlib.closing(JobStore(self._place)) as store:
            ended = False
            while not ended:
                ended = self._released.wait(BEAT_SECONDS)
                with contextlib.suppress(StoreError):  # writing checkpoints reports it
                    store.put(owner_name(self._number), self._record(ended))
