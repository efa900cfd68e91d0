"""Drives a job from its first process to its summary.

The order of things in a training job:

    processes start; the model is built; the servers get its weights; `on_train_begin` on the master, which may
    restore weights and the epoch
    while there are training tasks:
        at every `evaluation_steps` versions, or at the end of an epoch: an evaluation round
        at every `checkpoint_steps` versions: a checkpoint
    waiting gradients are applied, the optimizer finalizes; the last evaluation round
    `on_train_end` on the master, which may restore weights; a checkpoint; the TRAIN_END task
    workers leave, servers are stopped

A job that evaluates or predicts has one round, or the prediction tasks, and nothing else.
"""

from __future__ import annotations

import contextlib
import logging
import math
import shlex
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from elasticcb.callbacks.placement import BATCH_HOOKS
from elasticcb.callbacks.saved_state import CallbackStates, keep_files, plain
from elasticcb.callbacks.warning import CallbackWarning
from elasticcb.checkpoint import remote as remote_checkpoint
from elasticcb.checkpoint.versions import find_undamaged
from elasticcb.errors import (
    CheckpointError,
    ClusterLostError,
    ConnectionLostError,
    ElasticCBError,
    JobFailedError,
    JobInterrupted,
    LastCheckpointError,
)
from elasticcb.master.autoscaling import Autoscaling
from elasticcb.master.batch_log import Pass
from elasticcb.master.callback_arrays import CallbackArrays
from elasticcb.master.callback_driver import MasterHooks
from elasticcb.master.checkpoint_failures import CheckpointFailures
from elasticcb.master.checkpoint_writer import CheckpointWriter
from elasticcb.master.cluster_state import Cluster, ServerPlace
from elasticcb.master.decisions import Milestone, MilestoneKind
from elasticcb.master.evaluation import EvaluationRounds, Round
from elasticcb.master.journal import Journal
from elasticcb.master.master import Master
from elasticcb.master.ps_admin import PSControl, Source
from elasticcb.master.report import Report
from elasticcb.master.roster import Role
from elasticcb.master.servers import Servers
from elasticcb.master.task import TaskType
from elasticcb.master.task_queue import TaskQueue
from elasticcb.optimizers.state import ModelState
from elasticcb.optimizers.traits import clips_on_server, may_serve_rows, model_optimizers
from elasticcb.settings import INITIAL_FOLDER, RECOVERY_FOLDER, Command, JobSettings
from elasticcb.status import Summary
from elasticcb.storage.remote_files import is_url

logger = logging.getLogger(__name__)

_DRAIN_SECONDS = 5.0  # for tasks that run when the user interrupts
_LEAVE_SECONDS = 30.0  # for workers to end by themselves when the job is over
_BATCHES_PER_TURN = 100  # that callbacks hear of before the master looks after its processes again
_LARGE_BACKLOG = 20_000  # batches that callbacks have not heard of


class Takeover(NamedTuple):
    """What a master that was killed has left.

    Attributes:
        running: its processes by role ("worker", "ps") and place, as `ClusterBackend.taken_over` says.
        since: when it was killed; seconds of `time.monotonic`.
    """

    running: Mapping[tuple[str, int], int | str]
    since: float


class Job:
    """One job.

    Args:
        settings: of the job.
        master: started; its processes will do the job.
        display: `update(JobStatus)`, `message(text)`.
        make_host: makes the Keras side of the master; it is called once the processes are on their way.
        make_program: makes what the job runs instead of a model file (elasticcb/model/program.py), once the model of
            the host is built.
        journal: of training that can be resumed, and that this job goes on with if it tells of tasks. Of training
            that was over, the servers get the model, and no hook is called.
        goes_on_by: what the user does to go on with the job of the journal; "": the command `elasticcb resume`.
        takeover: what another master has left, for this job to go on with; `master` is not started then.
    """

    def __init__(
        self,
        settings: JobSettings,
        master: Master,
        display: Any,
        make_host: Callable[[JobSettings], Any] | None = None,
        make_program: Callable[[], bytes] | None = None,
        journal: Journal | None = None,
        goes_on_by: str = "",
        takeover: Takeover | None = None,
    ) -> None:
        self._settings = settings
        self._may_press_again = "" if goes_on_by else " (press Ctrl-C again to end at once)"
        self._goes_on_by = goes_on_by or f"elasticcb resume {shlex.quote(settings.directory)}"
        self._takeover = takeover
        self._journal = journal
        # What an earlier master knew, if there was one and it handed out tasks.
        self._memory = journal.memory if journal is not None and journal.memory.queue is not None else None
        self._arrays = CallbackArrays(
            Path(settings.directory, RECOVERY_FOLDER),
            None if self._memory is None else self._memory.callback_arrays,
            display.message,
        )
        self._display = display
        self._master = master
        self._make_host = make_host or _host_of_model_file
        self._make_program = make_program
        # `fit` evaluates at the end of epochs alone, and finalizes the optimizer (EMA) after that; a command evaluates
        # what it exports.
        self._evaluates_as_keras = make_program is not None
        self._report = Report(master, settings, display)
        self._epoch_logs: dict[int, dict[str, Any]] = {}  # of epochs that wait for their round
        self._last_epoch_logs: dict[str, Any] = {}
        self._epoch_entry: dict[str, Any] = {}  # of the epoch that has begun, for the journal
        self._servers: Servers = None  # type: ignore[assignment]  # until `_connect`
        self._checkpoints: CheckpointWriter = None  # type: ignore[assignment]  # until the servers hold the model
        self._begun = False  # the servers hold the model, and workers take tasks
        self._over = False
        self._autoscaling: Autoscaling | None = None
        self._more_batches = False  # for callbacks to hear of, at once

    def run(self) -> Summary:
        """Returns when the job is done.

        Raises:
            JobFailedError: it can't go on.
            JobInterrupted: the user asked it to end.
            LastCheckpointError: all is done but the last checkpoint.
            ElasticCBError: the model file, the data or the checkpoint is not usable.
        """
        try:
            self._start()
            while not self._over:
                self._turn()
        except KeyboardInterrupt:
            self._interrupted()
        except (JobFailedError, ConnectionLostError) as error:
            raise self._explained(error) from error
        self._master.wait_until(lambda: not self._master.roster.busy(Role.WORKER), _LEAVE_SECONDS)
        if self._master.error is not None:
            raise self._master.error
        self._master.say_warnings()
        missing = self._finish_checkpoints()
        refused = Counter(self._master.refused_calls()) + Counter(self._ps.refused_calls())
        summary = self._report.summary(self._queue, refused)
        if missing is not None and self._make_program is None:
            again = f" When it can be written to again, run: {self._goes_on_by}" if self._journal is not None else ""
            raise LastCheckpointError(f"The job is done, but for its last checkpoint: {missing}{again}", summary)
        if self._journal is not None:
            self._journal.add(over=True)
        if missing is not None:
            raise LastCheckpointError(f"The model is trained, but its last checkpoint is missing: {missing}", summary)
        return summary

    def model_state(self) -> ModelState | None:
        """What the servers hold now; None before they hold the model."""
        return self._ps.export() if self._begun else None

    def close(self) -> None:
        """Ends the connections to the servers."""
        if self._checkpoints is not None:
            self._checkpoints.close()
        if self._servers is not None:
            self._servers.close()
        with self._master.changed:
            self._master.journal = None  # workers may still report
            output, self._master.prediction_output = self._master.prediction_output, None
        if output is not None:
            output.remove()
        if self._journal is not None:
            self._journal.close()

    # ------------------------------------------------------------ beginning and end

    def _start(self) -> None:
        if self._takeover is not None:
            self._take_over(self._takeover)
        else:
            if self._memory is not None:
                self._master.roster.next_id = self._memory.next_id
                if self._memory.workers:
                    self._master.roster.resize(Role.WORKER, self._memory.workers)
                if self._memory.buckets:
                    self._master.roster.resize(Role.PS, len(self._memory.servers))
            self._master.start_processes()
            if self._make_program is None:
                self._master.begin_job(self._settings, describe=self._report.status)
        self._report.show()
        # Before the model is built, which asks the checkpoint for its tables.
        self._newest_checkpoint = self._initial_checkpoint()
        initial = replace(self._settings.checkpoint, directory_for_init=self._newest_checkpoint)
        self._host = self._make_host(replace(self._settings, checkpoint=initial))
        if self._make_program is None:  # else readers bring their indexes
            with self._master.changed:
                self._master.find_index = self._host.find_index
        logger.info("The model is built")
        if self._make_program is not None:
            self._master.begin_job(self._settings, self._make_program(), self._report.status)
        self._wait_for(lambda: self._master.roster.complete(Role.PS, self._master.job), "parameter servers")
        self._connect()
        training = self._settings.training
        if self._memory is not None:
            keep_files(self._host.callbacks.callbacks)
        was_over = self._memory is not None and self._memory.over
        if self._settings.command is Command.TRAIN and not was_over:
            # Of a job that is resumed, what it would set on the model was trained on long ago.
            begin = self._hooks.call if self._memory is None else self._hooks.call_again
            begin("on_train_begin", {})  # may restore weights, optimizer and epoch
        self._initial_epoch = getattr(self._host.model, "_initial_epoch", None) or training.initial_epoch
        self._states = CallbackStates(self._host.callbacks.callbacks, self._display.message)
        if self._memory is not None:
            self._initial_epoch = self._memory.ended_epochs
            self._last_epoch_logs = self._memory.logs
            self._states.restore(self._memory.callbacks, self._arrays.load())
        self._holds_epochs = any(map(self._host.callbacks.wants, ("on_epoch_begin", "on_epoch_end")))
        self._queue = self._resumed_queue() or TaskQueue(
            training=self._host.sources.get("training", ()),
            prediction=self._host.sources.get("prediction", ()),
            records_per_task=training.records_per_task,
            minibatch_size=training.minibatch_size,
            num_epochs=training.num_epochs,
            max_batches=training.max_batches,
            shuffle_seed=training.shuffle_seed,
            max_retries=training.max_task_retries,
            lease_seconds=self._settings.cluster.lease_seconds,
            hold_epochs=self._holds_epochs,
            initial_epoch=self._initial_epoch,
            open_ended=self._host.open_ended,
            hold_predictions=self._host.holds_predictions,
        )
        self._report.evaluated_before = self._queue.accounting.records_evaluated
        master = self._master
        logger.info("The servers hold the model, version %d", self._ps.version)
        with master.changed:
            master.version = self._report.start_version = max(master.version, self._ps.version)
            master.merging_units = self._host.metrics.merging_units
            evaluated = None if self._memory is None else self._memory.evaluated
            master.rounds = EvaluationRounds(
                evaluation_steps=training.evaluation_steps,
                start_version=self._ps.version if evaluated is None else evaluated,
                merge=self._host.metrics.merge_states if self._host.merges_by_itself else None,
                first_id=1 if self._memory is None else self._memory.evaluation_round + 1,
            )
            master.queue = self._queue
            if self._settings.command is Command.PREDICT and self._settings.output:
                master.prediction_output = self._host.prediction_output(self._settings)
            if self._memory is not None and self._takeover is None:
                master.resume(self._memory)
            self._begin_journal()
        resumed = self._memory is not None
        failures = CheckpointFailures(master.totals, self._display.message)
        self._checkpoints = CheckpointWriter(self._settings, self._ps, failures, resumed)
        if was_over:
            self._finish()
        else:
            self._begin_autoscaling()
            self._begin()
        # Last of all, since workers take tasks from now on: a callback may have set the learning rate.
        with master.changed:
            master.cluster = Cluster(
                self._servers.places,
                self._host.variables,
                self._ps.split,
                batch_events=self._follows_batches,
                predictions=self._host.collects_predictions,
                buckets=self._ps.buckets,
            )
            self._begun = True
            master.note(
                servers=self._servers.places,
                merging_units=sorted(master.merging_units),
                learning_rate=self._hooks.base_learning_rate,
                **self._epoch_entry,
            )
            master.changed.notify_all()
        if self._takeover is not None:
            seconds = time.monotonic() - self._takeover.since
            self._display.message(f"The master is back after {seconds:.1f} s; {self._went_on} went on meanwhile.")

    def _take_over(self, takeover: Takeover) -> None:
        """Lets workers go on with their tasks at once; the model, for hooks and rounds, is built meanwhile."""
        assert self._journal is not None
        memory = self._journal.memory
        assert memory.queue is not None
        queue = TaskQueue.from_dict(memory.queue, time.monotonic())
        queue.repeat_milestones(memory.ended_epochs)
        queue.release_epoch(memory.ended_epochs - 1)
        self._master.begin_job(self._settings, describe=self._report.status)
        self._master.take_over(self._journal, queue, takeover.running)
        counts = [(len(self._master.roster.up(role)), role.value) for role in Role]
        self._went_on = " and ".join(f"{count} {name}{'s' if count != 1 else ''}" for count, name in counts)
        self._master.start()
        logger.info("Workers and servers may go on")

    def _initial_checkpoint(self) -> str:
        """The folder of the version that the job starts from, on a disk; "": from fresh weights."""
        folder = self._settings.checkpoint.directory_for_init
        if not is_url(folder):
            return str(find_undamaged(folder, self._display.message)) if folder else ""
        copies = Path(self._settings.directory, INITIAL_FOLDER)
        if self._memory is not None:  # the master before has copied one
            with contextlib.suppress(CheckpointError):
                return str(find_undamaged(copies, self._display.message))
        return str(remote_checkpoint.fetch(folder, copies, self._display.message))

    def _resumed_queue(self) -> TaskQueue | None:
        """That of an earlier master. Raises `JobFailedError` when the data are others."""
        if self._memory is None or self._memory.queue is None:
            return None
        stopped = self._memory.queue["stop_reason"] is not None
        if not self._host.repeatable and not self._memory.over and not stopped:
            self._memory.states.clear()
            return None  # the epoch that was under way begins anew: its other batches can't be told from those done
        saved = [(name, count) for name, count in self._memory.queue["training"]]
        found = list(self._host.sources.get("training", ()))
        if saved != found:
            raise JobFailedError(
                f"The training data have changed: {sum(count for _, count in saved):,} records in {len(saved)} sources "
                f"when the job began, {sum(count for _, count in found):,} in {len(found)} now. Put the data back as "
                "they were, or begin a new job from the newest checkpoint."
            )
        if self._takeover is not None:
            return self._master.queue
        queue = TaskQueue.from_dict(self._memory.queue)
        if not self._host.repeatable:
            queue.drop_training()
        queue.repeat_milestones(self._memory.ended_epochs)
        queue.release_epoch(self._memory.ended_epochs - 1)
        return queue

    def _begin_journal(self) -> None:
        journal = self._journal
        if journal is not None:
            self._master.journal = journal
            if self._memory is None:
                rate = self._hooks.base_learning_rate
                journal.add(run=self._ps.run, ended_epochs=self._initial_epoch, learning_rate=rate)
            self._master.note(next_id=self._master.roster.next_id)

    def _begin_autoscaling(self) -> None:
        limits = self._settings.cluster.autoscale
        if limits.most and (self._memory is None or self._memory.autoscale):
            records = self._report.records_to_train(self._queue)
            self._autoscaling = Autoscaling(self._master, limits, records, self._display.message)
            self._master.autoscales = True

    def _begin(self) -> None:
        if self._settings.command is Command.TRAIN:
            if self._host.callbacks.stop_requested:
                self._master.stop_training(self._host.callbacks.stop_reason)
            elif self._memory is not None and self._memory.epoch_begun:
                self._epoch_entry = {}  # as the journal has it
                self._hooks.call_again(
                    "on_epoch_begin", self._initial_epoch, {}, learning_rate=self._memory.learning_rate_before
                )
            elif self._memory is None or not self._queue.training_done:
                self._begin_epoch(self._initial_epoch)
            self._report.phase = "training"
            if self._host.exports:
                self._report.saved_model_inputs = self._host.saved_model_inputs()
        elif self._settings.command is Command.EVALUATE:
            self._report.phase = "evaluating"
            self._begin_round(self._master.rounds.requested(self._master.version).round)
        else:
            self._report.phase = "predicting"
            self._hooks.call("on_predict_begin", {})

    def _connect(self) -> None:
        """Hands the model to the servers: fresh weights, or those of a checkpoint."""
        memory = self._memory
        self._servers = Servers(
            self._master,
            self._host.variables,
            self._host.may_split,
            self._source,
            self._master.say,
            run="" if memory is None else memory.run,
            places=[ServerPlace(*place) for place in memory.servers] if memory and self._takeover else (),
            buckets=None if memory is None else memory.bucket_map(),
        )
        if memory is not None:
            self._servers.learning_rate = lambda: memory.learning_rate
        if memory is not None and self._takeover is not None:
            self._servers.restore_lost()
            self._ps.pull()
            self._ps.release_held()
            if memory.evaluation_round:  # which begins anew, if it was running
                self._ps.release_snapshot(memory.evaluation_round)
        elif memory is not None:
            self._servers.adopt(memory.version)
            self._host.assign(*self._ps.weights())
        else:
            source = self._source()
            self._ps.initialize(source)
            if source.checkpoint:
                self._display.message(f"The model starts from {source.checkpoint}, version {self._ps.version}.")
                self._host.assign(*self._ps.weights())
        self._hooks = MasterHooks(self._host, self._ps, self._master.stop_training, self._master.reached_version)
        self._hooks.adopt_learning_rate(self._ps.learning_rate)
        self._servers.learning_rate = lambda: self._hooks.base_learning_rate
        self._host.callbacks.warn = self._master.warn
        self._follows_batches = any(map(self._host.callbacks.wants, BATCH_HOOKS))

    @property
    def _ps(self) -> PSControl:
        return self._servers.control

    def _source(self) -> Source:
        """What a server begins with, without recovery files: the newest checkpoint, or fresh weights."""
        if self._newest_checkpoint:
            return Source(checkpoint=self._newest_checkpoint)
        weights, ids = self._host.weights()
        return Source(weights, "", self._host.optimizer_state(), self._host.version, ids, self._host.used())

    def _wait_for(self, condition: Any, what: str) -> None:
        while True:
            with self._master.changed:
                self._master.tend()
                if condition():
                    return
                self._master.wait()
            self._report.phase = f"waiting for {what}"
            self._report.show()

    def _explained(self, error: ElasticCBError) -> ElasticCBError:
        """The error with what the user can do about it."""
        if isinstance(error, ConnectionLostError):
            try:
                self._master.tend()  # which knows why a server does not answer
            except JobFailedError as cause:
                error = cause
        hints = ""
        if self._report.checkpoint_path:
            hints += (
                f"\nThe newest checkpoint is {self._report.checkpoint_path}. To go on from it: "
                f"--checkpoint_dir_for_init={self._settings.checkpoint.directory}"
            )
        if self._is_resumable:
            hints += f"\nTo go on where the job stands: {self._goes_on_by}"
        kind = type(error) if isinstance(error, JobFailedError) else ClusterLostError
        return kind(f"{error}{hints}", error.user_traceback) if hints else error

    def _interrupted(self) -> None:
        """Drains, saves, and ends the job by raising `JobInterrupted`."""
        saved = ""
        try:
            if self._begun and self._settings.command is Command.TRAIN:
                self._display.message(f"Interrupted: finishing running tasks{self._may_press_again}.")
                self._drain()
                if self._journal is not None:
                    self._ps.finish_training(finalize=False)  # after which all is in the recovery files
                if self._checkpoints.wanted:
                    self._save_checkpoint()
                    missing = self._finish_checkpoints(retry=False)
                    if missing is not None:
                        raise missing
                    saved = f" The newest checkpoint is {self._report.checkpoint_path}."
        except KeyboardInterrupt:
            pass
        except ElasticCBError as error:
            saved = f" No checkpoint could be written: {error}"
        if self._is_resumable:
            saved += f" To go on: {self._goes_on_by}"
        raise JobInterrupted(f"The job was interrupted at version {self._master.version}.{saved}")

    @property
    def _is_resumable(self) -> bool:
        return self._journal is not None and (self._begun or self._memory is not None)

    def _drain(self) -> None:
        give_up = time.monotonic() + _DRAIN_SECONDS
        with self._master.changed:
            self._queue.pause()
            while time.monotonic() < give_up and any(
                lease.task.type is TaskType.TRAINING for lease in self._queue.leases()
            ):
                self._master.wait()

    # ------------------------------------------------------------ one turn of the loop

    def _turn(self) -> None:
        master = self._master
        with master.changed:
            master.tend()
            milestones = self._queue.take_milestones()
            idle = not milestones and not self._checkpoints.is_due(self._master.version) and not self._round_due()
            if idle and not self._more_batches:
                master.wait()
        if self._autoscaling is not None:
            self._autoscaling.turn()
        if master.lost_ps:
            self._servers.restore_lost()
        master.server_scaling.turn(self._servers, self._why_servers_wait, self._why_no_servers)
        self._master.say_warnings()
        self._deliver_batches()
        if idle:
            self._report.show()
            return
        self._act_on(milestones)
        if self._round_due():
            self._begin_round(master.rounds.version_reached(master.version).round)
        if self._checkpoints.is_due(self._master.version):
            self._save_checkpoint()

    @property
    def _why_servers_wait(self) -> str:
        """What has to come before their number may change; "": nothing. They keep a snapshot for a round."""
        if not self._begun:
            return "training to begin"
        return "" if self._master.rounds.running is None else "the evaluation round to end"

    def _why_no_servers(self, servers: int) -> str:
        """Why the job can't have so many parameter servers; "": it can."""
        if self._queue.training_done:
            return "The job's training has ended; its parameter servers stay as they are."
        optimizers = model_optimizers(self._host.model)
        tables = any(spec.table for spec in self._host.variables)
        clips = any(clips_on_server(each) or (tables and not may_serve_rows(each, servers)) for each in optimizers)
        if servers > 1 and clips:
            return (
                "The model's optimizer clips gradients by their norm on the parameter server, which has all of them "
                "only where it is the only one."
            )
        return ""

    def _deliver_batches(self) -> None:
        if self._follows_batches:
            with self._master.changed:
                training = {lease.worker for lease in self._queue.leases() if lease.task.type is TaskType.TRAINING}
                batches = self._master.batch_log.take(training, _BATCHES_PER_TURN)
                waiting = len(self._master.batch_log)
            self._more_batches = len(batches) == _BATCHES_PER_TURN
            if waiting > _LARGE_BACKLOG:
                self._master.warn(_backlog_warning(waiting, self._host.callbacks.names(BATCH_HOOKS)))
            self._hooks.batches(batches)

    def _end_batches(self, kind: Pass, number: int) -> None:
        """All workers have reported all batches of the epoch or round."""
        with self._master.changed:
            batches = self._master.batch_log.end(kind, number)
        self._hooks.batches(batches)

    def _round_due(self) -> bool:
        """Whether the model has passed the version of the next round."""
        master = self._master
        if not self._evaluates or self._queue.training_done or master.rounds.running is not None:
            return False
        return master.rounds.is_due(master.version)

    @property
    def _evaluates(self) -> bool:
        return "evaluation" in self._host.sources

    def _act_on(self, milestones: list[Milestone]) -> None:
        kinds = {milestone.kind for milestone in milestones}
        if MilestoneKind.TRAINING_DONE in kinds:
            # Before the last epoch's round.
            self._master.reached_version(self._ps.finish_training(finalize=not self._evaluates_as_keras))
        for milestone in milestones:
            if milestone.kind is MilestoneKind.EPOCH_DONE:
                self._epoch_done(milestone.number)
            elif milestone.kind is MilestoneKind.TRAINING_DONE:
                self._training_done()
            elif milestone.kind is MilestoneKind.ROUND_DONE:
                self._round_done()
            elif milestone.kind is MilestoneKind.PREDICTION_DONE:
                self._end_batches(Pass.PREDICTION, 0)
                self._hooks.call("on_predict_end", {})
                if self._master.prediction_output is not None:
                    self._report.phase = "writing"
                    self._report.show()
                    self._master.prediction_output.finish()
                    self._report.predictions_path = self._settings.output
                self._finish()
            elif milestone.kind is MilestoneKind.TRAIN_END_DONE:
                self._hooks.call("on_train_end", self._last_epoch_logs, after_export=True)
                self._finish()

    def _finish(self) -> None:
        with self._master.changed:
            self._queue.finish()
            self._master.over = True
            self._master.changed.notify_all()
        self._over = True

    # ------------------------------------------------------------ epochs

    def _epoch_done(self, epoch: int) -> None:
        self._ps.persist()  # what is trained in a whole epoch is not to be lost with a server
        self._end_batches(Pass.TRAINING, epoch)
        if self._queue.ran_out(epoch):
            self._host.warn_of_missing_data()
        logs = self._host.training_logs(self._master.epoch_states.get(epoch, {}))
        logger.info("Epoch %d is done at version %d: %s", epoch + 1, self._master.version, logs)
        decision = None
        if self._evaluates and self._evaluates_after(epoch):
            decision = self._master.rounds.epoch_ended(epoch, self._master.version)
        if decision is not None and not self._settings.training.evaluation_steps:
            self._epoch_logs[epoch] = logs  # `on_epoch_end` waits for the round
            self._begin_round(decision.round)
        else:
            self._end_epoch(epoch, logs)

    def _evaluates_after(self, epoch: int) -> bool:
        frequency = self._settings.training.validation_freq
        if isinstance(frequency, int):
            return (epoch + 1) % frequency == 0
        return epoch + 1 in frequency

    def _end_epoch(self, epoch: int, logs: dict[str, Any]) -> None:
        self._last_epoch_logs = logs
        self._hooks.call("on_epoch_end", epoch, logs)
        # Before `on_epoch_begin`, which runs again when the job is resumed.
        callbacks = self._callback_states()
        self._epoch_entry = {"epoch_begun": False}
        if not self._queue.training_done:
            self._begin_epoch(epoch + 1)
        with self._master.changed:
            self._queue.release_epoch(epoch)
            self._master.epoch_states.pop(epoch, None)  # not before: the journal holds them until the epoch is ended
            self._master.note(
                ended_epochs=epoch + 1,
                learning_rate=self._hooks.base_learning_rate,
                logs=plain(logs),
                **self._epoch_entry,
                **callbacks,
            )
            self._master.rewrite_journal()
            self._master.changed.notify_all()
        if callbacks:
            self._arrays.drop_others()

    def _begin_epoch(self, epoch: int) -> None:
        if epoch < self._settings.training.num_epochs:
            self._epoch_entry = {"epoch_begun": True, "learning_rate_before": self._hooks.base_learning_rate}
            self._hooks.call("on_epoch_begin", epoch, {})

    def _callback_states(self) -> dict[str, Any]:
        """What callbacks remember, for the journal."""
        if self._journal is None:
            return {}
        arrays: dict[str, Any] = {}
        return {"callbacks": self._states.save(arrays), "callback_arrays": self._arrays.keep(arrays)}

    def _training_done(self) -> None:
        self._report.phase = "finishing"
        rounds = self._master.rounds
        evaluates = self._evaluates and not self._evaluates_as_keras
        self._begin_round(rounds.training_ended(self._master.version, evaluates).round)
        if rounds.all_done:
            self._end_training()  # else the end of the last round goes on from there

    def _end_training(self) -> None:
        if self._evaluates_as_keras:
            self._master.reached_version(self._ps.finish_training())
        # Before the checkpoint and the export, which so have the weights that a callback restored.
        self._hooks.call("on_train_end", self._last_epoch_logs, after_export=False)
        if self._checkpoints.wanted:
            self._save_checkpoint()
        with self._master.changed:
            self._queue.add_train_end()
            self._master.note()
            self._master.changed.notify_all()

    # ------------------------------------------------------------ evaluation rounds

    def _begin_round(self, evaluation_round: Round | None) -> None:
        if evaluation_round is None:
            return
        with self._master.changed:
            self._master.note(evaluation_round=evaluation_round.id)
        # The servers may be some versions ahead of what made the round due.
        version = self._hooks.begin_round(evaluation_round.id)
        self._master.rounds.snapshot_taken(version)
        reason = evaluation_round.reason.value
        logger.info("Evaluation round %d is of version %d (%s)", evaluation_round.id, version, reason)
        with self._master.changed:
            self._report.evaluated_before = self._queue.accounting.records_evaluated
            self._queue.add_evaluation(evaluation_round.id, self._host.sources["evaluation"])
            self._master.changed.notify_all()

    def _round_done(self) -> None:
        rounds = self._master.rounds
        finished = rounds.running
        assert finished is not None
        logs = self._host.round_logs(rounds.merged(), finished.version)
        self._report.metrics = {name: value for name, value in logs.items() if name not in ("metrics", "version")}
        shown = ", ".join(f"{name} {_shown(value)}" for name, value in self._report.metrics.items())
        self._display.message(f"Evaluation at version {finished.version}: {shown}")
        self._end_batches(Pass.EVALUATION, finished.id)
        self._hooks.end_round(finished.id, logs)
        for epoch in sorted(self._epoch_logs):
            if finished.epoch is not None and epoch <= finished.epoch:
                values = {f"val_{name}": value for name, value in sorted(self._report.metrics.items())}
                self._end_epoch(epoch, {**self._epoch_logs.pop(epoch), **values})
        with self._master.changed:
            self._master.note(evaluated=finished.version)
        following = rounds.finish(self._master.version).round
        if following is not None:
            self._begin_round(following)
        elif self._settings.command is Command.EVALUATE:
            self._finish()
        elif rounds.all_done and self._queue.training_done:
            self._end_training()

    def _save_checkpoint(self) -> None:
        self._checkpoints.write(*self._position())
        self._newest_checkpoint = self._checkpoints.newest
        self._report.checkpoint_path = self._checkpoints.place

    def _position(self) -> tuple[int, dict[str, Any]]:
        """Where the job is, for a checkpoint."""
        with self._master.changed:
            return self._master.version, self._queue.to_dict()

    def _finish_checkpoints(self, retry: bool = True) -> CheckpointError | None:
        """Waits until they are where they belong; why the last one is not, if so. `retry` as in `finish`."""
        try:
            self._checkpoints.finish(*self._position(), retry)
        except CheckpointError as error:
            return error
        finally:
            self._report.checkpoint_path = self._checkpoints.place
        return None


def _host_of_model_file(settings: JobSettings) -> Any:
    # Keras is imported here, not above: the other processes import it meanwhile.
    from elasticcb.master.keras_host import ModelHost

    return ModelHost(settings)


def _backlog_warning(waiting: int, names: list[str]) -> CallbackWarning:
    text = (
        f"{waiting} batches wait in memory for callbacks on the master, which take longer than the batches: "
        f"{', '.join(names)}. Workers go on; the end of the epoch waits for the callbacks. Limit their hooks of "
        "batches with elasticcb.callbacks.every(n)."
    )
    return CallbackWarning("callbacks on the master are slow", text)


def _shown(value: Any) -> str:
    if not isinstance(value, float) or not math.isfinite(value):
        return str(value)
    return f"{value:.4g}" if 0 < abs(value) < 0.001 else f"{value:.4f}"
