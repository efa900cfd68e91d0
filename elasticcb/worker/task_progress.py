"""Progress of a task, results of its batches, and reports to the master."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from elasticcb.errors import NonFiniteError
from elasticcb.model.metric_messages import States
from elasticcb.proto import elasticcb_pb2 as pb
from elasticcb.settings import NonFinite
from elasticcb.worker.session import BatchOfEpoch, Session
from elasticcb.worker.task_input import Batch, TaskStarted

logger = logging.getLogger(__name__)


@dataclass
class Tally:
    """A worker's counters over its tasks.

    Attributes:
        present: task type, epoch and evaluation pass of the last task.
        batches: batches run here, by these.
        last_version: version of the model at the last batch.
    """

    present: tuple[int, int, int] = (0, 0, 0)
    batches: Counter[tuple[int, int, int]] = field(default_factory=Counter)
    predicts: bool = False
    steps: int = 0
    first_step_told: bool = False
    last_version: int = 0

    def tell_first_step(self) -> None:
        """The servers have applied a step; logs the first one."""
        if not self.first_step_told:
            logger.info("The first step is done, after compiling it")
            self.first_step_told = True


class TaskProgress:
    """Progress of one task.

    Attributes:
        units_done: records, or batches, that count as done.
        event: event of the current batch for the master's callbacks.
        servers: as in `ProgressReporter.update`.
    """

    def __init__(self, session: Session, tally: Tally, started: TaskStarted) -> None:
        self._session, self._tally, self.task = session, tally, started.task
        self.counts_progress = started.counts_progress
        self.report = pb.ReportTaskRequest(lease=started.task.lease)
        self.units_done = 0
        self.event: pb.BatchEvent | None = None
        self.servers = session.client.newest_server
        self._done_at = time.monotonic()  # end of the previous batch
        self._batch_states: dict[str, list[Any]] = {}  # of training batches

    def add_states(self, states: States) -> None:
        """Keeps a training batch's metric states until the task's end."""
        for name, values in states.items():
            if name in self._session.training_units:
                self._batch_states.setdefault(name, []).append(values)

    @property
    def training_states(self) -> States:
        """Metric states of all training batches."""
        merge = self._session.metrics.merge_states
        return {name: merge(name, batches) for name, batches in self._batch_states.items()}

    def note_event(self, batch: Batch, version: int, logs: Mapping[str, Any] = MappingProxyType({})) -> None:
        """Records the event of a batch for the master's callbacks."""
        if self._session.reports_batches:
            numbers = {name: value for name, value in logs.items() if isinstance(value, (int, float))}
            number = self.task.epoch if self.task.type == pb.TRAINING else self.task.evaluation_round
            self.event = pb.BatchEvent(
                type=self.task.type, number=number, version=version, size=batch.records, logs=numbers
            )

    def pass_over(self, reason: str, batch: BatchOfEpoch, logs: dict[str, Any]) -> None:
        """Skips a batch with NaN or infinity, or fails the job, depending on the settings."""
        session = self._session
        if session.settings.training.non_finite is NonFinite.STOP:
            # A callback that stops training now, such as TerminateOnNaN, ends the job in order.
            given = {**logs, "loss": float("nan")}
            session.call_of_batch("on_train_batch_end", batch, session.ps.version, given)
            if not session.callbacks.stop_requested:
                raise NonFiniteError.of(reason)
        logger.warning("Batch skipped: %s", reason)
        self.report.batches_skipped += 1

    def lap(self) -> float:
        """Seconds since the previous batch; 0 if not meaningful."""
        now = time.monotonic()
        compiled = self._tally.steps > 1 + self._session.settings.training.max_staleness
        seconds, self._done_at = now - self._done_at, now
        return seconds if compiled and self.task.type == pb.TRAINING else 0.0

    def note_done(self, units: int, loss: float | None, seconds: float | None = None) -> None:
        """Counts a batch as done, and reports to the master at intervals."""
        self.units_done += units
        self.tell(
            loss=loss,
            urgent=self._passed_a_milestone(),
            event=self.event,
            seconds=self.lap() if seconds is None else seconds,
        )

    def tell(self, **more: Any) -> None:
        """Sends progress soon, as a heartbeat. Arguments as in `ProgressReporter.update`."""
        session = self._session
        # Predictions of a partial task die with its worker.
        lost = self.task.type == pb.PREDICTION and (session.reports_predictions or session.holds_predictions)
        done = self.units_done if self.counts_progress and not lost else 0
        session.progress.update(self.task.lease, done, session.ps.version, servers=self.servers, **more)

    def _passed_a_milestone(self) -> bool:
        """Whether the master has something to do at the current version."""
        settings, version = self._session.settings, self._session.ps.version
        last, self._tally.last_version = self._tally.last_version, version
        every = (settings.training.evaluation_steps, settings.checkpoint.steps)
        return any(steps and version // steps > last // steps for steps in every)
