"""The course of a job, from its first task to its last.

    while there are training tasks:
        at every `evaluation_steps` versions, or at the end of an epoch: an evaluation pass
        at every `checkpoint_steps` versions: a checkpoint
    waiting gradients are applied, the optimizer finalizes; the last evaluation pass
    `on_train_end` on the master, which may restore weights; a checkpoint; the TRAIN_END task

A job that evaluates or predicts has one round, or the prediction tasks, and nothing else.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from elasticcb.callbacks.placement import BATCH_HOOKS
from elasticcb.callbacks.saved_state import plain
from elasticcb.errors import CallbackWarning, CheckpointError
from elasticcb.master.callback_driver import EpochHooks
from elasticcb.master.checkpoint_writer import CheckpointWriter
from elasticcb.master.evaluation import Round
from elasticcb.master.exports import PeriodicExports
from elasticcb.master.job_context import JobContext, TrainedModel
from elasticcb.master.job_machine import JobMachine
from elasticcb.master.observation import epochs_of
from elasticcb.master.snapshot import EpochEnd, format_metric
from elasticcb.master.task import Milestone, MilestoneKind, TaskType
from elasticcb.master.task_queue import TaskQueue
from elasticcb.optimizers.traits import may_serve_rows
from elasticcb.settings import Command, Mode, written
from elasticcb.settings.choices import seconds_of


class Pace(NamedTuple):
    """Of an epoch: seconds of training, and batches trained by all workers in that time."""

    seconds: float
    steps: int


class EpochClock:
    """Times consecutive epochs.

    Epochs may overlap: some workers begin the next epoch while others still have tasks of this one. Each epoch is timed
    from the end of the previous one, and counts everything trained in that time.

    Args:
        seconds: of an epoch of a stream; None: it does not end by time.
    """

    def __init__(self, minibatch_size: int, seconds: float | None = None) -> None:
        self._minibatch_size, self._seconds = minibatch_size, seconds
        self._epoch = -1  # that is timed
        self._begun, self._records = 0.0, 0
        self._paces: dict[int, Pace] = {}

    def begin(self, epoch: int, now: float, records: int) -> None:
        """An epoch begins; `records` were trained before it, over all epochs."""
        self._epoch, self._begun, self._records = epoch, now, records

    def over(self, now: float) -> int | None:
        """The epoch that should end by time; None: none should."""
        return self._epoch if self._seconds is not None and now - self._begun >= self._seconds else None

    def trained(self, epoch: int, now: float, records: int) -> None:
        """All records of `epoch` are trained; the next epoch begins now, unless `begin` is called later."""
        self._paces[epoch] = Pace(now - self._begun, -(-(records - self._records) // self._minibatch_size))
        self.begin(epoch + 1, now, records)

    def take(self, epoch: int) -> Pace:
        """The pace of an epoch that was `trained`; returned once."""
        return self._paces.pop(epoch)


logger = logging.getLogger(__name__)

_ENDS = (MilestoneKind.EPOCH_DONE, MilestoneKind.ROUND_DONE, MilestoneKind.PREDICTION_DONE)  # of hooks on workers
_BATCHES_PER_TURN = 100  # per turn of the loop, so that processes are still looked after
_PATIENCE_SECONDS = 10.0  # for the state of callbacks on a worker that has no task
_LARGE_BACKLOG = 20_000  # batches not yet seen by callbacks


class JobDriver:
    """Drives a job once its servers hold the model.

    Args:
        queue: task queue of the job; change it only under the lock.
    """

    def __init__(
        self,
        context: JobContext,
        served: TrainedModel,
        queue: TaskQueue,
        epochs: EpochHooks,
        checkpoints: CheckpointWriter,
        autoscale: Callable[[], None],
        exports: Sequence[PeriodicExports],
    ) -> None:
        self._context, self._settings = context, context.settings
        self._master, self._report = context.server, context.report
        self.served, self.checkpoints, self.queue = served, checkpoints, queue
        self._host, self._hooks = served.host, served.hooks
        self._epochs, self._autoscale, self.exports = epochs, autoscale, exports
        self._waiting_logs: dict[int, dict[str, Any]] = {}  # of epochs that wait for their evaluation pass
        every = self._settings.stream.epoch_every
        self._clock = EpochClock(self._settings.training.minibatch_size, seconds_of(every) if every else None)
        self._more_batches = False  # more are ready for callbacks now
        self.over = False
        self.follows_batches = any(map(self._host.callbacks.wants, BATCH_HOOKS))

    def begin(self, initial_epoch: int) -> None:
        """The first hooks and the first round, before workers get tasks."""
        memory, callbacks = self._context.memory, self._host.callbacks
        if self._settings.command is Command.TRAIN:
            if callbacks.stop_requested:
                self._master.stop_training(callbacks.stop_reason, before_batch=True)
            if memory.epoch_begun:
                self._hooks.prepare("on_epoch_begin", initial_epoch, {}, learning_rate=memory.learning_rate_before)
            elif not (self._context.resumes and self.queue.training_done):
                self._epochs.begin(initial_epoch)
            self._clock.begin(initial_epoch, *self._progress())
            self._master.set_status(phase="training")
            if self._host.exports:
                self._master.set_status(saved_model_inputs=self._host.saved_model_inputs())
        elif self._settings.command is Command.EVALUATE:
            self._master.set_status(phase="evaluating")
            with self._master.state() as state:
                decision = state.rounds.requested(state.version)
            self._begin_round(decision.round)
        else:
            self._master.set_status(phase="predicting")
            self._hooks.call("on_predict_begin", {})

    def finish(self) -> None:
        """Marks the job as having no more tasks."""
        with self._master.state() as state:
            state.finish()
        self.over = True

    # ------------------------------------------------------------ one turn of the loop

    def turn(self) -> None:
        """Does what is due, or waits briefly. Raises the error that ends the job."""
        with self._master.state() as state:
            self._master.tend()
            milestones = state.take_milestones()
            idle = not milestones and not self._round_is_due(state) and not self.checkpoints.is_due(state.version)
            if idle and not self._more_batches:
                self._master.wait_a_tick()
            lost = bool(state.lost_ps)
        self._autoscale()
        servers = self.served.servers
        if lost:
            servers.restore_lost()
        self._context.master.server_scaling.turn(servers.resize, self._why_servers_wait, self._why_no_servers)
        self._deliver_batches()
        self._merge_states()
        over = self._clock.over(time.monotonic())
        if over is not None:
            with self._master.state() as state:
                state.end_epoch(over)
        for exports in self.exports:
            exports.turn()
        if idle:
            self._report.show()
            return
        if any(milestone.kind is MilestoneKind.TRAINING_DONE for milestone in milestones):
            self._apply_waiting_gradients()
        for milestone in milestones:
            self._act_on(milestone)
        with self._master.state() as state:
            due = state.rounds.version_reached(state.version).round if self._round_is_due(state) else None
        self._begin_round(due)
        if self.checkpoints.is_due(self._master.version):
            self.save_checkpoint()

    @property
    def _why_servers_wait(self) -> str:
        """What must finish before the number of servers can change; "": nothing. Servers keep a snapshot during a
        round."""
        with self._master.state() as state:
            return "" if state.rounds.running is None else "the evaluation pass to end"

    def _why_no_servers(self, servers: int) -> str:
        """Why the job can't have `servers` parameter servers; "": it can."""
        if self.queue.training_done:
            return "Training has ended, so the number of parameter servers can't change any more."
        if not self._settings.keeps_recovery_files:
            text = "The number of parameter servers changes by their recovery files, "
            text += "which {checkpoint_interval:0} turns off."
            return written(text, self._settings.in_program)
        optimizers = self._host.optimizers
        tables = any(spec.table for spec in self._host.variables)
        if tables and not all(may_serve_rows(each, servers) for each in optimizers):
            return (
                "The optimizer clips gradients of embedding tables by their norm on the parameter server. This needs "
                "all gradients on one server, so the job can't have several."
            )
        return ""

    def _deliver_batches(self) -> None:
        if self.follows_batches:
            with self._master.state() as state:
                training = self.queue.workers_in_training
                batches = state.batch_log.take(training, _BATCHES_PER_TURN)
                waiting = len(state.batch_log)
            self._more_batches = len(batches) == _BATCHES_PER_TURN
            if waiting > _LARGE_BACKLOG:
                self._master.warn(_backlog_warning(waiting, self._host.callbacks.names(BATCH_HOOKS)))
            self._hooks.batches(batches)

    def _merge_states(self) -> None:
        """Merges states of metrics as tasks come: those of all tasks of an epoch may be large."""
        with self._master.state() as state:
            piles = state.epoch_states.piles()
        for epoch, name, tasks in piles:
            merged = self._host.metrics.merge_states(name, tasks)
            with self._master.state() as state:
                state.epoch_states.merged(epoch, name, tasks, merged)

    def _end_batches(self, kind: Mode, number: int) -> None:
        """All workers have reported all batches of the epoch or round."""
        with self._master.state() as state:
            batches = state.batch_log.end(kind, number)
        self._hooks.batches(batches)

    def _apply_waiting_gradients(self) -> None:
        """Applies gradients that wait for others, before the round of the last epoch."""
        if self._context.evaluates_as_keras:
            self._master.reached_version(self.served.ps.finish_training())
        else:
            self._finish_training()

    def _finish_training(self) -> None:
        """Merges what waits, and lets the optimizers set the final weights."""
        ps, host = self.served.ps, self._host
        version = ps.finish_training()
        if host.finalizes:
            state = ps.export()
            host.set_final_weights(state)
            weights, ids = host.weights()
            version = ps.load_state(weights, state.optimizer, ids)
        self._master.reached_version(version)

    def _act_on(self, milestone: Milestone) -> None:
        if milestone.kind in _ENDS:
            self._take_back_callbacks()
        if milestone.kind is MilestoneKind.EPOCH_DONE:
            self._epoch_done(milestone.number)
        elif milestone.kind is MilestoneKind.TRAINING_DONE:
            self._training_done()
        elif milestone.kind is MilestoneKind.ROUND_DONE:
            self._round_done()
        elif milestone.kind is MilestoneKind.PREDICTION_DONE:
            self._prediction_done()
        elif milestone.kind is MilestoneKind.TRAIN_END_DONE:
            self._hooks.call("on_train_end", self._epochs.last_logs, after_export=True)
            self.finish()

    def _take_back_callbacks(self) -> None:
        """Before hooks here: callbacks continue from what hooks on the only worker left."""
        give_up = time.monotonic() + _PATIENCE_SECONDS
        with self._master.state() as state:
            shared = state.shared_callbacks
            if shared is None:
                return
            holder = shared.holder
            while holder and not shared.is_returned and state.has(holder):
                self._master.tend()
                busy = any(lease.worker == holder for lease in self.queue.leases())
                if not busy and time.monotonic() > give_up:
                    break
                self._master.wait_a_tick()
        if holder and not shared.is_returned and shared.names:
            self._master.warn(_lost_state(shared.names))
        rate = shared.take_back()
        if rate is not None:
            self._hooks.set_learning_rate(rate)

    def _prediction_done(self) -> None:
        self._end_batches(Mode.PREDICTION, 0)
        self._hooks.call("on_predict_end", {})
        with self._master.state() as state:
            output = state.prediction_output
        if output is not None:
            self._master.set_status(phase="writing")
            self._report.show()
            output.finish()
            self._master.set_status(predictions_path=self._settings.output)
        self.finish()

    # ------------------------------------------------------------ the end of an epoch, and of training

    def _epoch_done(self, epoch: int) -> None:
        self._clock.trained(epoch, *self._progress())
        self._end_batches(Mode.TRAINING, epoch)
        if self.queue.ran_out(epoch):
            self._host.warn_of_missing_data()
        with self._master.state() as state:
            states = state.epoch_states.of(epoch)
            period_end = None if self.queue.stream is None else self.queue.stream.period_ends.get(epoch)
        logs = self._host.training_logs(states)
        if period_end is not None:
            logs["event_time"] = period_end
        logger.info("Epoch %d is done at version %d: %s", epoch + 1, self._master.version, logs)
        decision = None
        if self._evaluates and self._settings.training.validates_after(epoch):
            with self._master.state() as state:
                decision = state.rounds.epoch_ended(epoch, state.version)
        if decision is not None and not self._settings.training.evaluation_steps:
            self._waiting_logs[epoch] = logs  # `on_epoch_end` runs after the round
            self._begin_round(decision.round)
        else:
            self._end_epoch(epoch, logs)

    def _end_epoch(self, epoch: int, logs: dict[str, Any]) -> None:
        """The epoch is trained, and evaluated if due."""
        seconds, steps = self._clock.take(epoch)
        epochs = epochs_of(self._settings)
        self._report.epoch_ended(EpochEnd(epoch=epoch + 1, epochs=epochs, seconds=seconds, steps=steps, logs=logs))
        with self._master.state():
            waits = self.queue.epoch == epoch  # whether workers wait for the hooks
        self._epochs.end(epoch, logs)
        if waits:
            self._clock.begin(epoch + 1, *self._progress())

    def _progress(self) -> tuple[float, int]:
        """The time, and the records trained over all epochs."""
        with self._master.state():
            return time.monotonic(), sum(self.queue.accounting.records_trained.values())

    def _training_done(self) -> None:
        self._master.set_status(phase="finishing")
        evaluates = self._evaluates and not self._context.evaluates_as_keras
        with self._master.state() as state:
            decision = state.rounds.training_ended(state.version, evaluates)
            all_done = state.rounds.all_done
        self._begin_round(decision.round)
        if all_done:
            self._end_training()  # else training ends after the last round

    def _end_training(self) -> None:
        if self._context.evaluates_as_keras:
            self._finish_training()
        self._take_back_callbacks()
        # Before the checkpoint and the export, so that these have weights restored by a callback.
        self._hooks.call("on_train_end", self._epochs.last_logs, after_export=False)
        if self.checkpoints.wanted:
            self.save_checkpoint()
        self.finish_exports()
        with self._master.state() as state:
            state.add_train_end()

    # ------------------------------------------------------------ evaluation passes

    @property
    def _evaluates(self) -> bool:
        return Mode.EVALUATION in self._host.sources

    def _round_is_due(self, state: JobMachine) -> bool:
        """Whether the model has passed the version of the next round."""
        return self._evaluates and not self.queue.training_done and state.rounds.is_due(state.version)

    def _begin_round(self, evaluation_round: Round | None) -> None:
        if evaluation_round is None:
            return
        with self._master.state() as state:
            state.persist(evaluation_round=evaluation_round.id)
        # The servers may be a few versions ahead of the version that made the round due.
        version = self._hooks.begin_round(evaluation_round.id)
        reason = evaluation_round.reason.value
        logger.info("Evaluation pass %d is of version %d (%s)", evaluation_round.id, version, reason)
        with self._master.state() as state:
            state.evaluation_begins(evaluation_round.id, version, self._host.sources[Mode.EVALUATION])

    def _round_done(self) -> None:
        with self._master.state() as state:
            finished, collection = state.rounds.running, state.rounds.collection
        assert finished is not None
        logs = self._host.round_logs(collection.merged(), finished.version)
        metrics = self._host.metrics.in_order(logs)
        with self._master.state() as state:
            state.set_status(metrics=metrics)
            state.history.evaluated(finished.version, metrics)
        shown = ", ".join(f"{name} {format_metric(value)}" for name, value in metrics.items())
        text = f"Evaluation at version {finished.version}: {shown}"
        self._report.evaluated(text, of_epoch=finished.epoch is not None and bool(self._waiting_logs))
        self._end_batches(Mode.EVALUATION, finished.id)
        self._hooks.end_round(finished.id, logs)
        for epoch in sorted(self._waiting_logs):
            if finished.epoch is not None and epoch <= finished.epoch:
                values = {f"val_{name}": value for name, value in metrics.items()}
                self._end_epoch(epoch, {**self._waiting_logs.pop(epoch), **values})
        with self._master.state() as state:
            state.persist(evaluated=finished.version, metrics=plain(metrics), evaluated_before=state.evaluated_before)
            following = state.rounds.finish(state.version).round
            all_done = state.rounds.all_done and self.queue.training_done
        if following is not None:
            self._begin_round(following)
        elif self._settings.command is Command.EVALUATE:
            self.finish()
        elif all_done:
            self._end_training()

    # ------------------------------------------------------------ checkpoints, and the end

    def save_checkpoint(self) -> None:
        """Writes a checkpoint of the current weights."""
        self.checkpoints.write(self._master.version)
        self.served.origin.checkpoint = self.checkpoints.newest
        self._master.set_status(checkpoint_path=self.checkpoints.newest)

    def finish_checkpoints(self, retry: bool = True) -> CheckpointError | None:
        """Waits for pending checkpoints; returns the error if the last one failed. `retry` as in
        `CheckpointWriter.finish`."""
        try:
            self.checkpoints.finish(self._master.version, retry)
        except CheckpointError as error:
            return error
        finally:
            self._master.set_status(checkpoint_path=self.checkpoints.newest)
        return None

    def finish_exports(self) -> None:
        """Exports the last version for serving."""
        for exports in self.exports:
            exports.finish()

    def drain(self, seconds: float) -> None:
        """Stops handing out training tasks, and waits for running ones, up to `seconds`."""
        give_up = time.monotonic() + seconds
        with self._master.state() as state:
            state.pause("interrupt", "the job is being interrupted")
            while time.monotonic() < give_up and any(
                lease.task.type is TaskType.TRAINING for lease in self.queue.leases()
            ):
                self._master.wait_a_tick()


def _lost_state(names: str) -> CallbackWarning:
    text = (
        f"The worker was lost, and with it what hooks of batches kept in {names} since the last epoch or evaluation "
        "pass. Training continues with the state before."
    )
    return CallbackWarning(f"state of {names} is lost", text)


def _backlog_warning(waiting: int, names: list[str]) -> CallbackWarning:
    text = (
        f"{waiting} batches are queued in memory because these callbacks on the master are slower than training: "
        f"{', '.join(names)}. Workers keep training, but each epoch ends only after its callbacks. Call their batch "
        "hooks less often with elasticcb.callbacks.every(n)."
    )
    return CallbackWarning("callbacks on the master are slow", text)
