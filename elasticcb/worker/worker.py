"""Takes tasks, runs their batches, reports what came of them."""

from __future__ import annotations

import contextlib
import logging
import operator
import time
from collections import Counter, deque
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from elasticcb.callbacks.dispatch import Dispatcher
from elasticcb.callbacks.placement import Place, holds_predictions
from elasticcb.clients.master import MasterClient, ProgressReporter, places_of
from elasticcb.clients.ps import PSClient, PushResult
from elasticcb.compute.convert import not_cached
from elasticcb.errors import (
    CallbackError,
    ConnectionLostError,
    ElasticCBError,
    LeaveRequestedError,
    ModelFileError,
    NonFiniteError,
    describe,
    user_traceback,
)
from elasticcb.model.input_pipeline import Pipeline, open_pipeline
from elasticcb.model.job_callbacks import callback_params, job_callbacks
from elasticcb.model.metric_messages import Outputs, States, flatten_outputs, to_metric_states, to_outputs
from elasticcb.model.metrics import ModelMetrics, Transport
from elasticcb.model.spec import Spec
from elasticcb.model.weights import prime, variable_specs
from elasticcb.optimizers.step_logs import is_overridden
from elasticcb.optimizers.traits import learning_rate_variable
from elasticcb.process.signals import on_sigterm
from elasticcb.process.stats import STALENESS
from elasticcb.proto import elasticcb_pb2 as pb
from elasticcb.settings import Command, JobSettings, NonFinite
from elasticcb.sharding.flat_blocks import Blocks
from elasticcb.sharding.partition import VariableSpec
from elasticcb.worker.exchanges import Exchanges
from elasticcb.worker.pass_hooks import PassHooks
from elasticcb.worker.task_input import Batch, Finished, TaskInput, TaskRead, TaskStarted
from elasticcb.worker.trainer import Trainer, TrainResult

logger = logging.getLogger(__name__)

_FIRST_MODE = {Command.TRAIN: "training", Command.EVALUATE: "evaluation", Command.PREDICT: "prediction"}
_MOST_OUTPUTS = 2**31 - 2**26  # bytes of one task, in a message of at most 2 GiB
# Doing the task again would end the same way.
_FATAL = (NonFiniteError, ModelFileError)


@dataclass(frozen=True)
class _Pushed:
    """A training batch whose gradients are on their way."""

    batch: Batch
    result: TrainResult
    answer: Future[PushResult]
    started: float
    version: int  # of the weights that they were computed on; -1: not known


class Worker:
    """One worker of a job.

    Args:
        settings: of the job.
        client: of the master; the worker registers with it once its model is built.
        index: the place to take; -1 lets the master choose.
        spec: brings model, callbacks and, for a program, the data.
    """

    def __init__(self, settings: JobSettings, client: MasterClient, index: int, spec: Spec) -> None:
        self._settings = settings
        self._client = client
        self._index = index
        self._spec = spec
        self._model = self._spec.build_model()
        self._metrics = ModelMetrics(self._model, self._spec.make_eval_metrics())
        self._pipelines: dict[str, Pipeline] = {}
        self._task: Any = None
        self._skip_rest = False  # of the present task: it failed or was taken away
        self._units_done = 0  # records, or batches, of the present task
        self._counts_progress = False
        self._end: int | None = None  # records of the present task, if others do the rest
        self._given_back: set[int] = set()  # leases, before they were begun with
        self._done_at = 0.0  # when the batch before ended, in seconds
        self._report = pb.ReportTaskRequest()
        self._states: States = {}  # metric states of the present task
        self._batch_states: dict[str, list[Any]] = {}  # of its training batches
        self._outputs: list[Outputs] = []  # of its batches, for the master
        self._pass = (0, 0, 0)  # task type, epoch and evaluation round of the present task
        self._batches: Counter[tuple[int, int, int]] = Counter()  # that ran here, by pass
        self._snapshot: tuple[int, Blocks] = (0, [])  # an evaluation round and its weights
        self._event: pb.BatchEvent | None = None  # of the present batch
        self._stop_told = False
        self._gave_up = False  # the job fails by an error here
        self._assigned: Blocks | None = None  # what the model's variables hold
        self._pushed: deque[_Pushed] = deque()  # of the present task, not answered yet
        self._predicts = False  # it has had a prediction task
        self._local_steps = 0
        self._first_step_told = False
        self._last_version = 0
        self._base_learning_rate: float | None = None
        self._learning_rate_version = -1
        self._changed_rate: float | None = None
        self._rate_is_known = False  # reading it takes half a millisecond

    def run(self) -> None:
        """Works until the master says that nothing will come any more.

        Raises:
            ConnectionLostError: the master or a server is out of reach.
            LeaveRequestedError: SIGTERM came, or the master needs fewer workers.
            ElasticCBError: the model file, or the cluster, is not usable.
        """
        first_mode = _FIRST_MODE[self._settings.command]
        pipeline = self._pipeline(first_mode)
        prime(self._spec, self._model, pipeline.first_batch(), first_mode)
        self._metrics.reset()
        logger.info("The model is built")
        self._transports = self._metrics.transports()
        self._training_units = self._metrics.training_units()
        self._client.register(pb.WORKER, self._index)
        cluster = self._client.wait_for_cluster()
        self._progress = ProgressReporter(self._client)
        self._ps = PSClient(
            cluster.ps_addresses,
            self._check_variables(cluster),
            cluster.split,
            client_id=self._client.id,
            synchronous=not self._settings.training.use_async,
            patience_seconds=self._settings.cluster.patience_seconds,
            access=self._client.access,
            ids=cluster.ps_ids,
            find=self._client.find_server,
            buckets=places_of(cluster).buckets,
            find_map=self._client.find_map,
            measures=self._client.measures,
        )
        self._trainer = Trainer(
            self._model, self._metrics, self._ps.specs, self._ps.partition, self._settings.training.wire_dtype
        )
        training = self._settings.training
        self._exchanges = Exchanges(self._ps, training.max_staleness, training.get_model_steps == 1)
        self._ps.pull()
        self._adopt_base_learning_rate()
        params = callback_params(self._settings, worker_id=self._client.id)
        spec = pipeline.element_spec
        labelled = first_mode != "prediction" and isinstance(spec, tuple)
        params["features_spec"] = spec[0] if labelled else spec
        self._callbacks = Dispatcher(
            job_callbacks(self._spec, self._settings),
            Place.WORKER,
            params,
            self._model,
            on_error=self._settings.training.callback_errors,
            warn=lambda warning: self._progress.warn(warning.subject, warning.text, warning.errors),
            in_program=not self._settings.model.definition,
        )
        self._reports_batches = cluster.batch_events
        self._reports_predictions = cluster.predictions
        self._holds_predictions = holds_predictions(self._callbacks.callbacks)
        self._passes = PassHooks(self._metrics, self._callbacks.wants, self._call)
        self._input = TaskInput(self._client, self._pipeline, self._trainer.lookups)
        self._progress.on_leave = self._input.leave
        self._progress.on_split = self._input.wake
        try:
            with on_sigterm(self._input.leave):
                self._loop(self._input)
        finally:
            self._input.stop()
            self._progress.stop()
            self._exchanges.close()
            self._ps.close()

    def _pipeline(self, mode: str) -> Pipeline:
        if mode not in self._pipelines:
            self._pipelines[mode] = open_pipeline(
                self._settings, self._spec, mode, lambda file: self._client.index_of(mode, file)
            )
        return self._pipelines[mode]

    def _check_variables(self, cluster: Any) -> list[Any]:
        specs = [VariableSpec.from_message(message) for message in cluster.variables]
        own = variable_specs(self._model)
        for index in range(max(len(specs), len(own))):
            expected, found = specs[index : index + 1], own[index : index + 1]
            table = bool(expected and expected[0].table)
            if [_agreed(spec, table) for spec in expected] != [_agreed(spec, table) for spec in found]:
                raise ModelFileError(
                    f"Weight {index} of the model is {found or 'missing'} here and {expected or 'missing'} on "
                    f"the master. {self._spec.path} must build the same model in every process."
                )
        return specs

    def _loop(self, events: TaskInput) -> None:
        for event in events:
            self._progress.raise_error()
            if isinstance(event, Finished):
                if event.error is not None:
                    raise event.error
                break
            try:
                if self._progress.splits:
                    self._agree_to_splits()
                if isinstance(event, TaskStarted):
                    self._start_task(event)
                elif isinstance(event, Batch) and not self._skip_rest:
                    self._run_batch(event)
                    if self._end is not None:
                        self._end_early()
                elif isinstance(event, TaskRead) and not self._skip_rest:
                    if event.error is not None:
                        raise event.error
                    self._finish_task(event.exhausted)
            except ConnectionLostError:
                raise
            except Exception as error:
                self._fail_task(error)
                if self._gave_up:
                    return
            if events.leaving and (
                self._task is None or self._task.type != pb.TRAIN_END or isinstance(event, TaskRead)
            ):
                self._put_down()
        self._passes.end()
        self._end_predictions()

    def _put_down(self) -> None:
        """Tells the master all that is done; the rest of the present task goes to others."""
        logger.info("Asked to end: the rest of the present task goes back")
        self._settle_all()
        if self._predicts:
            self._end_predictions()
            if self._input.holds(self._task.lease) and self._counts_progress and not self._reports_predictions:
                self._progress.update(self._task.lease, self._units_done, self._ps.version)
        self._progress.flush()
        self._progress.send()
        raise LeaveRequestedError

    def _end_predictions(self) -> None:
        """Lets callbacks put down what they hold of this worker's predictions."""
        if self._predicts:
            self._call("on_predict_end", {})

    # ------------------------------------------------------------ the life of a task

    def _start_task(self, event: TaskStarted) -> None:
        self._task, self._counts_progress = event.task, event.counts_progress
        self._skip_rest = event.task.lease in self._given_back
        if self._skip_rest:
            self._given_back.remove(event.task.lease)
            return
        self._end = None
        self._done_at = time.monotonic()
        self._units_done = 0  # records, or batches, of the present task
        self._report = pb.ReportTaskRequest(lease=event.task.lease)
        self._states, self._batch_states, self._outputs = {}, {}, []
        if self._settings.command is Command.TRAIN:
            self._call("on_train_begin", {})
        self._begin_pass(event.task)
        self._passes.leave(event.task)
        if event.task.type == pb.EVALUATION:
            self._show_snapshot(event.task.evaluation_round)
        elif event.task.type == pb.TRAINING:
            self._snapshot = (0, [])  # as large as the model
        self._passes.enter(event.task, self._ps.snapshot_version)
        if event.task.type == pb.EVALUATION:
            self._metrics.reset()
        elif event.task.type == pb.PREDICTION:
            self._show(self._ps.blocks)
            self._predicts = True
            self._call("on_predict_begin", {})
        elif event.task.type == pb.TRAIN_END:
            # The sign that keeps the lease alive while a callback takes its time.
            self._progress.update(event.task.lease, 0, self._ps.version)
            if self._callbacks.wants("on_train_end"):
                self._show(self._ps.pull())
                self._trainer.show_tables(self._ps.read_table, self._settings.directory)
            self._call("on_train_end", {})

    def _show_snapshot(self, evaluation_round: int) -> None:
        if evaluation_round != self._snapshot[0]:
            self._snapshot = (evaluation_round, self._ps.pull_snapshot(evaluation_round))
        self._show(self._snapshot[1])

    def _begin_pass(self, task: Any) -> None:
        present = (task.type, task.epoch, task.evaluation_round)
        if present == self._pass:
            return
        self._pass = present
        if task.type == pb.TRAINING:
            # The master's callbacks may have set the learning rate at the end of the epoch before.
            self._ps.pull()
            self._exchanges.forget_rows()
            self._adopt_base_learning_rate()

    def _run_batch(self, batch: Batch) -> None:
        if self._task.lease in self._progress.lost_leases:
            logger.warning("The lease of task %d was taken away; leaving the rest to others", self._task.id)
            self._abandon_task()
            return
        index = self._batches[self._pass]
        self._batches[self._pass] += 1
        self._event = None
        if self._task.type == pb.TRAINING:
            self._train(batch, index)
            return
        if self._task.type == pb.EVALUATION:
            self._evaluate(batch, index)
        else:
            self._predict(batch, index)
        self._note_done(batch, None)

    def _note_done(self, batch: Batch, loss: float | None) -> None:
        """Counts a batch as done, and tells the master at times."""
        self._units_done += batch.units
        # Predictions of half a task die with its worker.
        lost = self._task.type == pb.PREDICTION and (self._reports_predictions or self._holds_predictions)
        resumable = self._counts_progress and not lost
        done = self._units_done if resumable else 0
        now = time.monotonic()
        compiled = self._local_steps > 1 + self._settings.training.max_staleness
        timed = compiled and self._task.type == pb.TRAINING
        seconds, self._done_at = now - self._done_at if timed else 0.0, now
        self._progress.update(
            self._task.lease,
            done,
            self._ps.version,
            loss,
            urgent=self._passed_a_milestone(),
            event=self._event,
            seconds=seconds,
        )

    def _passed_a_milestone(self) -> bool:
        """Whether the master has something to do at the present version."""
        last, self._last_version = self._last_version, self._ps.version
        every = (self._settings.training.evaluation_steps, self._settings.checkpoint.steps)
        return any(steps and self._last_version // steps > last // steps for steps in every)

    def _agree_to_splits(self) -> None:
        """Leaves to others that wait what is not begun of this worker's tasks."""
        while self._progress.splits and not self._input.leaving:
            lease, end = self._progress.splits.popitem()
            runs = self._task is not None and lease == self._task.lease and not self._skip_rest
            pipeline = self._pipeline("training")
            exact = not pipeline.ends_by_itself and (pipeline.keeps_order or not runs)
            if not exact or not self._input.holds(lease):
                continue
            if runs:
                end = max(end, self._units_begun)
                if self._end is not None and end >= self._end:
                    continue
            answer = self._client.split_task(lease, end if runs else 0)
            if runs and answer.accepted and end:
                self._end = end
                self._end_early()
            elif runs:
                self._abandon_task()
            else:
                self._given_back.add(lease)
                self._input.release(lease)

    @property
    def _units_begun(self) -> int:
        return self._units_done + sum(pushed.batch.units for pushed in self._pushed)

    def _end_early(self) -> None:
        """Reports the present task if all that this worker is to do of it is begun."""
        if self._end is not None and not self._skip_rest and self._units_begun >= self._end:
            self._finish_task(exhausted=False)
            self._skip_rest = True

    def _finish_task(self, exhausted: bool) -> None:
        self._settle_all()
        self._progress.clear()
        self._report.exhausted = exhausted
        self._report.records_done = self._units_done
        if self._task.type == pb.EVALUATION:
            self._states = {
                name: [tensor.numpy() for tensor in values] for name, values in self._metrics.state_tensors().items()
            }
        elif self._task.type == pb.TRAINING:
            self._states = {
                name: self._metrics.merge_states(name, batches) for name, batches in self._batch_states.items()
            }
        self._report.version = self._ps.version
        self._report.metrics.extend(to_metric_states(self._states))
        _check_size(self._task, self._outputs)
        self._report.outputs.extend(to_outputs(self._outputs))
        self._progress.flush()  # the end of an epoch comes after its batches
        answer = self._client.report_done(self._report)
        if answer.accepted:
            self._passes.after(self._task, self._states)
        else:
            logger.warning("The report of task %d was refused: %s", self._task.id, answer.reason)
        self._input.release(self._task.lease)

    def _fail_task(self, error: Exception) -> None:
        fatal = isinstance(error, _FATAL) or (isinstance(error, CallbackError) and self._task.type != pb.TRAIN_END)
        if isinstance(error, ElasticCBError):
            message, trace = str(error), error.user_traceback
        else:
            message = describe(error)
            trace = user_traceback(error)
        logger.error("Task %d failed: %s\n%s", self._task.id, message, trace, exc_info=error)
        with contextlib.suppress(ElasticCBError):
            self._settle_all()
        self._progress.send()  # what is done need not be done again
        self._progress.clear()
        answer = self._client.report_failed(self._task.lease, message, trace, fatal)
        if not answer.accepted:
            logger.warning("The report of task %d was refused: %s", self._task.id, answer.reason)
        self._gave_up = fatal and answer.accepted  # else the task is another's, and so is its failure
        self._abandon_task()

    def _abandon_task(self) -> None:
        self._skip_rest = True
        self._pushed.clear()
        self._exchanges.forget_rows()
        self._progress.clear()
        self._input.release(self._task.lease)

    # ------------------------------------------------------------ batches

    def _train(self, batch: Batch, index: int) -> None:
        self._call_of_batch("on_train_batch_begin", self._ps.version, {"batch": index, "size": batch.records})
        while True:
            started = time.perf_counter()
            rows = self._exchanges.rows_of(batch) if batch.wanted else {}
            version = self._ps.weights_version
            with self._progress.computing(self._task.lease):
                result = self._trainer.train(batch.data, self._ps.blocks, self._ps.version, batch.wanted, rows)
            self._assigned = None  # the step may have changed non-trainable variables
            if result.overflow:
                logger.info("Batch skipped: %s", result.overflow)
                self._report.batches_skipped += 1
                self._add_states(result.states)
                self._note_done(batch, result.push.loss)
                return
            self._local_steps += 1
            pull = self._local_steps % self._settings.training.get_model_steps == 0
            coming = self._input.coming(self._exchanges.batches_ahead)
            answer = self._exchanges.push(result.push, self._changed_learning_rate(), pull, coming)
            self._pushed.append(_Pushed(batch, result, answer, started, version))
            if len(self._pushed) <= self._settings.training.max_staleness:
                return
            if self._settle(self._pushed.popleft()):
                return
            self._report.gradients_rejected += 1
            self._ps.pull()
            self._exchanges.forget_rows()

    def _settle(self, pushed: _Pushed) -> bool:
        """Waits for the answer to a push, and carries out what follows; whether the servers took it as new enough."""
        batch, result = pushed.batch, pushed.result
        answer = pushed.answer.result()
        if answer.status == pb.STALE:
            return False
        if answer.status == pb.NON_FINITE:
            self._pass_over(answer.reason, batch, result.logs)
            self._note_done(batch, float("nan"))
            return True
        if not self._first_step_told:
            logger.info("The first step is done, after compiling it")
            self._first_step_told = True
        if pushed.version >= 0:
            between = answer.version - 1 - pushed.version  # the push itself made one version
            self._client.measures.histograms[STALENESS].observe(max(0, between))
        self._adopt_base_learning_rate()
        self._add_states(result.states)
        self._note_event(batch, answer.version, result.logs)
        self._callbacks.note_batch(time.perf_counter() - pushed.started)
        self._call_of_batch("on_train_batch_end", answer.version, {"size": batch.records, **result.logs})
        self._note_done(batch, result.push.loss)
        return True

    def _settle_all(self) -> None:
        while self._pushed:
            self._settle(self._pushed.popleft())

    def _pass_over(self, reason: str, batch: Batch, logs: dict[str, Any]) -> None:
        """A batch has NaN or infinity, and its push was refused: the job fails, unless it need not."""
        if self._settings.training.non_finite is NonFinite.STOP:
            # A callback that ends training now, as TerminateOnNaN does, lets the job end in order.
            given = {"size": batch.records, **logs, "loss": float("nan")}
            self._call_of_batch("on_train_batch_end", self._ps.version, given)
            if not self._callbacks.stop_requested:
                raise NonFiniteError(reason)
        logger.warning("Batch skipped: %s", reason)
        self._report.batches_skipped += 1

    def _note_event(self, batch: Batch, version: int, logs: Mapping[str, Any] = MappingProxyType({})) -> None:
        """What the master's callbacks will hear of the batch."""
        if self._reports_batches:
            numbers = {name: value for name, value in logs.items() if isinstance(value, (int, float))}
            number = self._task.epoch if self._task.type == pb.TRAINING else self._task.evaluation_round
            self._event = pb.BatchEvent(
                type=self._task.type, number=number, version=version, size=batch.records, logs=numbers
            )

    def _call_of_batch(self, hook: str, version: int, logs: dict[str, Any]) -> None:
        if self._callbacks.is_due(hook):
            self._show(self._ps.blocks)
        self._call(hook, version, logs)

    def _evaluate(self, batch: Batch, index: int) -> None:
        self._call("on_test_batch_begin", index, {"size": batch.records})
        rows = self._ps.lookup(batch.ids, evaluation_round=self._task.evaluation_round) if batch.wanted else {}
        with self._progress.computing(self._task.lease):
            logs, outputs = self._trainer.evaluate(batch.data, batch.wanted, rows)
        if Transport.OUTPUTS in self._transports.values():
            self._outputs.append(flatten_outputs(outputs))
        self._note_event(batch, self._ps.snapshot_version)
        self._call("on_test_batch_end", index, {"size": batch.records, **logs})

    def _predict(self, batch: Batch, index: int) -> None:
        self._call("on_predict_batch_begin", index, {"size": batch.records})
        rows = self._ps.lookup(batch.ids) if batch.wanted else {}
        with self._progress.computing(self._task.lease):
            predictions = self._trainer.predict(batch.data, batch.wanted, rows)
        if self._reports_predictions:
            self._outputs.append(flatten_outputs(predictions))
        self._note_event(batch, self._ps.version)
        self._call("on_predict_batch_end", index, {"outputs": predictions, "predictions": predictions})

    def _add_states(self, states: States) -> None:
        """Keeps a training batch's metric states until the task's end."""
        for name, values in states.items():
            if name in self._training_units:
                self._batch_states.setdefault(name, []).append(values)

    def _show(self, blocks: Blocks) -> None:
        """Makes `callback.model` hold `blocks`."""
        if self._assigned is None or any(map(operator.is_not, blocks, self._assigned)):
            self._trainer.assign(blocks)
            self._assigned = blocks

    def _call(self, hook: str, *args: Any) -> None:
        """Calls a hook, and passes on that it wants training to stop."""
        if self._callbacks.is_due(hook):
            self._rate_is_known = False
        self._callbacks.call(hook, *args)
        if self._callbacks.stop_requested and not self._stop_told:
            self._client.stop_training(f"{self._callbacks.stop_reason}, on worker {self._client.id}")
            self._stop_told = True

    def _changed_learning_rate(self) -> float | None:
        """The optimizer's learning rate if a callback, or a step of the model's own, changed it."""
        if self._rate_is_known:
            return self._changed_rate
        rate = _settable_learning_rate(self._model)
        self._changed_rate = None if rate == self._base_learning_rate else rate
        self._rate_is_known = not is_overridden(self._model, "train_step")
        return self._changed_rate

    def _adopt_base_learning_rate(self) -> None:
        """A new base rate (from a checkpoint, or set on the master) becomes the rate here too."""
        version = self._ps.learning_rate_version
        if version != self._learning_rate_version and _settable_learning_rate(self._model) is not None:
            self._base_learning_rate = self._ps.learning_rate
            self._model.optimizer.learning_rate = not_cached(self._base_learning_rate)
            self._learning_rate_version = version
            self._rate_is_known = False


def _check_size(task: Any, outputs: list[Outputs]) -> None:
    size = sum(array.nbytes for batch in outputs for array in batch.values())
    if size > _MOST_OUTPUTS:
        raise ModelFileError(
            f"What the model gives for {task.shard.end - task.shard.start} records or batches of one task takes "
            f"{size / 2**30:.1f} GiB; at most {_MOST_OUTPUTS / 2**30:.1f} GiB can travel in one message. Make tasks "
            "smaller: --num_minibatches_per_task, or a smaller batch."
        )


def _agreed(spec: VariableSpec, table: bool) -> tuple[tuple[int, ...], str]:
    """What all processes must agree on; how many rows of an embedding table they hold is their own affair."""
    return spec.shape[1:] if table else spec.shape, spec.dtype


def _settable_learning_rate(model: Any) -> float | None:
    """The optimizer's learning rate; None when a schedule rules it."""
    rate = learning_rate_variable(getattr(model, "optimizer", None))
    return None if rate is None else float(rate.numpy())
