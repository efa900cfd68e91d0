"""What a worker keeps during a job: the model, the servers, the callbacks, its input."""

from __future__ import annotations

import logging
import operator
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import IO, Any

import numpy as np

from elasticcb.callbacks.dispatch import Dispatcher, HookLogs
from elasticcb.callbacks.placement import Place, holds_predictions
from elasticcb.callbacks.shared_attributes import shares_state, without_traces
from elasticcb.clients.master import MasterClient, places_of
from elasticcb.clients.progress_reporter import ProgressReporter
from elasticcb.clients.ps import PSClient, PushResult
from elasticcb.clients.ps_servers import ServerGroup
from elasticcb.cluster.registry import backend_of
from elasticcb.compute.backend import Computation, HeldModel, TableRows
from elasticcb.compute.first_batch import Rehearsal, digest_of, rehearsed
from elasticcb.compute.registry import backend, runs_eagerly
from elasticcb.errors import ModelFileError
from elasticcb.model.input_pipeline import Pipeline, open_pipeline
from elasticcb.model.metric_messages import States
from elasticcb.model.metrics import ModelMetrics
from elasticcb.model.program import callback_params, job_callbacks
from elasticcb.model.spec import Spec
from elasticcb.model.weights import assign_dense, variable_specs
from elasticcb.optimizers.traits import model_optimizers, sets_final_weights, unwrapped
from elasticcb.process.system import remove_generated_files
from elasticcb.rpc.tensors import Array
from elasticcb.settings import Command, JobSettings, Mode, NonFinite, Updates, WireDtype
from elasticcb.sharding.flat_blocks import PlacedBlocks
from elasticcb.sharding.partition import VariableSpec
from elasticcb.sharding.push import Movement
from elasticcb.sharding.table_state import TableSpec
from elasticcb.worker.kept_models import KeptModel
from elasticcb.worker.local_updates import LocalUpdates, StateChanges, WindowLength, WorkerRate
from elasticcb.worker.pass_hooks import FollowedCallbacks, PassHooks, RunningLogs
from elasticcb.worker.task_input import Batch, TaskInput

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class BatchOfEpoch:
    """A training batch, as hooks see it.

    Attributes:
        epoch_version: version of the model when the epoch began.
    """

    index: int
    records: int
    epoch_version: int


class BuiltModel:
    """The model and its data, before the worker joins the job.

    Raises `ElasticCBError` when the model file or the data is unusable.
    """

    def __init__(
        self, settings: JobSettings, client: MasterClient, spec: Spec, before: KeptModel | None = None
    ) -> None:
        self.settings, self.client, self.spec = settings, client, spec
        self._pipelines: dict[str, Pipeline] = {}
        if before is not None:
            before.restore()
        self.model = spec.build_model()
        self.before = before if before is not None and before.model is self.model else None
        self.metrics = self.before.metrics if self.before else ModelMetrics(self.model, spec.make_eval_metrics())
        self.first_mode = Mode.of(settings.command)
        if not spec.is_built or self.metrics.own_steps:
            validates = settings.data.validation or spec.batch_source(Mode.EVALUATION) is not None
            both = self.first_mode is Mode.TRAINING and validates and self.metrics.own_steps
            for mode in (self.first_mode, *([Mode.EVALUATION] if both else ())):
                pipeline = self.pipeline(mode)
                batch = pipeline.first_batch()
                with without_traces(self.model, runs_eagerly(self.model)):
                    backend().build(spec, self.model, batch, mode, pipeline.fixed)
        self.metrics.reset()
        remove_generated_files()  # a job may end before this worker gets a task
        logger.info("The model is built")

    def pipeline(self, mode: Mode) -> Pipeline:
        """The data of a mode; opened at first use."""
        if mode not in self._pipelines:
            self._pipelines[mode] = open_pipeline(
                self.settings,
                self.spec,
                mode,
                lambda file: self.client.index_of(mode, file),
                self.client.next_batch,
            )
        return self._pipelines[mode]

    @property
    def callback_params(self) -> dict[str, Any]:
        """`callback.params` on this worker, after it has joined the job."""
        params = callback_params(self.settings, worker_id=self.client.id)
        spec = self.pipeline(self.first_mode).element_spec
        labelled = self.first_mode is not Mode.PREDICTION and isinstance(spec, tuple)
        params["features_spec"] = spec[0] if labelled else spec
        return params


class Session:
    """A worker that has joined a job whose servers hold the model.

    Args:
        cluster: the master's `pb.GetClusterResponse`.

    Attributes:
        transports, training_units: of the metrics, as in `ModelMetrics`.
        reports_batches, reports_predictions: whether the master wants batch events, and predictions.
        holds_predictions: whether callbacks here keep predictions in memory until the end.
        stop_told: whether the master knows that a callback requested the end of training.
    """

    def __init__(self, built: BuiltModel, cluster: Any) -> None:
        settings, client = built.settings, built.client
        training = settings.training
        self.settings, self.client, self.pipeline = settings, client, built.pipeline
        self.model, self.metrics = built.model, built.metrics
        self.transports = self.metrics.transports()
        self.metrics.replayed = frozenset(cluster.replayed_metrics)
        self.training_units = self.metrics.training_units()
        self.reports_batches, self.reports_predictions = cluster.batch_events, cluster.predictions
        self._is_progressive = cluster.progressive
        self.progress = ProgressReporter(client)
        self._assigned: PlacedBlocks | None = None  # the current values of the model's variables
        self.state = StateChanges(settings, self.progress)
        self.ps = _client_of(built, cluster)
        servers = self.ps.servers
        self.local: LocalUpdates | None = None
        trains = settings.command is Command.TRAIN
        self.ps.pull()
        self._kept = built.before
        if self._kept is None or self._kept.specs != servers.specs:
            assign_dense(self.model, servers.specs, self.ps.blocks)  # some optimizers are built on the weights
            self._assigned = self.ps.blocks
            held = HeldModel(self.model, self.metrics, servers.specs, trains)
            computation = backend().computation(held)
            self._kept = KeptModel(built.spec, settings, self.model, self.metrics, computation, servers.specs)
        self.computation: Computation = self._kept.computation
        if trains:
            optimizers = list(map(unwrapped, model_optimizers(self.model)))
            self.local = LocalUpdates(
                self.computation,
                self.ps,
                WindowLength(training.window),
                client.measures,
                any(map(sets_final_weights, optimizers)),
                self.state.moves,
            )
            self.scales_loss = any(
                each is not own for each, own in zip(model_optimizers(self.model), optimizers, strict=True)
            )
        self.exchanges = _Exchanges(self.ps, training.max_staleness)
        self.show(self.ps.blocks)  # data may read the model
        if built.before is None and not any(spec.table for spec in servers.specs):
            self._rehearse(built)
        self.rate = WorkerRate(self.model, self.ps)
        if trains:
            self.rate.adopt_base()
        in_program, elsewhere = not settings.model.definition, backend_of(settings.cluster.kind).separate
        self.callbacks = Dispatcher(
            job_callbacks(built.spec, settings),
            Place.WORKER,
            built.callback_params,
            self.model,
            on_error=training.callback_errors,
            warn=lambda warning: self.progress.warn(warning.subject, warning.text, warning.errors),
            in_program=in_program,
            one_worker=shares_state(settings),
            print_text=self.progress.print if elsewhere else None,
            log=self.progress.log if elsewhere and in_program else None,
        )
        self.shared_callbacks = FollowedCallbacks(client, self.callbacks, settings, built.spec, self.progress)
        if self.local is not None:
            # `on_train_batch_end`: a callback may stop training at NaN, and so end the job in order
            skips = training.non_finite is NonFinite.SKIP
            self.local.may_go_back = skips or self.callbacks.wants("on_train_batch_end")
        self.holds_predictions = holds_predictions(self.callbacks.callbacks)
        self._as_keras, self.is_alone = in_program, shares_state(settings)
        hooks_of_batches = [f"on_{mode}_batch_{end}" for mode in ("train", "test") for end in ("begin", "end")]
        wanted = any(map(self.callbacks.wants, hooks_of_batches)) or (self.is_alone and self.reports_batches)
        self.running = RunningLogs(self.metrics, self._as_keras and wanted)
        self.passes = PassHooks(self.metrics, self.callbacks, self.call)
        follows = self.shared_callbacks.follows
        self.input = TaskInput(client, self.pipeline, self.computation, follows)
        self.progress.on_leave = self.input.leave
        self.progress.on_split = self.input.wake
        self.stop_told = False
        self._snapshot: tuple[int, PlacedBlocks] | None = None  # an evaluation pass and its weights

    def _rehearse(self, built: BuiltModel) -> None:
        """Raises `ModelFileError` when the model computes something else here than in the caller's process."""
        rehearsal: Rehearsal | None = built.spec.rehearsal
        if rehearsal is None:
            return
        batch = self.pipeline(built.first_mode).first_batch()
        if digest_of((batch, self.model.weights)) == rehearsal.digest:
            with without_traces(self.model):
                rehearsal.check(*rehearsed(self.model, backend().data(self.model, batch)))
            self.metrics.reset()

    def close(self) -> None:
        """Ends threads and connections."""
        self.input.stop()
        self.progress.stop()
        self.exchanges.close()
        self.ps.servers.close()

    def kept(self) -> KeptModel | None:
        """What a later job with the same program can use again; None: nothing."""
        return self._kept if self._kept is not None and self._kept.is_usable else None

    # ------------------------------------------------------------ hooks

    def call(self, hook: str, *args: Any) -> None:
        """Calls a hook, and reports if it stops training."""
        if self.callbacks.is_due(hook):
            self.rate.may_have_changed()
        self.callbacks.call(hook, *args)
        self._tell_of_stop()

    def _tell_of_stop(self) -> None:
        if self.callbacks.stop_requested and not self.stop_told:
            self.client.stop_training(f"{self.callbacks.stop_reason}, on worker {self.client.id}")
            self.stop_told = True

    @property
    def ends_training(self) -> bool:
        """Whether a hook has ended training, and with it what this worker, the only one, has begun."""
        return self.is_alone and self.callbacks.stop_requested

    def call_of_batch(self, hook: str, batch: BatchOfEpoch, version: int, logs: Mapping[str, Any]) -> States | None:
        """Calls a hook of training batches, on a model with the newest weights. Returns the states of metrics from
        which the epoch continues, if the hook has set them.

        Args:
            version: of the model; at the end of a batch, after its push.
        """
        if not self.callbacks.is_due(hook):
            self.callbacks.skip(hook)
            self._tell_of_stop()
            return None
        number = version
        if self._as_keras:
            at_end = int(hook == "on_train_batch_end")
            number = batch.index if self.is_alone else max(0, version - batch.epoch_version - at_end)
        given = HookLogs(self.metrics.in_order(logs), batch=batch.index, size=batch.records, version=version)
        self.running.show()
        self.call(hook, number, given)
        return self._set_by(hook)

    def call_of_test_batch(self, hook: str, batch: int, logs: HookLogs) -> bool:
        """Calls a hook of evaluation batches. Returns whether it has set the metrics, from which the pass continues."""
        if not self.callbacks.is_due(hook):
            self.call(hook, batch, logs)
            return False
        of_task, adopts = self.running.show_pass(), False
        try:
            self.call(hook, batch, logs)
            adopts = self._set_by(hook) is not None
        finally:
            if not adopts:
                self.running.show_task(of_task)
        return adopts

    def _set_by(self, hook: str) -> States | None:
        states = self.running.set_by_hooks()
        if states is None or self.is_alone:
            return states
        names = " or ".join(self.callbacks.names([hook]))
        text = (
            f"{hook} of {names} changes the metrics of the model, for example by reset_metrics() or evaluate(). With "
            "several workers, later logs and History still count all batches. With num_workers=1 they are the same "
            "as in fit."
        )
        self.progress.warn(f"{names}.{hook} sets metrics", text)
        return None

    def logs_of(self, logs: dict[str, Any]) -> dict[str, Any]:
        """`logs` of the end of a training batch, from those of its step."""
        return self.running.logs(logs, "train") if self._as_keras else logs

    def give_back_callbacks(self) -> None:
        """The hooks of an epoch or a pass have run: the master's continue from what they left."""
        self.progress.flush()
        self.shared_callbacks.give_back(self.rate.changed() if self.settings.command is Command.TRAIN else None)

    # ------------------------------------------------------------ weights of the model

    def show(self, blocks: PlacedBlocks) -> None:
        """Sets `callback.model` to `blocks`."""
        if self._assigned is None or any(map(operator.is_not, blocks, self._assigned)):
            self.computation.set_weights(blocks)
            self._assigned = blocks

    def forget_shown(self) -> None:
        """A step may have changed non-trainable variables."""
        self._assigned = None

    def show_snapshot(self, evaluation_round: int) -> None:
        """Sets the model to the weights of an evaluation pass."""
        if self._snapshot is None or evaluation_round != self._snapshot[0]:
            self._snapshot = (evaluation_round, self.ps.pull_snapshot(evaluation_round))
        self.show(self._snapshot[1])

    def drop_snapshot(self) -> None:
        """Frees the snapshot, which is as large as the model."""
        self._snapshot = None

    def show_tables(self) -> None:
        """Loads all rows of the embedding tables into the model; no more batches come."""
        self.computation.hold_tables(whole_tables(self.ps, self.settings.directory))

    def evaluated_before(self, batch: Batch, rows: TableRows) -> States:
        """States of the metrics of a batch by the weights before it is trained; {}: nobody wants them."""
        if not self._is_progressive:
            return {}
        self.metrics.begin_part(Mode.EVALUATION)
        self.computation.evaluate(batch.inputs, rows)
        return self.metrics.states_before()

    def begin_training_pass(self) -> None:
        """The master's callbacks may have set the learning rate at the end of the previous epoch."""
        self.exchanges.forget_rows()
        if self.local is not None:
            self.local.follow(overwritten=self._assigned is not None)
            self.forget_shown()
        self.rate.adopt_base()

    @property
    def is_behind(self) -> bool:
        """Whether the model must be updated before training continues."""
        return self.local is not None and self.local.is_behind

    def rest(self, tells_again: bool = False) -> None:
        """There are no batches to train on here, so other workers shall not wait for this one.

        Args:
            tells_again: they may have begun to wait for it, although it rests.
        """
        if self.local is not None:
            self.local.rest(tells_again and self.settings.training.updates is Updates.SYNC)

    def heard_of(self, epoch: int, peers: Sequence[int] = ()) -> None:
        """The tasks of this epoch are being handed out; `peers` as of a task."""
        if self.local is not None:
            self.local.epoch, self.local.peers = epoch, peers


def _client_of(built: BuiltModel, cluster: Any) -> PSClient:
    settings, client = built.settings, built.client
    servers = ServerGroup(
        places_of(cluster),
        _checked_variables(built, cluster),
        cluster.split,
        settings.cluster.patience_seconds,
        client.access,
        client.find_server,
        client.find_map,
    )
    wire_dtype = settings.training.wire_dtype if settings.command is Command.TRAIN else WireDtype.SAME
    return PSClient(servers, client.id, client.measures, wire_dtype)


def _checked_variables(built: BuiltModel, cluster: Any) -> list[VariableSpec]:
    """The model's weights as the servers hold them. Raises `ModelFileError` when the model here differs."""
    specs = [VariableSpec.from_message(message) for message in cluster.variables]
    own = variable_specs(built.model)
    for index in range(max(len(specs), len(own))):
        expected, found = specs[index : index + 1], own[index : index + 1]
        table = bool(expected and expected[0].table)
        if [_agreed(spec, table) for spec in expected] != [_agreed(spec, table) for spec in found]:
            raise ModelFileError(
                f"Weight {index} of the model is {found or 'missing'} on this worker, but {expected or 'missing'} on "
                f"the master. {built.spec.words.definition} must build the same model in every process."
            )
    return specs


def _agreed(spec: VariableSpec, table: bool) -> tuple[tuple[int, ...], str]:
    """What all processes must agree on; the number of embedding rows may differ."""
    return spec.shape[1:] if table else spec.shape, spec.dtype


class _Exchanges:
    """A worker's pushes and lookups during training.

    With `max_staleness` 0 each call waits for the servers' answer. Otherwise one thread makes the calls in order while
    the next batches are computed, and prefetches the embedding rows that these need.

    Args:
        max_staleness: batches that may be computed before the first of their pushes is answered.
    """

    def __init__(self, ps: PSClient, max_staleness: int) -> None:
        self._ps = ps
        self._max_staleness = max_staleness
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="exchange") if max_staleness else None
        # By id of an upcoming batch: the batch, and the answer to its prefetch.
        self._rows: dict[int, tuple[Batch, Future[PushResult | dict[int, Any]]]] = {}

    @property
    def batches_ahead(self) -> int:
        """Number of upcoming batches whose rows should be prefetched."""
        return 1 + self._max_staleness

    def rows_of(self, batch: Batch) -> dict[int, Any]:
        """The rows of embedding tables that a training batch needs."""
        _, answer = self._rows.pop(id(batch), (None, None))
        if answer is None:
            answer = self._run(self._lookup, batch)
        found = answer.result()
        return found.rows if isinstance(found, PushResult) else found

    def push(self, rows: Movement, coming: Sequence[Batch]) -> Future[PushResult]:
        """Sends gradients of rows, and prefetches those of the coming batches."""
        wanted = [batch for batch in coming if batch.ids and id(batch) not in self._rows]
        first = wanted[0] if wanted else None
        answer = self._run(self._ps.push, rows, (), None if first is None else first.ids)
        if first is not None:
            self._rows[id(first)] = first, answer
        if self._pool is not None:
            for batch in wanted[1:]:
                self._rows[id(batch)] = batch, self._run(self._lookup, batch)
        return answer

    def forget_rows(self) -> None:
        """Discards prefetched rows: weights have been pulled since, or other batches come next."""
        self._rows.clear()

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _lookup(self, batch: Batch) -> dict[int, Any]:
        return self._ps.lookup(batch.ids, create=True) if batch.ids else {}

    def _run(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        if self._pool is not None:
            return self._pool.submit(function, *args)
        done: Future[Any] = Future()
        done.set_result(function(*args))  # the caller gets the error
        return done


_CHUNK_ROWS = 1 << 16


def whole_tables(ps: PSClient, folder: str) -> Iterator[tuple[int, Array, Array]]:
    """(variable, ids, rows) of each table; `folder` has enough space for the rows."""
    for index, spec in enumerate(ps.servers.specs):
        if spec.table:
            table = TableSpec.from_json(spec.table)
            yield index, *collect(ps.read_table(index), folder, 0 if table.initializer else table.input_dim or 0)


def collect(pieces: Iterable[tuple[Array, Array]], folder: str, input_dim: int) -> tuple[Array, Array]:
    """The ids (int64 [n], in order) and rows ([n, dim]) of a table.

    Args:
        folder: folder with enough space for the rows; the file is unnamed and disappears with the array.
        input_dim: number of rows of a table that has all of them; 0: unknown.
    """
    found: list[Array] = []
    with tempfile.TemporaryFile(dir=folder) as file:
        count, rows = 0, np.zeros((0, 0), np.float32)
        for ids, piece in pieces:
            rows = _mapped(file, folder, piece.dtype, max(input_dim, count + len(ids)), piece.shape[1])
            if input_dim:
                rows[ids] = piece
            else:
                rows[count:] = piece
            found.append(ids)
            count += len(ids)
        if input_dim:
            return np.arange(input_dim, dtype=np.int64), rows
        ids = np.concatenate(found) if found else np.zeros(0, np.int64)
        if (ids[1:] > ids[:-1]).all():
            return ids, rows
        order = np.argsort(ids)
        with tempfile.TemporaryFile(dir=folder) as target:
            ordered = _mapped(target, folder, rows.dtype, *rows.shape)
            for start in range(0, count, _CHUNK_ROWS):
                ordered[start : start + _CHUNK_ROWS] = rows[order[start : start + _CHUNK_ROWS]]
            return ids[order], ordered


def _mapped(file: IO[bytes], folder: str, dtype: np.dtype[Any], rows: int, dim: int) -> Array:
    """The file, extended as needed, as an array that outlives it."""
    if not rows * dim:
        return np.zeros((rows, dim), dtype)
    begun, size = os.fstat(file.fileno()).st_size, rows * dim * dtype.itemsize
    if size > begun:
        try:
            # Otherwise a full disk would kill the process when it writes.
            os.posix_fallocate(file.fileno(), begun, size - begun)
        except OSError as error:
            raise OSError(error.errno, error.strerror, folder) from None
    return np.memmap(file, dtype, "r+", shape=(rows, dim))
