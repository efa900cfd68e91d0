"""Shows people a job while it runs, and keeps for its page what was to be seen."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from typing import Any

from elasticcb.master.master import Master
from elasticcb.process.stats import PUSH
from elasticcb.settings import JobSettings

logger = logging.getLogger(__name__)

_UPDATE_SECONDS = 0.5  # between updates of the display


class Report:
    """Watches a job for its display.

    Args:
        master: of the job.
        settings: of the job.
        display: `update(JobSnapshot)`.
    """

    def __init__(self, master: Master, settings: JobSettings, display: Any) -> None:
        self._master, self._display = master, display
        self._loss_steps = settings.training.log_loss_steps or sys.maxsize
        self._next_update = 0.0
        self._logged_version = 0

    def show(self) -> None:
        """Updates the display, unless that was done a moment ago.

        Don't call it within a block of the state: a terminal that is held up must not hold up the workers.
        """
        now = time.monotonic()
        with self._master.desk.state() as state:
            state.note_progress(now)
            version, loss = state.version, state.loss
        if loss is not None and version // self._loss_steps > self._logged_version // self._loss_steps:
            self._logged_version = version
            logger.info("Version %d: training loss %.6g", version, loss)
        if now >= self._next_update:
            self._next_update = now + _UPDATE_SECONDS
            seen = self._master.observe()
            with self._master.desk.state() as state:
                leases = () if state.queue is None else state.queue.leases()
                pushes = seen.histograms[PUSH]
                state.past.note(seen, [lease.id for lease in leases], (sum(pushes.counts), pushes.sum))
            self._display.update(seen)


class KeptDisplay:
    """A display of a job whose messages are kept for the job's page, too.

    Args:
        display: `update(JobSnapshot)`, `message(text)`.
        happened: as `Past.happened`.
    """

    def __init__(self, display: Any, happened: Callable[[str, str], None]) -> None:
        self.update = display.update
        self._display, self._happened = display, happened

    def message(self, text: str) -> None:
        self._happened("note", text)
        self._display.message(text)
