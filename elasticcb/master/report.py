"""Shows a running job to the user, and records for its page what it shows."""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Sequence
from typing import Any

from elasticcb.dashboard.beside import line_about, published_address
from elasticcb.master.master import Master
from elasticcb.master.snapshot import EpochEnd
from elasticcb.process.stats import PUSH
from elasticcb.process.wording import how_many
from elasticcb.settings import JobSettings
from elasticcb.sharding.partition import VariableSpec

logger = logging.getLogger(__name__)

_UPDATE_SECONDS = 0.5  # between updates of the display


class Report:
    """What a job tells the user.

    Args:
        display: the `Display` that shows it (elasticcb/cli/progress.py).
    """

    def __init__(self, master: Master, settings: JobSettings, display: Any) -> None:
        self._master, self._settings, self._display = master, settings, display
        self._loss_steps = settings.training.log_loss_steps or sys.maxsize
        self._next_update = 0.0
        self._logged_version = 0
        self._shows_page = not settings.cluster.dashboard  # or there is none

    def message(self, text: str) -> None:
        """An event for the user: a worker was lost, a checkpoint was written."""
        self._master.server.record_event("note", text)
        self._display.message(text)

    def evaluated(self, text: str, of_epoch: bool) -> None:
        """The result of an evaluation pass."""
        self._master.server.record_event("note", text)
        self._display.evaluated(text, of_epoch)

    def epoch_ended(self, end: EpochEnd) -> None:
        """An epoch was trained, and evaluated if requested."""
        self._master.server.record_event("note", end.text)
        self._display.epoch_ended(end)

    def show_model(self, variables: Sequence[VariableSpec]) -> None:
        """Prints the model's name and size."""
        definition = self._settings.model.definition
        tables = sum(1 for spec in variables if spec.table)
        parameters = sum(math.prod(spec.shape) for spec in variables if not spec.table)
        parts = [f"{parameters:,} parameters", *([how_many(tables, "embedding table")] if tables else [])]
        self.message(f"Model: {', '.join([definition, *parts] if definition else parts)}")

    def show(self) -> None:
        """Updates the display, at most every half second.

        Don't call it while holding the state: a blocked terminal must not block the workers.
        """
        now = time.monotonic()
        with self._master.server.state() as state:
            state.note_progress(now)
            version, loss = state.version, state.loss
        if loss is not None and version // self._loss_steps > self._logged_version // self._loss_steps:
            self._logged_version = version
            logger.info("Version %d: training loss %.6g", version, loss)
        if now >= self._next_update:
            self._next_update = now + _UPDATE_SECONDS
            seen = self._master.observe()
            with self._master.server.state() as state:
                leases = () if state.queue is None else state.queue.leases()
                pushes = seen.histograms[PUSH]
                state.history.note(seen, [lease.id for lease in leases], (sum(pushes.counts), pushes.sum))
            if not self._shows_page and (address := published_address(self._settings.directory)):
                self._shows_page = True
                self._display.message(line_about(address))  # its key is for this user
            self._display.update(seen)
