"""Lets the parameter servers write their recovery files: at intervals, and before training ends."""

from __future__ import annotations

import logging
import threading
import time

from elasticcb.callbacks.warning import CallbackWarning
from elasticcb.errors import CheckpointError, ElasticCBError
from elasticcb.master.desk import Desk
from elasticcb.master.job_state import JobState
from elasticcb.master.ps_admin import PSControl

logger = logging.getLogger(__name__)

_BUSY_SHARE = 0.2  # maximum share of time spent writing, however large the model
_PAUSE_SECONDS = 0.25  # while a server is lost


class Saves:
    """Saves the servers' state in a thread of its own, and tells the queue what can't be lost any more."""

    def __init__(self, desk: Desk, control: PSControl, interval_seconds: float) -> None:
        self._desk, self._control, self._interval = desk, control, interval_seconds
        self._closed = False
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
                pause = max(self._interval, (time.monotonic() - begun) / _BUSY_SHARE)
            else:
                time.sleep(_PAUSE_SECONDS)
                pause = 0.0

    def _is_due(self, state: JobState) -> bool:
        return self._closed or (state.queue is not None and state.queue.wants_save)

    def save(self) -> bool:
        """Saves what has been reported; returns whether the servers have answered."""
        with self._desk.state() as state:
            queue = state.queue
            mark = 0 if queue is None else queue.begin_save()
        try:
            self._control.persist()
        except CheckpointError as error:
            text = (
                f"{error} Training continues, but if this server is lost now, the updates since its last recovery file "
                "are lost."
            )
            with self._desk.state() as state:
                state.totals.recovery_files_failed += 1
                state.warn(CallbackWarning("servers can't write recovery files", text))
        except ElasticCBError as error:
            logger.debug("The servers' state is not saved: %s", error)
            return False
        with self._desk.state() as state:
            if queue is not None and state.queue is queue and not self._closed:
                queue.saved(mark)
                state.note()
                state.wake()
        return True

    def close(self) -> None:
        """Saves nothing any more."""
        with self._desk.state() as state:
            self._closed = True
            state.wake()
