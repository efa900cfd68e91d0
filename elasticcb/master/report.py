"""What people see of a job: its status while it runs, and its summary."""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from elasticcb.master.desk import Desk
from elasticcb.master.job_state import JobState
from elasticcb.master.roster import Role
from elasticcb.master.task import TaskState
from elasticcb.master.task_queue import TaskQueue
from elasticcb.model.job_callbacks import callback_params
from elasticcb.settings import Command, JobSettings
from elasticcb.status import JobStatus, SavedModelInput, Summary

logger = logging.getLogger(__name__)

_STATUS_SECONDS = 0.5  # between updates of the display
_RATE_SECONDS = 10.0  # records per second are over so long


class Report:
    """Watches a job for its display.

    Args:
        desk: of the job.
        settings: of the job.
        display: `update(JobStatus)`, `message(text)`.

    Attributes:
        start_version: of the model, when the job began.
        phase: what the job does now, in one or two words.
        metrics: of the last evaluation round, by name.
        evaluated_before: records that were evaluated before that round.
        predictions_path: the file of the predictions; "" if none was written.
        checkpoint_path: the newest one; "" if none was written.
        saved_model_inputs: of the exported model's signature.
    """

    def __init__(self, desk: Desk, settings: JobSettings, display: Any) -> None:
        self._desk = desk
        self._settings = settings
        self._display = display
        self._started = time.monotonic()
        self._first_step: float | None = None
        self._next_status = 0.0
        self._logged_version = 0
        self._rate_points: deque[tuple[float, int]] = deque()
        self.phase = "starting"
        self.start_version = 0
        self.metrics: dict[str, Any] = {}
        self.evaluated_before = 0
        self.checkpoint_path = ""
        self.predictions_path = ""
        self.saved_model_inputs: tuple[SavedModelInput, ...] = ()

    def show(self) -> None:
        """Updates the display, unless that was done a moment ago.

        Don't call it within a block of the state: a terminal that is held up must not hold up the workers.
        """
        now = time.monotonic()
        is_due = now >= self._next_status
        with self._desk.state() as state:
            version, loss = state.version, state.loss
            status = self.status(state, now) if is_due else None
        trains = self._settings.command is Command.TRAIN
        if trains and self._first_step is None and version > self.start_version:
            self._first_step = now - self._started
        self._log_loss(version, loss)
        if status is not None:
            self._next_status = now + _STATUS_SECONDS
            self._display.update(status)

    def _log_loss(self, version: int, loss: float | None) -> None:
        steps = self._settings.training.log_loss_steps
        if steps and loss is not None and version // steps > self._logged_version // steps:
            self._logged_version = version
            logger.info("Version %d: training loss %.6g", version, loss)

    def status(self, state: JobState, now: float) -> JobStatus:
        """How the job looks at `now`, in seconds."""
        workers = state.roster.up(Role.WORKER)
        return JobStatus(
            command=self._settings.command,
            phase="evaluating" if state.rounds.running is not None else self.phase,
            version=state.version,
            loss=state.loss,
            metrics=self.metrics,
            workers_up=len(workers),
            workers_planned=state.roster.size(Role.WORKER),
            stragglers=tuple(each.index for each in workers if each.id in state.paces.stragglers),
            ps_up=len(state.roster.up(Role.PS)),
            ps_planned=state.roster.size(Role.PS),
            **({} if state.queue is None else self._progress(state.queue, now)),
        )

    def _progress(self, queue: TaskQueue, now: float) -> dict[str, Any]:
        counts = queue.counts().values()
        values: dict[str, Any] = {
            "tasks_todo": sum(states[TaskState.TODO] for states in counts),
            "tasks_doing": sum(states[TaskState.DOING] for states in counts),
            "records_evaluated": queue.accounting.records_evaluated - self.evaluated_before,
            "records_predicted": queue.accounting.records_predicted,
        }
        if self._settings.command is not Command.TRAIN:
            return values
        training, total = self._settings.training, self.records_to_train(queue)
        done = sum(queue.accounting.records_trained.values())
        rate = self._rate(now, done)
        return values | {
            "epoch": queue.epoch + 1,
            "epochs": training.num_epochs,
            "records_done": done,
            "records_total": total,
            "records_per_second": rate,
            "seconds_left": (total - done) / rate if rate else None,
        }

    def records_to_train(self, queue: TaskQueue) -> int:
        """Over all epochs."""
        training = self._settings.training
        total = queue.records_per_epoch * training.num_epochs
        return min(total, training.max_batches * training.minibatch_size) if training.max_step else total

    def _rate(self, now: float, done: int) -> float:
        points = self._rate_points
        points.append((now, done))
        while points[0][0] < now - _RATE_SECONDS and len(points) > 2:
            points.popleft()
        seconds = now - points[0][0]
        return (done - points[0][1]) / seconds if seconds > 0 else 0.0

    def summary(self, state: JobState, queue: TaskQueue, refused_calls: Mapping[str, int]) -> Summary:
        """The exact accounting of a job that is over."""
        roster, accounting = state.roster, queue.accounting
        exported = callback_params(self._settings)["saved_model_path"]
        exported = exported if os.path.isdir(exported) else ""
        return Summary(
            command=self._settings.command,
            seconds=time.monotonic() - self._started,
            records_per_epoch=tuple(count for _, count in sorted(accounting.records_trained.items())),
            records_evaluated=accounting.records_evaluated - self.evaluated_before,
            records_predicted=accounting.records_predicted,
            records_repeated=accounting.records_repeated,
            tasks_retried=accounting.tasks_retried,
            gradients_rejected=state.totals.gradients_rejected,
            batches_skipped=state.totals.batches_skipped,
            callback_errors=state.totals.callback_errors,
            refused_calls=refused_calls,
            workers_lost=roster.lost_count(Role.WORKER),
            workers_replaced=roster.replaced_count(Role.WORKER),
            stragglers=tuple(sorted(state.totals.stragglers)),
            tasks_split=accounting.tasks_split,
            servers_lost=roster.lost_count(Role.PS),
            servers_replaced=roster.replaced_count(Role.PS),
            longest_server_recovery=max(state.recoveries.seconds, default=0.0),
            updates_lost=state.recoveries.updates_lost,
            version=state.version,
            metrics=self.metrics,
            stopped_early=queue.stop_reason or "",
            seconds_to_first_step=self._first_step,
            saved_model_path=exported,
            saved_model_inputs=self.saved_model_inputs if exported else (),
            predictions_path=self.predictions_path,
            checkpoint_path=self.checkpoint_path,
            checkpoints_failed=state.totals.checkpoints_failed,
            job_directory=self._settings.directory,
            log_files=tuple(map(str, sorted(Path(self._settings.directory, "logs").glob("*.log")))),
        )
