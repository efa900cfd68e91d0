"""Local training, merged after every window of batches."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from elasticcb.clients.ps import PushResult
from elasticcb.compute.backend import StepResult, TableRows
from elasticcb.errors import NonFiniteError
from elasticcb.model.metric_messages import States
from elasticcb.proto import elasticcb_pb2 as pb
from elasticcb.rpc.shared_memory import aligned_copy
from elasticcb.rpc.tensors import all_finite
from elasticcb.settings import NonFinite
from elasticcb.worker.local_updates import LocalUpdates, NotFiniteError
from elasticcb.worker.session import BatchOfEpoch, Session
from elasticcb.worker.task_input import Batch
from elasticcb.worker.task_progress import Tally, TaskProgress

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Trained:
    """A batch that is not merged yet."""

    units: int
    loss: float | None = None  # None: it was skipped
    event: pb.BatchEvent | None = None
    states: States = field(default_factory=dict)
    batch: Batch | None = None  # with its rows; for when it has to be repeated
    rows: TableRows = field(default_factory=dict)


class LocalTraining:
    """Trains on the batches of a task.

    Arguments as in `TaskProgress`; `progress` is that of the task, `local` that of the session.
    """

    def __init__(self, session: Session, tally: Tally, progress: TaskProgress, local: LocalUpdates) -> None:
        self._session, self._tally, self._progress, self._local = session, tally, progress, local
        self._window: list[_Trained] = []
        self._pushed: deque[Future[PushResult]] = deque()  # of rows, not answered yet

    def train(self, batch: Batch, index: int) -> None:
        """Trains on a batch, after merging the previous ones if the window is full."""
        session, progress, local = self._session, self._progress, self._local
        skips = session.settings.training.non_finite is NonFinite.SKIP
        if len(self._window) >= local.length.batches:
            self._merge()
        if not self._window and progress.counts_progress:  # else batches of other windows may follow these
            progress.servers = session.client.newest_server
        of_epoch = BatchOfEpoch(index, batch.records, progress.task.epoch_version)
        session.call_of_batch("on_train_batch_begin", of_epoch, local.version, {})
        started = time.perf_counter()
        with session.progress.computing(progress.task.lease):
            rows = session.exchanges.rows_of(batch) if batch.ids else {}
            result = session.computation.train(batch.inputs, rows)
            if not math.isfinite(result.loss) and skips and self._redo():
                result = session.computation.train(batch.inputs, rows)  # earlier batches had ruined the weights
            reason = self._ruined_by(result)
            if not reason:
                self._push_rows(result)
        session.forget_shown()
        if reason:
            self._leave_out(of_epoch, batch, f"{reason} (version {local.version})", result.logs)
            return
        loss = result.loss
        local.count()
        self._tally.steps += 1
        progress.note_event(batch, local.version, result.logs)
        seconds = time.perf_counter() - started
        local.length.note_batch(seconds)
        session.callbacks.note_batch(seconds)
        session.running.add(result.states)
        session.call_of_batch("on_train_batch_end", of_epoch, local.version, session.logs_of(result.logs))
        trained = _Trained(batch.units, loss, progress.event, result.states)
        if local.may_go_back:
            # Copies, because answers share a small pool of buffers, which would stay in use until the window ends.
            trained = replace(trained, batch=batch, rows={index: aligned_copy(own) for index, own in rows.items()})
        self._window.append(trained)
        progress.tell(seconds=progress.lap())  # the batch is done once it is merged

    def _ruined_by(self, result: StepResult) -> str:
        """What has NaN or infinity; "" if nothing has."""
        if not math.isfinite(result.loss):
            return f"The loss is {result.loss}"
        path = self._non_finite_rows(result)
        # A step whose scaled loss has overflowed changes nothing, as in Keras, and the scale is lowered.
        return f"The gradient of {path!r} holds NaN or infinity" if path and not self._session.scales_loss else ""

    def _non_finite_rows(self, result: StepResult) -> str:
        specs = self._session.ps.servers.specs
        found = (specs[index].path for index, (_, values) in result.rows.items() if not all_finite(values))
        return next(found, "")

    def _push_rows(self, result: StepResult) -> None:
        if result.rows and not self._non_finite_rows(result):
            exchanges = self._session.exchanges
            coming = self._session.input.coming(exchanges.batches_ahead)
            self._pushed.append(exchanges.push(self._local.rows(result), coming))
            self._await_pushes(self._session.settings.training.max_staleness)

    def _await_pushes(self, most: int) -> None:
        """Waits until at most `most` pushes of rows are unanswered."""
        while len(self._pushed) > most:
            self._pushed.popleft().result()

    # ------------------------------------------------------------ NaN and infinity

    def _leave_out(self, of_epoch: BatchOfEpoch, batch: Batch, reason: str, logs: dict[str, Any]) -> None:
        """A batch has ruined the weights here."""
        self._progress.pass_over(reason, of_epoch, logs)
        with self._session.progress.computing(self._progress.task.lease):
            self._redo()
        self._window.append(_Trained(batch.units))
        self._merge()  # so that less must be repeated when the next batch is skipped

    def _redo(self) -> int:
        """Restores the weights without the batches of the window that ruin them; returns how many these are."""
        report, version = self._progress.report, self._local.version
        before = report.batches_skipped
        while not self._is_redone():
            logger.warning("Batch skipped: the weights are not finite after it (version %d).", version)
            report.batches_skipped += 1
        return int(report.batches_skipped - before)

    def _is_redone(self) -> bool:
        """Repeats the window's batches. Skips one that ruins the weights; returns whether there was none."""
        self._local.go_back()
        for place, trained in enumerate(self._window):
            if trained.batch is not None:
                # the servers have the gradients of its rows
                self._session.computation.train(trained.batch.inputs, trained.rows)
                self._local.count()
                if not self._local.is_finite:
                    self._window[place] = _Trained(trained.units)
                    return False
        return True

    # ------------------------------------------------------------ merging

    def _merge(self, ends_task: bool = False) -> None:
        session, progress = self._session, self._progress
        with session.progress.computing(progress.task.lease):  # other workers may take their time
            self._await_pushes(0)  # a merged batch is done, with its rows
            try:
                self._local.merge(ends_task)
            except NotFiniteError as error:
                if session.settings.training.non_finite is NonFinite.STOP:
                    self.drop()
                    raise NonFiniteError.of(f"{error} (version {self._local.version})") from None
                self._redo()
                self._local.merge(ends_task)
        self._tally.tell_first_step()
        session.rate.adopt_base()
        window, self._window = self._window, []
        for trained in window:
            progress.event = trained.event
            progress.add_states(trained.states)
            progress.note_done(trained.units, trained.loss, seconds=0.0)
        progress.lap()  # waiting for others does not count as batch time

    def settle(self) -> None:
        """Waits until all started batches are part of the servers' model."""
        if self._window:
            self._merge(ends_task=True)

    @property
    def units_begun(self) -> int:
        """Records, or batches, that are started but not part of it yet."""
        return sum(trained.units for trained in self._window)

    def drop(self) -> None:
        """Drops what is not part of it yet: others repeat it."""
        self._pushed.clear()
        self._window = []
        self._local.forget()
