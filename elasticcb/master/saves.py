"""Lets the parameter servers write their recovery files: at intervals, and before training ends."""

from __future__ import annotations

import contextlib
import logging
import threading
import time

from elasticcb.callbacks.warning import CallbackWarning
from elasticcb.errors import CheckpointError, ElasticCBError
from elasticcb.master.desk import Desk
from elasticcb.master.job_state import JobState
from elasticcb.master.ps_admin import PSControl

logger = logging.getLogger(__name__)

_BUSY_SHARE = 0.2  # maximum share of time spent writing, however large the model, until all is trained
_PAUSE_SECONDS = 0.25  # while a server is lost


class Saves:
    """Saves the servers' state in a thread of its own, and tells the queue what can't be lost any more."""

    def __init__(self, desk: Desk, control: PSControl, interval_seconds: float) -> None:
        self._desk, self._control, self._interval = desk, control, interval_seconds
        self._closed = False
        self._map = 0  # version of the map of the files
        self._earliest = 0.0  # time of the next save, unless all is trained
        self._thread = threading.Thread(target=self._run, name="saves", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        pause = self._interval
        while True:
            with self._desk.state():
                self._desk.wait_for(self._is_due, pause)
                if self._closed:
                    return
            begun = time.monotonic()
            if self.save():
                ended = time.monotonic()
                least = (ended - begun) / _BUSY_SHARE
                self._earliest, pause = ended + least, max(self._interval, least)
            else:
                time.sleep(_PAUSE_SECONDS)
                pause = 0.0

    def _is_due(self, state: JobState) -> bool:
        queue = state.queue
        if self._closed or queue is None or not queue.wants_save:
            return self._closed
        return queue.all_trained or time.monotonic() >= self._earliest

    def save(self) -> bool:
        """Saves what has been reported; returns whether the same servers have written, or can't write."""
        with self._desk.state() as state:
            queue = state.queue
            mark = 0 if queue is None else queue.begin_save()
        written, moves = True, self._control.servers.shard_map.version
        try:
            self._control.persist()
        except CheckpointError as error:
            written = False
            text = (
                f"{error} Training continues; what is not saved is trained again if this server is lost now, but "
                "updates that can't be saved for long are lost then. Free space, or make the folder writable."
            )
            with self._desk.state() as state:
                state.totals.recovery_files_failed += 1
                state.warn(CallbackWarning("servers can't write recovery files", text))
        except ElasticCBError as error:
            logger.debug("The servers' state is not saved: %s", error)
            return False
        if self._control.servers.shard_map.version != moves:
            return False  # a server that was asked may have had no part of the model yet
        if written and self._map != moves:
            with contextlib.suppress(ElasticCBError):  # then next time
                self._control.persist(forget_older=True)
                self._map = moves
        with self._desk.state() as state:
            if queue is not None and state.queue is queue and not self._closed and (written or queue.wants_save):
                queue.saved(mark)  # also if it can't be saved, but training must end, or too much is unsaved
                state.note()
                state.wake()
        return True

    def close(self) -> None:
        """Saves nothing any more."""
        with self._desk.state() as state:
            self._closed = True
            state.wake()
