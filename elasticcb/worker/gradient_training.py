"""Training by gradients that the servers apply: one push per batch."""

from __future__ import annotations

import logging
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass

from elasticcb.clients.ps import PushResult
from elasticcb.process.stats import STALENESS
from elasticcb.proto import elasticcb_pb2 as pb
from elasticcb.worker.session import BatchOfEpoch, Session
from elasticcb.worker.task_input import Batch
from elasticcb.worker.task_progress import Tally, TaskProgress, Training
from elasticcb.worker.trainer import TrainResult, train

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Pushed:
    """A training batch whose gradients were sent."""

    batch: Batch
    of_epoch: BatchOfEpoch
    result: TrainResult
    answer: Future[PushResult]
    started: float
    version: int  # of the weights they were computed on; -1: unknown


class GradientTraining(Training):
    """Arguments as in `TaskProgress`; `progress` is that of the task."""

    def __init__(self, session: Session, tally: Tally, progress: TaskProgress) -> None:
        self._session, self._tally, self._progress = session, tally, progress
        self._pushed: deque[_Pushed] = deque()  # not answered yet

    def train(self, batch: Batch, index: int) -> None:
        session, training = self._session, self._session.settings.training
        of_epoch = BatchOfEpoch(index, batch.records, self._progress.task.epoch_version)
        session.call_of_batch("on_train_batch_begin", of_epoch, session.ps.version, {})
        while True:
            started = time.perf_counter()
            rows = session.exchanges.rows_of(batch) if batch.ids else {}
            version = session.ps.weights_version
            with session.progress.computing(self._progress.task.lease):
                weights, specs = session.ps.blocks, session.ps.servers.specs
                computation, moves = session.gradient_computation, session.state.moves
                result = train(computation, specs, batch.inputs, weights, session.ps.version, rows, moves)
            session.forget_shown()
            if result.overflow:
                logger.info("Batch skipped: %s", result.overflow)
                self._progress.report.batches_skipped += 1
                self._progress.add_states(result.states)
                self._progress.note_done(batch.units, result.push.loss)
                return
            self._tally.steps += 1
            pull = self._tally.steps % training.get_model_steps == 0
            coming = session.input.coming(session.exchanges.batches_ahead)
            answer = session.exchanges.push(result.push, session.rate.changed(), pull, coming)
            self._pushed.append(_Pushed(batch, of_epoch, result, answer, started, version))
            if len(self._pushed) <= training.max_staleness:
                return
            if self._settle(self._pushed.popleft()):
                return
            self._progress.report.gradients_rejected += 1
            session.ps.pull()
            session.exchanges.forget_rows()

    def _settle(self, pushed: _Pushed) -> bool:
        """Waits for the answer to a push, and handles it; returns whether the servers accepted it as new enough."""
        session, progress, batch, result = self._session, self._progress, pushed.batch, pushed.result
        answer = pushed.answer.result()
        if answer.status == pb.STALE:
            return False
        if answer.status == pb.NON_FINITE:
            progress.pass_over(answer.reason, pushed.of_epoch, result.logs)
            progress.note_done(batch.units, float("nan"))
            return True
        self._tally.tell_first_step()
        if pushed.version >= 0:
            between = answer.version - 1 - pushed.version  # the push itself made one version
            session.client.measures.histograms[STALENESS].observe(max(0, between))
        session.rate.adopt_base()
        progress.add_states(result.states)
        progress.note_event(batch, answer.version, result.logs)
        session.callbacks.note_batch(time.perf_counter() - pushed.started)
        session.running.add(result.states)
        session.call_of_batch("on_train_batch_end", pushed.of_epoch, answer.version, session.logs_of(result.logs))
        progress.note_done(batch.units, result.push.loss)
        return True

    def settle(self) -> None:
        while self._pushed:
            self._settle(self._pushed.popleft())

    @property
    def units_begun(self) -> int:
        return sum(pushed.batch.units for pushed in self._pushed)

    def drop(self) -> None:
        self._pushed.clear()
