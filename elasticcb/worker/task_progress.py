"""How far a task is, what came of its batches, and what the master hears of it meanwhile."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from elasticcb.errors import NonFiniteError
from elasticcb.model.metric_messages import States
from elasticcb.proto import elasticcb_pb2 as pb
from elasticcb.settings import NonFinite
from elasticcb.worker.session import Session
from elasticcb.worker.task_input import Batch, TaskStarted

logger = logging.getLogger(__name__)


@dataclass
class Tally:
    """What a worker counts over its tasks.

    Attributes:
        present: task type, epoch and evaluation round of the last task.
        batches: that ran here, by those.
        predicts: it has had a prediction task.
        steps: training steps.
        first_step_told: the log has a line of the first one.
        last_version: of the model, at the last batch.
    """

    present: tuple[int, int, int] = (0, 0, 0)
    batches: Counter[tuple[int, int, int]] = field(default_factory=Counter)
    predicts: bool = False
    steps: int = 0
    first_step_told: bool = False
    last_version: int = 0

    def tell_first_step(self) -> None:
        """The servers have taken a step; it may have been the first one."""
        if not self.first_step_told:
            logger.info("The first step is done, after compiling it")
            self.first_step_told = True


class TaskProgress:
    """Of one task.

    Args:
        session: of the worker.
        tally: of the worker; counted on.
        started: the task.

    Attributes:
        report: of the task, as far as it is made.
        units_done: records, or batches, that count as done.
        event: what the master's callbacks will hear of the present batch.
    """

    def __init__(self, session: Session, tally: Tally, started: TaskStarted) -> None:
        self._session, self._tally, self.task = session, tally, started.task
        self.counts_progress = started.counts_progress
        self.report = pb.ReportTaskRequest(lease=started.task.lease)
        self.units_done = 0
        self.event: pb.BatchEvent | None = None
        self._done_at = time.monotonic()  # when the batch before ended
        self._batch_states: dict[str, list[Any]] = {}  # of training batches

    def add_states(self, states: States) -> None:
        """Keeps a training batch's metric states until the task's end."""
        for name, values in states.items():
            if name in self._session.training_units:
                self._batch_states.setdefault(name, []).append(values)

    @property
    def training_states(self) -> States:
        """Those of all training batches."""
        merge = self._session.metrics.merge_states
        return {name: merge(name, batches) for name, batches in self._batch_states.items()}

    def note_event(self, batch: Batch, version: int, logs: Mapping[str, Any] = MappingProxyType({})) -> None:
        """What the master's callbacks will hear of the batch."""
        if self._session.reports_batches:
            numbers = {name: value for name, value in logs.items() if isinstance(value, (int, float))}
            number = self.task.epoch if self.task.type == pb.TRAINING else self.task.evaluation_round
            self.event = pb.BatchEvent(
                type=self.task.type, number=number, version=version, size=batch.records, logs=numbers
            )

    def pass_over(self, reason: str, batch: Batch, logs: dict[str, Any]) -> None:
        """A batch has NaN or infinity: the job fails, unless it need not."""
        session = self._session
        if session.settings.training.non_finite is NonFinite.STOP:
            # A callback that ends training now, as TerminateOnNaN does, lets the job end in order.
            given = {"size": batch.records, **logs, "loss": float("nan")}
            session.call_of_batch("on_train_batch_end", session.ps.version, given)
            if not session.callbacks.stop_requested:
                raise NonFiniteError.of(reason)
        logger.warning("Batch skipped: %s", reason)
        self.report.batches_skipped += 1

    def lap(self) -> float:
        """Seconds since the batch before; 0 where they tell nothing."""
        now = time.monotonic()
        compiled = self._tally.steps > 1 + self._session.settings.training.max_staleness
        seconds, self._done_at = now - self._done_at, now
        return seconds if compiled and self.task.type == pb.TRAINING else 0.0

    def note_done(self, units: int, loss: float | None, seconds: float | None = None) -> None:
        """Counts a batch as done, and tells the master at times.

        Args:
            units: of the batch.
            seconds: that it took, where they are known already.
        """
        self.units_done += units
        self.tell(
            loss=loss,
            urgent=self._passed_a_milestone(),
            event=self.event,
            seconds=self.lap() if seconds is None else seconds,
        )

    def tell(self, **more: Any) -> None:
        """Lets the master know soon how far the task is: a sign of life. Arguments as of `ProgressReporter.update`."""
        session = self._session
        # Predictions of half a task die with its worker.
        lost = self.task.type == pb.PREDICTION and (session.reports_predictions or session.holds_predictions)
        done = self.units_done if self.counts_progress and not lost else 0
        session.progress.update(self.task.lease, done, session.ps.version, **more)

    def _passed_a_milestone(self) -> bool:
        """Whether the master has something to do at the present version."""
        settings, version = self._session.settings, self._session.ps.version
        last, self._tally.last_version = self._tally.last_version, version
        every = (settings.training.evaluation_steps, settings.checkpoint.steps)
        return any(steps and version // steps > last // steps for steps in every)


class Training(ABC):
    """How the batches of a training task are trained on."""

    @abstractmethod
    def train(self, batch: Batch, index: int) -> None:
        """Trains on a batch.

        Args:
            index: of the batch, among those of the epoch here.
        """

    @abstractmethod
    def settle(self) -> None:
        """All batches that were begun become a part of the servers' model."""

    @property
    @abstractmethod
    def units_begun(self) -> int:
        """Records, or batches, that are begun and no part of it yet."""

    @abstractmethod
    def drop(self) -> None:
        """Others do what is no part of it yet."""
