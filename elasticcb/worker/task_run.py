"""One task on a worker, from its first batch to its report."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections import Counter, deque
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from elasticcb.clients.ps import PushResult
from elasticcb.compute.backend import StepResult, TableRows
from elasticcb.errors import (
    CallbackError,
    DataChangedError,
    ElasticCBError,
    ModelFileError,
    NonFiniteError,
    describe,
    user_traceback,
)
from elasticcb.model.metric_messages import Outputs, States, flatten_outputs, to_metric_states, to_outputs
from elasticcb.model.metrics import MetricTransport
from elasticcb.process.stats import STALENESS
from elasticcb.proto import elasticcb_pb2 as pb
from elasticcb.settings import Command, NonFinite
from elasticcb.worker.local_updates import LocalUpdates
from elasticcb.worker.session import Session
from elasticcb.worker.task_input import Batch, TaskStarted
from elasticcb.worker.trainer import TrainResult, train

logger = logging.getLogger(__name__)

_MOST_OUTPUTS = 2**31 - 2**26  # bytes of one task, in a message of at most 2 GiB
# Doing the task again would end the same way.
_FATAL = (NonFiniteError, ModelFileError, DataChangedError)


@dataclass(frozen=True)
class _Pushed:
    """A training batch whose gradients are on their way."""

    batch: Batch
    result: TrainResult
    answer: Future[PushResult]
    started: float
    version: int  # of the weights that they were computed on; -1: not known


@dataclass(frozen=True)
class _Trained:
    """A batch that this worker has trained on by itself, and that is not merged yet."""

    units: int
    loss: float | None = None  # None: it was passed over
    seconds: float = 0.0
    event: pb.BatchEvent | None = None
    states: States = field(default_factory=dict)
    batch: Batch | None = None  # with the rows that it had; for when it has to be done again
    rows: TableRows = field(default_factory=dict)


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


class TaskRun:
    """Does a task, and reports it.

    Args:
        session: of the worker.
        tally: of the worker; counted on.
        started: the task.

    Attributes:
        end: records of it that are done here, if others do the rest.
        is_left: nothing more is done of it: it failed, was taken away, or is done as far as `end`.
        gave_up: the job fails by an error here.
    """

    def __init__(self, session: Session, tally: Tally, started: TaskStarted) -> None:
        self._session, self._tally, self.task = session, tally, started.task
        self._counts_progress = started.counts_progress
        self._units_done = 0  # records, or batches
        self._done_at = time.monotonic()  # when the batch before ended
        self._report = pb.ReportTaskRequest(lease=started.task.lease)
        self._states: States = {}  # metric states
        self._batch_states: dict[str, list[Any]] = {}  # of training batches
        self._outputs: list[Outputs] = []  # by batch, for the master
        self._event: pb.BatchEvent | None = None  # of the present batch
        self._pushed: deque[_Pushed] = deque()  # not answered yet
        self._window: list[_Trained] = []  # not merged yet
        self.end: int | None = None
        self.is_left = False
        self.gave_up = False

    def begin(self) -> None:
        """Calls the hooks before the first batch."""
        session, task = self._session, self.task
        if session.settings.command is Command.TRAIN:
            session.call("on_train_begin", {})
        present = (task.type, task.epoch, task.evaluation_round)
        if present != self._tally.present:
            self._tally.present = present
            if task.type == pb.TRAINING:
                session.begin_training_pass()
        elif task.type == pb.TRAINING and session.local is not None and session.local.is_behind:
            session.begin_training_pass()
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
        # The sign that keeps the lease alive while a callback takes its time.
        session.progress.update(self.task.lease, 0, session.ps.version)
        if session.callbacks.wants("on_train_end"):
            session.show(session.ps.pull())
            session.show_tables()
        session.call("on_train_end", {})

    # ------------------------------------------------------------ batches

    def run(self, batch: Batch) -> None:
        """Does one batch."""
        if self.task.lease in self._session.progress.lost_leases:
            logger.warning("The lease of task %d was taken away; leaving the rest to others", self.task.id)
            self.leave()
            return
        index = self._tally.batches[self._tally.present]
        self._tally.batches[self._tally.present] += 1
        self._event = None
        if self.task.type == pb.TRAINING:
            self._train(batch, index)
            return
        if self.task.type == pb.EVALUATION:
            self._evaluate(batch, index)
        else:
            self._predict(batch, index)
        self._note_done(batch.units, None)

    def _train(self, batch: Batch, index: int) -> None:
        local = self._session.local
        if local is None:
            self._hand_over(batch, index)
        else:
            self._train_here(local, batch, index)

    def _train_here(self, local: LocalUpdates, batch: Batch, index: int) -> None:
        """Trains on a batch, after what was trained on before is merged, if that is enough by now."""
        session, training = self._session, self._session.settings.training
        if len(self._window) >= training.local_steps:
            self._merge(local, with_slots=False)
        session.call_of_batch("on_train_batch_begin", local.version, {"batch": index, "size": batch.records})
        started = time.perf_counter()
        with session.progress.computing(self.task.lease):
            rows = session.exchanges.rows_of(batch) if batch.ids else {}
            result, loss = _step_here(local, batch, rows)
            if not math.isfinite(loss) and training.non_finite is NonFinite.SKIP and self._redo(local):
                result, loss = _step_here(local, batch, rows)  # what came before it had ruined the weights
            if result.rows and math.isfinite(loss):
                coming = session.input.coming(session.exchanges.batches_ahead)
                session.exchanges.push(local.rows(result, loss), None, False, coming).result()
        session.forget_shown()
        if not math.isfinite(loss):
            self._pass_over(f"The loss is {loss} (version {local.version}).", batch, result.logs)
            with session.progress.computing(self.task.lease):
                self._redo(local)
            self._window.append(_Trained(batch.units))
            self._merge(local, with_slots=False)  # so that the next one that is passed over has less done again
            return
        local.count()
        self._tally.steps += 1
        self._note_event(batch, local.version, result.logs)
        session.callbacks.note_batch(time.perf_counter() - started)
        session.call_of_batch("on_train_batch_end", local.version, {"size": batch.records, **result.logs})
        trained = _Trained(batch.units, loss, self._lap(), self._event, result.states)
        if local.may_go_back:
            trained = replace(trained, batch=batch, rows=rows)
        self._window.append(trained)
        # A sign of life. The batch is done when it is merged.
        session.progress.update(self.task.lease, self._units_to_tell, session.ps.version)

    def _redo(self, local: LocalUpdates) -> int:
        """Makes the weights here what they are without batches of the window that ruin them; how many these are."""
        before = self._report.batches_skipped
        while not self._is_redone(local):
            logger.warning("Batch skipped: the weights are not finite after it (version %d).", local.version)
            self._report.batches_skipped += 1
        return self._report.batches_skipped - before

    def _is_redone(self, local: LocalUpdates) -> bool:
        """Trains on the window's batches anew. One that ruins the weights is passed over; whether there is none."""
        local.go_back()
        for place, trained in enumerate(self._window):
            if trained.batch is not None:
                local.train(trained.batch.inputs, trained.rows)  # the servers have the gradients of its rows
                local.count()
                if not local.is_finite:
                    self._window[place] = _Trained(trained.units)
                    return False
        return True

    def _merge(self, local: LocalUpdates, with_slots: bool) -> None:
        session = self._session
        version = local.version
        with session.progress.computing(self.task.lease):  # others may take their time
            answer = local.merge(self._last_loss, with_slots)
        if answer.status == pb.NON_FINITE:
            if session.settings.training.non_finite is NonFinite.STOP:
                self._window = []
                raise NonFiniteError(answer.reason)
            with session.progress.computing(self.task.lease):
                self._redo(local)
                answer = local.merge(self._last_loss, with_slots)
        elif not self._tally.first_step_told:
            logger.info("The first steps are done, after compiling them")
            self._tally.first_step_told = True
        session.client.measures.histograms[STALENESS].observe(max(0, answer.version - version))
        session.rate.adopt_base()
        window, self._window = self._window, []
        for trained in window:
            self._event = trained.event
            self._add_states(trained.states)
            self._note_done(trained.units, trained.loss, trained.seconds)

    @property
    def _last_loss(self) -> float:
        """Of the window."""
        return next((trained.loss for trained in reversed(self._window) if trained.loss is not None), 0.0)

    def _hand_over(self, batch: Batch, index: int) -> None:
        """Computes the gradients of a batch, and hands them to the servers."""
        session, training = self._session, self._session.settings.training
        session.call_of_batch("on_train_batch_begin", session.ps.version, {"batch": index, "size": batch.records})
        while True:
            started = time.perf_counter()
            rows = session.exchanges.rows_of(batch) if batch.ids else {}
            version = session.ps.weights_version
            with session.progress.computing(self.task.lease):
                weights, specs = session.ps.blocks, session.ps.servers.specs
                result = train(session.gradient_computation, specs, batch.inputs, weights, session.ps.version, rows)
            session.forget_shown()
            if result.overflow:
                logger.info("Batch skipped: %s", result.overflow)
                self._report.batches_skipped += 1
                self._add_states(result.states)
                self._note_done(batch.units, result.push.loss)
                return
            self._tally.steps += 1
            pull = self._tally.steps % training.get_model_steps == 0
            coming = session.input.coming(session.exchanges.batches_ahead)
            answer = session.exchanges.push(result.push, session.rate.changed(), pull, coming)
            self._pushed.append(_Pushed(batch, result, answer, started, version))
            if len(self._pushed) <= training.max_staleness:
                return
            if self._settle(self._pushed.popleft()):
                return
            self._report.gradients_rejected += 1
            session.ps.pull()
            session.exchanges.forget_rows()

    def _settle(self, pushed: _Pushed) -> bool:
        """Waits for the answer to a push, and carries out what follows; whether the servers took it as new enough."""
        session, batch, result = self._session, pushed.batch, pushed.result
        answer = pushed.answer.result()
        if answer.status == pb.STALE:
            return False
        if answer.status == pb.NON_FINITE:
            self._pass_over(answer.reason, batch, result.logs)
            self._note_done(batch.units, float("nan"))
            return True
        if not self._tally.first_step_told:
            logger.info("The first step is done, after compiling it")
            self._tally.first_step_told = True
        if pushed.version >= 0:
            between = answer.version - 1 - pushed.version  # the push itself made one version
            session.client.measures.histograms[STALENESS].observe(max(0, between))
        session.rate.adopt_base()
        self._add_states(result.states)
        self._note_event(batch, answer.version, result.logs)
        session.callbacks.note_batch(time.perf_counter() - pushed.started)
        session.call_of_batch("on_train_batch_end", answer.version, {"size": batch.records, **result.logs})
        self._note_done(batch.units, result.push.loss)
        return True

    def settle_all(self) -> None:
        """Waits for the answers to all pushes; what is trained here is merged."""
        if self._window and self._session.local is not None:
            self._merge(self._session.local, with_slots=True)
        while self._pushed:
            self._settle(self._pushed.popleft())

    def _pass_over(self, reason: str, batch: Batch, logs: dict[str, Any]) -> None:
        """A batch has NaN or infinity, and its push was refused: the job fails, unless it need not."""
        session = self._session
        if session.settings.training.non_finite is NonFinite.STOP:
            # A callback that ends training now, as TerminateOnNaN does, lets the job end in order.
            given = {"size": batch.records, **logs, "loss": float("nan")}
            session.call_of_batch("on_train_batch_end", session.ps.version, given)
            if not session.callbacks.stop_requested:
                raise NonFiniteError(reason)
        logger.warning("Batch skipped: %s", reason)
        self._report.batches_skipped += 1

    def _evaluate(self, batch: Batch, index: int) -> None:
        session = self._session
        session.call("on_test_batch_begin", index, {"size": batch.records})
        rows = session.ps.lookup(batch.ids, evaluation_round=self.task.evaluation_round) if batch.ids else {}
        with session.progress.computing(self.task.lease):
            logs, outputs = session.computation.evaluate(batch.inputs, rows)
        if MetricTransport.OUTPUTS in session.transports.values():
            self._outputs.append(flatten_outputs(outputs))
        self._note_event(batch, session.ps.snapshot_version)
        session.call("on_test_batch_end", index, {"size": batch.records, **logs})

    def _predict(self, batch: Batch, index: int) -> None:
        session = self._session
        session.call("on_predict_batch_begin", index, {"size": batch.records})
        rows = session.ps.lookup(batch.ids) if batch.ids else {}
        with session.progress.computing(self.task.lease):
            predictions = session.computation.predict(batch.inputs, rows)
        if session.reports_predictions:
            self._outputs.append(flatten_outputs(predictions))
        self._note_event(batch, session.ps.version)
        session.call("on_predict_batch_end", index, {"outputs": predictions, "predictions": predictions})

    def _add_states(self, states: States) -> None:
        """Keeps a training batch's metric states until the task's end."""
        for name, values in states.items():
            if name in self._session.training_units:
                self._batch_states.setdefault(name, []).append(values)

    def _note_event(self, batch: Batch, version: int, logs: Mapping[str, Any] = MappingProxyType({})) -> None:
        """What the master's callbacks will hear of the batch."""
        if self._session.reports_batches:
            numbers = {name: value for name, value in logs.items() if isinstance(value, (int, float))}
            number = self.task.epoch if self.task.type == pb.TRAINING else self.task.evaluation_round
            self._event = pb.BatchEvent(
                type=self.task.type, number=number, version=version, size=batch.records, logs=numbers
            )

    # ------------------------------------------------------------ progress

    @property
    def _units_to_tell(self) -> int:
        """What is done of the task for good."""
        session = self._session
        # Predictions of half a task die with its worker.
        lost = self.task.type == pb.PREDICTION and (session.reports_predictions or session.holds_predictions)
        return self._units_done if self._counts_progress and not lost else 0

    def _lap(self) -> float:
        """Seconds since the batch before; 0 where they tell nothing."""
        now = time.monotonic()
        compiled = self._tally.steps > 1 + self._session.settings.training.max_staleness
        seconds, self._done_at = now - self._done_at, now
        return seconds if compiled and self.task.type == pb.TRAINING else 0.0

    def _note_done(self, units: int, loss: float | None, seconds: float | None = None) -> None:
        """Counts a batch as done, and tells the master at times.

        Args:
            units: of the batch.
            seconds: that it took, where they are known already.
        """
        session = self._session
        self._units_done += units
        seconds = self._lap() if seconds is None else seconds
        session.progress.update(
            self.task.lease,
            self._units_to_tell,
            session.ps.version,
            loss,
            urgent=self._passed_a_milestone(),
            event=self._event,
            seconds=seconds,
        )

    def _passed_a_milestone(self) -> bool:
        """Whether the master has something to do at the present version."""
        settings, version = self._session.settings, self._session.ps.version
        last, self._tally.last_version = self._tally.last_version, version
        every = (settings.training.evaluation_steps, settings.checkpoint.steps)
        return any(steps and version // steps > last // steps for steps in every)

    def send_predicted(self) -> None:
        """What callbacks have put down of predictions is done, though the task is not."""
        session = self._session
        if session.input.holds(self.task.lease) and self._counts_progress and not session.reports_predictions:
            session.progress.update(self.task.lease, self._units_done, session.ps.version)

    # ------------------------------------------------------------ the end

    @property
    def units_begun(self) -> int:
        trained = sum(trained.units for trained in self._window)
        return self._units_done + sum(pushed.batch.units for pushed in self._pushed) + trained

    def end_early(self) -> None:
        """Reports the task if all that this worker is to do of it is begun."""
        if self.end is not None and not self.is_left and self.units_begun >= self.end:
            self.finish(exhausted=False)
            self.is_left = True

    def finish(self, exhausted: bool) -> None:
        """Reports the task as done; `exhausted`: its source ended before it."""
        self.settle_all()
        session, report = self._session, self._report
        session.progress.clear()
        report.exhausted, report.records_done = exhausted, self._units_done
        if self.task.type == pb.EVALUATION:
            self._states = session.metrics.states()
        elif self.task.type == pb.TRAINING:
            merge = session.metrics.merge_states
            self._states = {name: merge(name, batches) for name, batches in self._batch_states.items()}
        report.version = session.ps.version
        report.metrics.extend(to_metric_states(self._states))
        _check_size(self.task, self._outputs)
        report.outputs.extend(to_outputs(self._outputs))
        session.progress.flush()  # the end of an epoch comes after its batches
        answer = session.client.report_done(report)
        if answer.accepted:
            session.passes.after(self.task, self._states)
        else:
            logger.warning("The report of task %d was refused: %s", self.task.id, answer.reason)
        session.input.release(self.task.lease)

    def fail(self, error: Exception) -> None:
        """Reports that the task failed, by what was raised in it."""
        session, task = self._session, self.task
        fatal = isinstance(error, _FATAL) or (isinstance(error, CallbackError) and task.type != pb.TRAIN_END)
        if isinstance(error, ElasticCBError):
            message, trace = str(error), error.user_traceback
        else:
            message = describe(error)
            trace = user_traceback(error)
        logger.error("Task %d failed: %s\n%s", task.id, message, trace, exc_info=error)
        with contextlib.suppress(ElasticCBError):
            self.settle_all()
        session.progress.send()  # what is done need not be done again
        session.progress.clear()
        answer = session.client.report_failed(task.lease, message, trace, fatal)
        if not answer.accepted:
            logger.warning("The report of task %d was refused: %s", task.id, answer.reason)
        self.gave_up = fatal and answer.accepted  # else the task is another's, and so is its failure
        self.leave()

    def leave(self) -> None:
        """Nothing more is done of it here."""
        self.is_left = True
        self._pushed.clear()
        if self._window and self._session.local is not None:
            self._window = []
            self._session.local.forget()
        self._session.exchanges.forget_rows()
        self._session.progress.clear()
        self._session.input.release(self.task.lease)


def _step_here(local: LocalUpdates, batch: Batch, rows: TableRows) -> tuple[StepResult, float]:
    result = local.train(batch.inputs, rows)
    return result, float(np.mean(result.logs["loss"])) if "loss" in result.logs else 0.0


def _check_size(task: Any, outputs: list[Outputs]) -> None:
    size = sum(array.nbytes for batch in outputs for array in batch.values())
    if size > _MOST_OUTPUTS:
        raise ModelFileError(
            f"What the model gives for {task.shard.end - task.shard.start} records or batches of one task takes "
            f"{size / 2**30:.1f} GiB; at most {_MOST_OUTPUTS / 2**30:.1f} GiB can travel in one message. Make tasks "
            "smaller: --num_minibatches_per_task, or a smaller batch."
        )
