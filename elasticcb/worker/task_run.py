"""One task on a worker, from its first batch to its report."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from typing import Any

from elasticcb.callbacks.hook_logs import HookLogs
from elasticcb.errors import (
    CallbackError,
    DataChangedError,
    ElasticCBError,
    ModelFileError,
    NonFiniteError,
    TableError,
    describe,
    user_traceback,
)
from elasticcb.model.metric_messages import OUTPUTS, Outputs, States, flatten_outputs, to_metric_states, to_outputs
from elasticcb.model.metrics import MetricTransport
from elasticcb.proto import elasticcb_pb2 as pb
from elasticcb.rpc.tensors import Array
from elasticcb.settings import Command
from elasticcb.worker.local_training import LocalTraining
from elasticcb.worker.session import Session
from elasticcb.worker.task_input import Batch, TaskStarted
from elasticcb.worker.task_progress import Tally, TaskProgress

logger = logging.getLogger(__name__)

_MOST_OUTPUTS = 2**31 - 2**26  # bytes per task; a message has at most 2 GiB
# Repeating the task would fail the same way.
_FATAL = (NonFiniteError, ModelFileError, DataChangedError, TableError)


class TaskRun:
    """Runs a task, and reports it.

    Attributes:
        end: number of records to process here, if others do the rest.
        is_left: nothing more is done: it failed, was revoked, or is done up to `end`.
    """

    def __init__(self, session: Session, tally: Tally, started: TaskStarted) -> None:
        self._session, self._tally, self.task = session, tally, started.task
        self._progress = TaskProgress(session, tally, started)
        local = session.local
        self._training = None if local is None else LocalTraining(session, tally, self._progress, local)
        self._outputs: list[Outputs] = []  # by batch, for the master
        self.end: int | None = None
        self.is_left = False
        self.gave_up = False

    def begin(self) -> None:
        """Calls the hooks before the first batch."""
        session, task = self._session, self.task
        session.state.is_first = task.first_worker
        if session.settings.command is Command.TRAIN:
            session.call("on_train_begin", {})
        present = (task.type, task.epoch, task.evaluation_round)
        if present != self._tally.present:
            self._tally.present = present
            session.running.begin()
            session.shared_callbacks.fetch()
            if task.type == pb.TRAINING:
                session.begin_training_pass()
        elif task.type == pb.TRAINING and session.is_behind:
            session.begin_training_pass()
        if task.type != pb.TRAINING:
            session.rest()
        session.passes.leave(task)
        if task.type == pb.EVALUATION:
            session.show_snapshot(task.evaluation_round)
        elif task.type == pb.TRAINING:
            session.drop_snapshot()
        session.passes.enter(task, session.ps.snapshot_version)
        if task.type == pb.EVALUATION:
            session.metrics.reset()
        elif task.type == pb.PREDICTION:
            session.show(session.ps.blocks)
            self._tally.predicts = True
            session.call("on_predict_begin", {})
        elif task.type == pb.TRAIN_END:
            self._end_training()

    def _end_training(self) -> None:
        session = self._session
        # The heartbeat that keeps the lease alive while a callback runs.
        session.progress.update(self.task.lease, 0, session.ps.version)
        if session.callbacks.wants("on_train_end"):
            session.show(session.ps.pull())
            session.show_tables()
        session.call("on_train_end", {})

    # ------------------------------------------------------------ batches

    def run(self, batch: Batch) -> None:
        """Runs one batch."""
        if self.task.lease in self._session.progress.lost_leases:
            logger.warning("The lease of task %d was revoked; other workers do the rest", self.task.id)
            self.leave()
            return
        index = self._tally.batches[self._tally.present]
        self._tally.batches[self._tally.present] += 1
        self._progress.event = None
        if self.task.type == pb.TRAINING:
            assert self._training is not None
            self._training.train(batch, index)
            return
        if self.task.type == pb.EVALUATION:
            self._evaluate(batch, index)
        else:
            self._predict(batch, index)
        self._progress.note_done(batch.units, None)

    def _evaluate(self, batch: Batch, index: int) -> None:
        session = self._session
        session.call("on_test_batch_begin", index, HookLogs(size=batch.records))
        rows = session.ps.lookup(batch.ids, evaluation_round=self.task.evaluation_round) if batch.ids else {}
        with session.progress.computing(self.task.lease):
            logs, outputs = session.computation.evaluate(batch.inputs, rows)
        if MetricTransport.OUTPUTS in session.transports.values():
            self._outputs.append(flatten_outputs(outputs))
        self._progress.note_event(batch, session.ps.snapshot_version)
        if session.callbacks.is_due("on_test_batch_end"):
            logs = session.running.evaluated(logs)
        session.call("on_test_batch_end", index, HookLogs(session.metrics.in_order(logs), size=batch.records))

    def _predict(self, batch: Batch, index: int) -> None:
        session = self._session
        session.call("on_predict_batch_begin", index, HookLogs(size=batch.records))
        rows = session.ps.lookup(batch.ids) if batch.ids else {}
        with session.progress.computing(self.task.lease):
            predictions = session.computation.predict(batch.inputs, rows)
        if session.reports_predictions:
            self._outputs.append(flatten_outputs(predictions))
        self._progress.note_event(batch, session.ps.version)
        session.call("on_predict_batch_end", index, HookLogs({"outputs": predictions}, predictions=predictions))

    # ------------------------------------------------------------ the end

    def send_predicted(self) -> None:
        """Predictions that callbacks have stored are done, even if the task is not."""
        session = self._session
        progress = self._progress
        if session.input.holds(self.task.lease) and progress.counts_progress and not session.reports_predictions:
            session.progress.update(self.task.lease, progress.units_done, session.ps.version)

    @property
    def units_begun(self) -> int:
        return self._progress.units_done + (self._training.units_begun if self._training is not None else 0)

    def settle(self) -> None:
        """Waits until started batches are part of the servers' model."""
        if self._training is not None:
            self._training.settle()

    def end_early(self) -> None:
        """Reports the task if this worker's part of it is started completely."""
        if self.end is not None and not self.is_left and self.units_begun >= self.end:
            self.finish(exhausted=False)
            self.is_left = True

    def finish(self, exhausted: bool) -> None:
        """Reports the task as done; `exhausted`: its source ended early."""
        self.settle()
        session, report = self._session, self._progress.report
        report.servers = min(session.progress.servers, self._progress.servers)
        session.progress.clear()
        report.exhausted, report.records_done = exhausted, self._progress.units_done
        states: States = {}
        if self.task.type == pb.EVALUATION:
            states = session.metrics.of_task(session.metrics.states(), self.task.shard.start)
            session.running.add(states)
        elif self.task.type == pb.TRAINING:
            states = session.metrics.of_task(self._progress.training_states, self.task.shard.start)
        report.version = session.ps.version
        report.metrics.extend(to_metric_states(states))
        _check_size(self.task, self._outputs, states.get(OUTPUTS, ()))
        report.outputs.extend(to_outputs(self._outputs))
        # The end of an epoch must come after its batches, and what their hooks printed.
        session.progress.flush(with_text=not session.shared_callbacks.is_awaited)
        answer = session.client.report_done(report)
        if answer.accepted:
            session.passes.after(self.task, states)
            if answer.ends_pass:
                session.give_back_callbacks()
        else:
            logger.warning("The report of task %d was refused: %s", self.task.id, answer.reason)
        session.input.release(self.task.lease)

    def fail(self, error: BaseException) -> None:
        """Reports that the task failed with `error`."""
        session, task = self._session, self.task
        fatal = isinstance(error, _FATAL) or (isinstance(error, CallbackError) and task.type != pb.TRAIN_END)
        if isinstance(error, ElasticCBError):
            message, trace = str(error), error.user_traceback
        else:
            message = describe(error)
            trace = user_traceback(error)
        logger.error("Task %d failed: %s\n%s", task.id, message, trace, exc_info=error)
        with contextlib.suppress(ElasticCBError):
            self.settle()
        session.progress.send()  # so that finished work need not be repeated
        session.progress.clear()
        answer = session.client.report_failed(task.lease, message, trace, fatal)
        if not answer.accepted:
            logger.warning("The report of task %d was refused: %s", task.id, answer.reason)
        self.gave_up = fatal and answer.accepted  # else another worker has the task, and this failure does not matter
        self.leave()

    def leave(self) -> None:
        """Stops working on the task here."""
        self.is_left = True
        if self._training is not None:
            self._training.drop()
        self._session.exchanges.forget_rows()
        self._session.progress.clear()
        self._session.input.release(self.task.lease)


def _check_size(task: Any, outputs: Sequence[Outputs], packed: Sequence[Array]) -> None:
    size = sum(array.nbytes for batch in outputs for array in batch.values()) + sum(array.nbytes for array in packed)
    if size > _MOST_OUTPUTS:
        raise ModelFileError(
            f"The outputs of one task ({task.shard.end - task.shard.start} records or batches) take {size / 2**30:.1f} "
            f"GiB, but a message can hold at most {_MOST_OUTPUTS / 2**30:.1f} GiB. Use a smaller batch, or "
            "smaller tasks (`elasticcb train --num_minibatches_per_task`)."
        )
