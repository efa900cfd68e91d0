"""One task on a worker, from its first batch to its report: its progress and the results of its batches."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from elasticcb.callbacks.dispatch import HookLogs
from elasticcb.clients.ps import PushResult
from elasticcb.compute.backend import StepResult, TableRows
from elasticcb.errors import (
    CallbackError,
    DataChangedError,
    DataError,
    ElasticCBError,
    ModelFileError,
    NonFiniteError,
    SourceError,
    TableError,
    describe,
    user_traceback,
)
from elasticcb.model.metric_messages import (
    OUTPUTS,
    PROGRESSIVE,
    Outputs,
    States,
    flatten_outputs,
    to_metric_states,
    to_outputs,
)
from elasticcb.model.metrics import MetricTransport
from elasticcb.proto import elasticcb_pb2 as pb
from elasticcb.rpc.shared_frames import aligned_copy
from elasticcb.rpc.tensors import Array, all_finite
from elasticcb.settings import Command, Mode, NonFinite
from elasticcb.worker.local_updates import LocalUpdates, NotFiniteError
from elasticcb.worker.session import BatchOfEpoch, Session
from elasticcb.worker.task_input import Batch, TaskStarted

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
        self._training = None if local is None else _LocalTraining(session, tally, self._progress, local)
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
        is_new = present != self._tally.present
        if is_new:
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
        if is_new:
            session.metrics.reset()
        if task.type == pb.EVALUATION:
            session.metrics.begin_part(Mode.EVALUATION)
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
        self._call_of_test_batch("on_test_batch_begin", index, HookLogs(size=batch.records))
        rows = session.ps.lookup(batch.ids, evaluation_round=self.task.evaluation_round) if batch.ids else {}
        with session.progress.computing(self.task.lease):
            logs, outputs = session.computation.evaluate(batch.inputs, rows)
        if MetricTransport.OUTPUTS in session.transports.values():
            self._outputs.append(flatten_outputs(outputs))
        if session.callbacks.is_due("on_test_batch_end") or session.reports_batches:
            logs = session.running.evaluated(logs)
        self._progress.note_event(batch, session.ps.snapshot_version, logs if session.is_alone else {})
        given = HookLogs(session.metrics.in_order(logs, "test"), size=batch.records)
        self._call_of_test_batch("on_test_batch_end", index, given)

    def _call_of_test_batch(self, hook: str, index: int, logs: HookLogs) -> None:
        if self._session.call_of_test_batch(hook, index, logs):
            self._outputs.clear()
            self._session.running.begin()
            self._progress.report.restarts_metrics = True

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

    def finish(self, exhausted: bool, bad: tuple[int, str] = (0, "")) -> None:
        """Reports the task as done; arguments as in `TaskRead`."""
        self.settle()
        session, report = self._session, self._progress.report
        report.servers = min(session.progress.servers, self._progress.servers)
        session.progress.clear()
        report.exhausted, report.records_done = exhausted, self._progress.units_done
        report.bad_records, report.bad_record = bad
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
        session.callbacks.flush_files()
        # The end of an epoch must come after its batches, and what their hooks printed.
        session.progress.flush(with_text=not session.shared_callbacks.is_awaited)
        answer = session.client.report_done(report)
        if answer.accepted:
            session.passes.after(self.task, states, report.restarts_metrics)
            if answer.ends_pass:
                session.give_back_callbacks()
        else:
            logger.warning("The report of task %d was refused: %s", self.task.id, answer.reason)
        session.input.release(self.task.lease)

    def fail(self, error: BaseException) -> None:
        """Reports that the task failed with `error`."""
        session, task = self._session, self.task
        fatal = isinstance(error, _FATAL) or (isinstance(error, CallbackError) and task.type != pb.TRAIN_END)
        is_away = isinstance(error, SourceError) or isinstance(error.__cause__, OSError)
        if isinstance(error, DataError) and not is_away:  # a record stays as it is
            fatal = fatal or task.failures > 0
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
            "smaller tasks (num_minibatches_per_task)."
        )


@dataclass(frozen=True)
class _Trained:
    """A batch that is not merged yet."""

    units: int
    loss: float | None = None  # None: it was skipped
    event: pb.BatchEvent | None = None
    states: States = field(default_factory=dict)
    batch: Batch | None = None  # with its rows; for when it has to be repeated
    rows: TableRows = field(default_factory=dict)


class _LocalTraining:
    """Trains on the batches of a task, merging after every window of them.

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
        self._adopt(session.call_of_batch("on_train_batch_begin", of_epoch, local.version, {}))
        started = time.perf_counter()
        with session.progress.computing(progress.task.lease):
            rows = session.exchanges.rows_of(batch) if batch.ids else {}
            before = session.evaluated_before(batch, rows)
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
        seconds = time.perf_counter() - started
        local.length.note_batch(seconds)
        session.callbacks.note_batch(seconds)
        session.running.add(result.states)
        logs = session.logs_of(result.logs)
        progress.note_event(batch, local.version, logs if session.is_alone else result.logs)
        adopted = self._adopt(session.call_of_batch("on_train_batch_end", of_epoch, local.version, logs))
        states = {} if adopted else {**result.states, **before}
        trained = _Trained(batch.units, loss, progress.event, states)
        if local.may_go_back:
            # Copies, because answers share a small pool of buffers, which would stay in use until the window ends.
            trained = replace(trained, batch=batch, rows={index: aligned_copy(own) for index, own in rows.items()})
        self._window.append(trained)
        progress.tell(seconds=progress.lap())  # the batch is done once it is merged

    def _adopt(self, states: States | None) -> bool:
        """The metrics of the epoch continue from these states, if hooks have set them; returns whether they have."""
        if states is not None:
            self._window = [replace(trained, states={}) for trained in self._window]
            self._progress.restart(states)
            self._session.running.begin()
            self._session.running.add(states)
        return states is not None

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
            if name in self._session.training_units or name.startswith(PROGRESSIVE):
                self._batch_states.setdefault(name, []).append(values)

    def restart(self, states: States) -> None:
        """Replaces the metric states of the epoch's batches so far."""
        self._batch_states.clear()
        self.add_states(states)
        self.report.restarts_metrics = True

    @property
    def training_states(self) -> States:
        """Metric states of all training batches."""
        merge = self._session.metrics.merge_states
        return {name: merge(name, batches) for name, batches in self._batch_states.items()}

    def note_event(self, batch: Batch, version: int, logs: Mapping[str, Any] = MappingProxyType({})) -> None:
        """Records the event of a batch for the master's callbacks, with logs of only this batch; of the epoch or pass
        so far, from the only worker of a program."""
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
