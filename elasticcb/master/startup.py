"""How a job starts: from scratch, from an earlier master's journal, or with processes that a killed master left
running.

Processes start; the model is built; the servers get its weights; `on_train_begin` runs on the master and may restore
weights and the epoch; the queue is created, and workers get tasks.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from elasticcb.callbacks.periodic_export import PeriodicExport
from elasticcb.callbacks.saved_state import CallbackStates, keep_files
from elasticcb.callbacks.shared_attributes import left_on_workers
from elasticcb.checkpoint.remote import fetch, newest_of_run
from elasticcb.checkpoint.versions import find_undamaged
from elasticcb.checkpoint.warm_start import WarmStart, warm_start
from elasticcb.data.unbounded import UnboundedSource
from elasticcb.errors import (
    CallbackError,
    CallbackWarning,
    CheckpointError,
    JobFailedError,
    StreamError,
    UsageError,
)
from elasticcb.master.autoscaler import Autoscaler, Sight
from elasticcb.master.callback_driver import EpochHooks, MasterHooks
from elasticcb.master.checkpoint_writer import CheckpointWriter, own_checkpoints, warn_of_later_versions
from elasticcb.master.evaluation import EvaluationRounds
from elasticcb.master.exports import PeriodicExports
from elasticcb.master.job_context import JobContext, ModelOrigin, Takeover, TrainedModel
from elasticcb.master.job_driver import JobDriver
from elasticcb.master.job_machine import JobMachine
from elasticcb.master.journal import Memory
from elasticcb.master.keras_host import ModelHost
from elasticcb.master.master_server import MasterServer
from elasticcb.master.members import PlaceState, Role, ServedCluster
from elasticcb.master.observation import figures_of, records_to_train
from elasticcb.master.ps_admin import PSControl
from elasticcb.master.servers import Servers
from elasticcb.master.stream_watch import StreamWatch
from elasticcb.master.task import QueueSettings
from elasticcb.master.task_queue import TaskQueue
from elasticcb.process.forwarded_logs import shown
from elasticcb.process.wording import how_many
from elasticcb.settings import INITIAL_FOLDER, Command, JobSettings, Mode, WorkerRange, written
from elasticcb.settings.choices import LostOffsets, seconds_of
from elasticcb.settings.names import SETTINGS
from elasticcb.sharding.partition import ServerPlace
from elasticcb.storage.folder_lock import FolderLock
from elasticcb.storage.remote_files import is_url
from elasticcb.storage.store_lock import StoreLock

logger = logging.getLogger(__name__)

_LOOK_AGAIN_SECONDS = 1.0  # while a stream does not answer


def open_job(context: JobContext) -> JobDriver:
    """Opens the job; workers get tasks. Raises the same errors as `Job.run`."""
    lock = own_checkpoints(context)
    went_on = _start_processes(context)
    context.report.show()
    origin = _build_model(context)
    _wait_for_servers(context)
    served = _connect(context, origin)
    epochs, initial_epoch = _call_first_hooks(context, served)
    queue = resumed_queue(context, served.host) or _new_queue(context, served.host, initial_epoch)
    if served.servers.lack_updates:
        _repeat_lost(context, queue)
    _lay_out(context, served, queue, initial_epoch)
    course = _make_course(context, served, queue, epochs, lock)
    if context.memory.over:
        course.finish()
    else:
        course.begin(initial_epoch)
        served.host.shared_callbacks.prepare()
    _let_workers_begin(context, served, course)
    if context.takeover is not None:
        seconds = time.monotonic() - context.takeover.since
        context.report.message(f"The master recovered in {seconds:.1f} s; {went_on} kept running.")
    return course


def _repeat_lost(context: JobContext, queue: TaskQueue) -> None:
    """What the servers of the resumed job lack is trained again. Raises `JobFailedError` if training is over, and some
    of it could not be saved."""
    records = how_many(queue.accounting.records_given_up, "record")
    if queue.updates_lost():
        with context.server.state() as state:
            lost = state.totals.updates_lost
        if lost:
            context.server.print("The records that the servers had not saved are trained again.")
    elif queue.accounting.records_given_up:
        if queue.training_done:
            raise JobFailedError(
                f"Training was over, but the servers could not write to {context.settings.directory}, and ended: what "
                f"{records} had trained is lost. Start a new job, if possible from a checkpoint."
            )
        text = f"The servers could not save what {records} had trained; it is lost, and not trained again."
        context.server.print(text)


def _start_processes(context: JobContext) -> str:
    """Starts the processes, or takes over those of a killed master; returns the number taken over, as text."""
    server, memory = context.server, context.memory
    if context.takeover is not None:
        return _take_over(context, context.takeover)
    with server.state() as state:
        state.roster.next_id = max(memory.next_id, state.roster.next_id)
        if memory.workers:
            state.roster.resize(Role.WORKER, memory.workers)
        if memory.map_version:
            state.roster.resize(Role.PS, len(memory.servers))
    server.start_processes()
    if context.make_program is None:
        begin_job(context)
    return ""


def begin_job(context: JobContext, program: bytes = b"") -> None:
    """Begins the job; if it is resumed, its status shows where it was until it continues."""
    memory = context.memory
    context.server.begin_job(context.settings, program, started=context.started)
    if memory.queue is not None:
        with context.server.state() as state:
            state.version = state.start_version = memory.version
            state.set_status(**figures_of(TaskQueue.from_dict(memory.queue), state, time.monotonic()))


def _take_over(context: JobContext, takeover: Takeover) -> str:
    """Lets workers continue their tasks at once; the model for hooks and rounds is built in the meantime."""
    assert context.journal is not None
    server, queue = context.server, _queue_of(context.memory, time.monotonic())
    server.begin_job(context.settings, started=context.started)
    server.take_over(context.journal, queue, takeover.running)
    with server.state() as state:
        counts = [(len(state.roster.up(role)), role.value) for role in Role]
    context.master.start()
    logger.info("Workers and servers can continue")
    return " and ".join(how_many(count, name) for count, name in counts)


def _build_model(context: JobContext) -> ModelOrigin:
    """The master's Keras side, and where its weights come from."""
    settings = context.settings.checkpoint
    start = found(context, settings.directory_for_init)  # before the model is built, which needs its tables
    initial = replace(settings, directory_for_init=start.folder)
    with contextlib.nullcontext() if context.make_program else shown("The model", context.server.warn, False):
        host = _host(context, replace(context.settings, checkpoint=initial))
    if context.make_program is None:  # else readers bring their own indexes
        with context.server.state() as state:
            state.find_index = host.find_index
    logger.info("The model is built")
    context.report.show_model(host.variables)
    if context.make_program is not None:
        begin_job(context, context.make_program())
    begin_warm = functools.cache(functools.partial(warm_start_of, context, host))
    if not context.resumes:
        begin_warm()  # report errors before servers get a model
    if not context.resumes or not settings.directory:
        return ModelOrigin(host, start.place, warm_start=begin_warm)
    written = functools.partial(newest_of_run, settings.directory, context.memory.run)
    return ModelOrigin(host, start.place, written, begin_warm)


def _host(context: JobContext, settings: JobSettings) -> Any:
    """The job of a killed master continues: it waits for a stream that does not answer now."""
    while True:
        try:
            return context.make_host(settings)
        except StreamError as error:
            if context.takeover is None:
                raise
            context.server.warn(CallbackWarning("the stream does not answer", f"{error} The job waits for it.", 0))
            time.sleep(_LOOK_AGAIN_SECONDS)


def _wait_for_servers(context: JobContext) -> None:
    while True:
        with context.server.state() as state:
            context.server.tend()
            if state.roster.complete(Role.PS, state.number):
                return
            context.server.wait_a_tick()
        context.server.set_status(phase="waiting for parameter servers")
        context.report.show()


def _connect(context: JobContext, origin: ModelOrigin) -> TrainedModel:
    """The servers hold the model."""
    memory, host, server = context.memory, origin.host, context.server
    servers = Servers(
        server,
        context.master.watchdog.doubt,
        host.variables,
        host.may_split,
        host.described,
        origin.source,
        server.print,
        run=context.run,
        term=1 if context.journal is None else context.journal.term,
        places=() if context.takeover is None else [ServerPlace(*place) for place in memory.servers],
        map_version=memory.map_version,
        copy=None if context.journal is None or context.journal.copy is None else context.journal.copy.of_recovery(),
    )
    context.until_end.callback(servers.close)
    if context.resumes:
        _restore(context, servers, host)
    else:
        _initialize(context, servers.control, origin)
    hooks = MasterHooks(host, servers.control, server)
    hooks.adopt_learning_rate(servers.control.client.learning_rate)
    if memory.learning_rate is not None:
        hooks.set_learning_rate(memory.learning_rate)
    servers.learning_rate = lambda: hooks.base_learning_rate
    host.callbacks.warn = server.warn
    for warning in left_on_workers(host.callbacks.callbacks, context.settings):
        server.warn(warning)
    return TrainedModel(host, origin, servers, hooks)


def _initialize(context: JobContext, ps: PSControl, origin: ModelOrigin) -> None:
    """The servers of a new job get fresh weights, or a checkpoint."""
    host, source = origin.host, origin.source()
    ps.initialize(source)
    warn_of_later_versions(context, ps.client.version)
    if source.checkpoint:
        warning = host.check_restored(ps.client.pull_with_optimizers(), source.checkpoint)
        if warning:
            context.server.warn(warning)
        context.report.message(f"The model starts from {source.checkpoint}, version {ps.client.version}.")
    if source.checkpoint or origin.warm_start() is not None:
        host.assign(*ps.client.weights())


def _restore(context: JobContext, servers: Servers, host: Any) -> None:
    """The servers of a resumed job hold the model still, or get it from their recovery files."""
    memory, ps = context.memory, servers.control
    servers.learning_rate = lambda: memory.learning_rate
    if context.takeover is None:
        servers.adopt(memory.version)
        host.assign(*ps.client.weights())
        return
    servers.restore_lost()
    ps.client.pull()
    ps.release_held()
    if memory.evaluation_round:  # it restarts, if it was running
        ps.release_snapshot(memory.evaluation_round)


def _call_first_hooks(context: JobContext, served: TrainedModel) -> tuple[EpochHooks, int]:
    """Calls `on_train_begin`, which may restore weights, optimizer and epoch, and the first epoch hook."""
    memory, host, training = context.memory, served.host, context.settings.training
    states = CallbackStates(host.callbacks.callbacks, context.report.message)
    if context.resumes:
        keep_files(host.callbacks.callbacks)
        if not memory.over:  # training has already continued from what the hook would set
            served.hooks.prepare("on_train_begin", {})
        initial_epoch = memory.ended_epochs
        states.begin()
        states.restore(memory.callbacks, context.arrays.load())
    else:
        if context.settings.command is Command.TRAIN:
            served.hooks.call("on_train_begin", {})
        initial_epoch = getattr(host.model, "_initial_epoch", None) or training.initial_epoch
        states.begin()
    epochs = EpochHooks(context.server, served.hooks, states, context.arrays, training.num_epochs, memory.logs)
    return epochs, initial_epoch


def _new_queue(context: JobContext, host: Any, initial_epoch: int) -> TaskQueue:
    training, cluster, stream = context.settings.training, context.settings.cluster, context.settings.stream
    _check_stream(context.settings, host.stream)
    batches = max(
        (sum(-(-count // training.minibatch_size) for _, count in found) for found in host.sources.values()), default=0
    )
    workers = max(cluster.num_workers, cluster.autoscale.most)
    if host.stream is not None:  # a task has what is there, so that large ones make nobody wait
        batches = stream.records_per_epoch // training.minibatch_size or sys.maxsize
    per_task = training.batches_per_task(None if host.open_ended and not host.stream else batches, workers)
    return TaskQueue(
        QueueSettings(
            records_per_task=training.minibatch_size * per_task,
            minibatch_size=training.minibatch_size,
            num_epochs=training.num_epochs,
            max_batches=training.max_step,
            shuffle_seed=training.shuffle_seed,
            max_retries=training.max_task_retries,
            lease_seconds=cluster.lease_seconds,
            hold_epochs=any(map(host.callbacks.wants, ("on_epoch_begin", "on_epoch_end"))),
            initial_epoch=initial_epoch,
            open_ended=host.open_ended,
            hold_predictions=host.holds_predictions,
            repeats_lost=host.repeatable and context.settings.repeats_lost,
            grows=host.stream is not None,
            records_per_epoch=stream.records_per_epoch,
            event_time=seconds_of(stream.epoch_event_time),
            in_order=host.stream is not None and host.stream.in_order,
            most=None if host.stream is None else host.stream.most,
            skips_lost=stream.lost_offsets is LostOffsets.SKIP,
        ),
        training=host.sources.get(Mode.TRAINING, ()),
        prediction=host.sources.get(Mode.PREDICTION, ()),
    )


def _check_stream(settings: JobSettings, source: UnboundedSource | None) -> None:
    """Raises `UsageError` when the settings of epochs don't fit the data."""
    stream = settings.stream
    ends = stream.ends_of_epochs
    if source is None and ends:
        given = SETTINGS[ends[0]].written(settings.in_program, getattr(stream, ends[0]))
        raise UsageError(
            f"{given} is for data that grows, but the training data has a known number of records. Remove it."
        )
    if source is not None and settings.training.num_epochs > 1 and not ends:
        given = SETTINGS["num_epochs"].written(settings.in_program, settings.training.num_epochs)
        add = "steps_per_epoch" if settings.in_program else written("{records_per_epoch} or {epoch_every}", False)
        raise UsageError(f"{given}: a stream has no end, so an epoch needs one. Add {add}.")
    if stream.epoch_event_time and len(ends) > 1:
        both = written(f"{{{ends[0]}}} and {{epoch_event_time}}", settings.in_program)
        raise UsageError(f"{both} both end epochs. Remove one of them.")
    if stream.epoch_event_time and source is not None and not source.has_times:
        needs = "{epoch_event_time} needs a source that finds records by their timestamps, such as Kafka."
        raise UsageError(written(f"{needs} Use {{epoch_every}}, which ends epochs by the clock.", False))


def resumed_queue(context: JobContext, host: Any) -> TaskQueue | None:
    """The queue of an earlier master. Raises `JobFailedError` when the data has changed."""
    memory = context.memory
    if memory.queue is None:
        return None
    stopped = memory.queue["stop_reason"] is not None
    if not host.repeatable and not memory.over and not stopped:
        memory.states.clear()
        return None  # the interrupted epoch restarts: its remaining batches can't be told from the finished ones
    saved = [(name, count) for name, count in memory.queue["training"]]
    found = list(host.sources.get(Mode.TRAINING, ()))
    if saved != found:
        raise JobFailedError(
            f"The training data has changed: {_records_of(saved)} when the job started, {_records_of(found)} now. "
            "Restore the original data, or start a new job from the newest checkpoint."
        )
    if context.takeover is not None:
        with context.server.state() as state:
            return state.queue
    queue = _queue_of(memory)
    if not host.repeatable:
        queue.drop_training()
        queue.repeat_milestones(memory.ended_epochs)
    return queue


def _queue_of(memory: Memory, now: float | None = None) -> TaskQueue:
    """The queue where the journal ends; milestones come again that were not carried out. `now`: workers keep their
    leases."""
    assert memory.queue is not None
    queue = TaskQueue.from_dict(memory.queue, now)
    queue.repeat_milestones(memory.ended_epochs)
    if memory.epoch_begun:
        queue.release_epoch(memory.ended_epochs - 1)
    return queue


def _lay_out(context: JobContext, served: TrainedModel, queue: TaskQueue, initial_epoch: int) -> None:
    """Sets up the queue, the rounds and the journal."""
    host, memory, training, version = served.host, context.memory, context.settings.training, served.ps.client.version
    logger.info("The servers hold the model, version %d", version)
    with context.server.change() as state:
        state.version = state.start_version = max(state.version, version)
        state.evaluated_before = queue.accounting.records_evaluated
        if memory.metrics:
            state.evaluated_before = memory.evaluated_before
            state.set_status(metrics=memory.metrics)
        state.epoch_states.merging = host.metrics.merging_units
        state.rounds = EvaluationRounds(
            evaluation_steps=training.evaluation_steps,
            start_version=version if memory.evaluated is None else memory.evaluated,
            merge=host.metrics.merge_states if host.merges_by_itself else None,
            first_id=memory.evaluation_round + 1,
        )
        state.queue, state.shared_callbacks = queue, host.shared_callbacks
        if context.settings.command is Command.PREDICT and context.settings.output:
            state.prediction_output = host.prediction_output(context.settings)
        if context.takeover is None:
            state.resume(memory)
        _begin_journal(context, state, served, initial_epoch)


def _begin_journal(context: JobContext, state: JobMachine, served: TrainedModel, initial_epoch: int) -> None:
    if context.journal is None:
        return
    if not context.resumes:
        rate = served.hooks.base_learning_rate
        state.persist(run=served.ps.run, ended_epochs=initial_epoch, learning_rate=rate)
    began = time.time() - (time.monotonic() - context.started)
    state.persist(began=began, first_step=state.status.seconds_to_first_step)
    context.server.keep(context.journal)


def _make_course(
    context: JobContext, served: TrainedModel, queue: TaskQueue, epochs: EpochHooks, lock: FolderLock | StoreLock | None
) -> JobDriver:
    memory, say, server = context.memory, context.report.message, context.server
    checkpoints = CheckpointWriter(context.settings, served.ps, server, say, context.resumes, lock)
    limits = context.settings.cluster.autoscale
    autoscaling: Callable[[], None] = lambda: None  # noqa: E731
    if limits.most and memory.autoscale and not memory.over:
        autoscaling = Autoscaling(server, limits, records_to_train(context.settings, queue), say).turn
    exports = [] if memory.over else [*_exports_of(context, served)]
    return JobDriver(context, served, queue, epochs, checkpoints, autoscaling, exports)


def _exports_of(context: JobContext, served: TrainedModel) -> Iterator[PeriodicExports]:
    """Raises before workers get tasks if the job can't export."""
    found = [callback for callback in served.host.callbacks.callbacks if isinstance(callback, PeriodicExport)]
    if len(found) > 1:
        raise CallbackError(
            f"The job has {len(found)} PeriodicExports, to {', '.join(each.folder for each in found)}. Expected one. "
            "Copy the exports to other folders in its on_export_end."
        )
    for callback in found if context.settings.command is Command.TRAIN else ():
        exports = PeriodicExports(callback, served.host, served.ps, context.server, context.settings, context.resumes)
        context.until_end.callback(exports.close)
        yield exports


def _let_workers_begin(context: JobContext, served: TrainedModel, course: JobDriver) -> None:
    """The last step, because workers get tasks from here on: a callback may have set the learning rate."""
    host, ps = served.host, served.ps
    with context.server.change() as state:
        state.epoch_version = state.version
        state.cluster = ServedCluster(
            served.servers.places,
            host.variables,
            ps.servers.split,
            batch_events=course.follows_batches,
            predictions=host.collects_predictions,
            replayed_metrics=sorted(host.metrics.replayed),
            progressive=host.progressive,
            map_version=ps.servers.shard_map.version,
        )
        state.persist(servers=served.servers.places, merging_units=sorted(state.epoch_states.merging))
    for exports in course.exports:
        exports.begin()
    if host.stream is not None:
        context.until_end.callback(StreamWatch(host.stream, context.server).close)


def _records_of(sources: Sequence[tuple[str, int]]) -> str:
    return f"{how_many(sum(count for _, count in sources), 'record')} in {how_many(len(sources), 'source')}"


class Autoscaling:
    """Changes the number of workers of a training job."""

    def __init__(self, server: MasterServer, limits: WorkerRange, records: int, say: Callable[[str], None]) -> None:
        self._master, self._records, self._say = server, records, say
        with server.state() as state:
            state.autoscales = True
            workers = min(max(state.roster.size(Role.WORKER), limits.least), limits.most)
        self._scaler = Autoscaler(limits.least, limits.most, workers)

    def turn(self) -> None:
        """Observes the job, several times a second, and changes the number of workers when due."""
        with self._master.state() as state:
            if not state.autoscales or state.queue is None or state.over:
                return
            before = state.roster.size(Role.WORKER)
            if any(state.roster.state(Role.WORKER, place) is PlaceState.GIVEN_UP for place in range(before)):
                state.end_autoscaling("a worker was lost and its restarts are used up")
                return
            scaling = self._scaler.observe(time.monotonic(), self._sight(state))
            workers = self._scaler.workers if scaling is None else scaling.workers
            if workers != before:
                self._master.resize(Role.WORKER, workers)
        if scaling is not None:
            self._say(f"Autoscale: {scaling.reason}.")

    def _sight(self, state: JobMachine) -> Sight:
        queue = state.queue
        assert queue is not None
        trained = sum(queue.accounting.records_trained.values())
        left = self._records - trained if queue.stream is None else queue.stream.waiting
        return Sight(trained, left, _is_busy(state))


def _is_busy(state: JobMachine) -> bool:
    workers = state.roster.up(Role.WORKER)
    return (
        len(workers) == state.roster.size(Role.WORKER)
        and state.rounds.running is None
        and not state.lost_ps
        and all(state.speeds.paces.knows(worker.id) for worker in workers)
        and not state.idle_workers()
    )


class Found(NamedTuple):
    """The version of a checkpoint to start from.

    Attributes:
        folder: on this disk; "": none was given.
        place: where servers read it: the folder, or its URL.
    """

    folder: str
    place: str


def found(context: JobContext, given: str) -> Found:
    """The newest undamaged version in a folder or below a URL; "": none."""
    if not given:
        return Found("", "")
    if not is_url(given):
        folder = str(_told_of_skipped(context, find_undamaged(given)))
        return Found(folder, folder)
    copies = Path(context.settings.directory, INITIAL_FOLDER)
    copy: Path | None = None
    if context.resumes:  # the previous master has downloaded it
        with contextlib.suppress(CheckpointError):
            copy = _told_of_skipped(context, find_undamaged(copies))
    given = given.rstrip("/")
    copy = copy or _told_of_skipped(context, fetch(given, copies))
    return Found(str(copy), given if given.endswith(f"/{copy.name}") else f"{given}/{copy.name}")


def _told_of_skipped(context: JobContext, found: tuple[Path, Sequence[str]]) -> Path:
    folder, skipped = found
    for fault in skipped:
        context.report.message(fault)
    return folder


def warm_start_of(context: JobContext, host: ModelHost) -> WarmStart | None:
    """Initial weights from another model's checkpoint. Raises `CheckpointError` when it does not fit."""
    settings = context.settings.checkpoint
    if not settings.init_from:
        return None
    if host.version:  # a second `fit` keeps the weights of the first
        context.report.message(
            f"{settings.init_from} is not used: the model has already been trained for "
            f"{how_many(host.version, 'step')}."
        )
        return None
    start = found(context, settings.init_from)
    try:
        loaded = warm_start(Path(start.folder), host.variables, settings.init_map)
    except CheckpointError as error:
        raise CheckpointError(str(error).replace(start.folder, start.place)) from error
    context.report.message(loaded.summary())
    return loaded
