"""Runs one `fit`, `evaluate` or `predict` as a job, also for models that override these methods."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import logging
import shutil
import tempfile
import threading
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import keras

from elasticcb.api.arguments import check_keywords
from elasticcb.api.data import MethodCall
from elasticcb.api.job_folder import KeptFit
from elasticcb.api.processes import ClusterProcesses
from elasticcb.callbacks.placement import Place, hooks_at, overridden_hooks, stock
from elasticcb.cluster.registry import backend_of
from elasticcb.compute.registry import runs_eagerly
from elasticcb.data.batch_sources.records import StreamSource
from elasticcb.data.batches import BatchSource
from elasticcb.errors import (
    CallbackError,
    ClusterLostError,
    ConnectionLostError,
    ElasticCBError,
    JobInterrupted,
    LastCheckpointError,
    ModelFileError,
    UsageError,
    describe,
    is_users_own,
)
from elasticcb.layers.table_layers import rows_in
from elasticcb.master.job import Job
from elasticcb.master.keras_host import ModelHost
from elasticcb.master.master import Master
from elasticcb.master.snapshot import EpochEnd, JobSnapshot
from elasticcb.model.metric_messages import Outputs
from elasticcb.model.program import CallerSpec, Program
from elasticcb.optimizers.step_logs import is_overridden
from elasticcb.settings import CheckpointSettings, Command, JobSettings, Mode
from elasticcb.settings.job import StreamSettings
from elasticcb.settings.training import is_due

Method = TypeVar("Method", bound=Callable[..., Any])


def with_own_method(method: Method) -> Method:
    """Wraps a method of `Cluster`, of the same name as one of `keras.Model`: for a model that overrides it, the model's
    own method is called, in which `super()` leads to the cluster."""
    name = method.__name__
    keywords = list(inspect.signature(method).parameters)[1:]

    def checked(cluster: Any, *args: Any, **kwargs: Any) -> Any:
        check_keywords(f"Cluster.{name}", kwargs, keywords)
        return method(cluster, *args, **kwargs)

    @functools.wraps(method)
    def call(cluster: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(model, keras.Model) or not is_overridden(model, name):
            return checked(cluster, model, *args, **kwargs)
        with _replaced(name, model, functools.partial(checked, cluster)) as calls:
            result = getattr(model, name)(*args, **kwargs)
        if not calls:
            warnings.warn(
                f"{type(model).__name__}.{name} ran in this process, not on the cluster: it does not call "
                f"super().{name}(...).",
                RuntimeWarning,
                stacklevel=2,
            )
        return result

    return cast(Method, call)


_changing = threading.Lock()
_instead: dict[str, dict[int, Callable[..., Any]]] = {}  # by method of `keras.Model`, and id of the model
_originals: dict[str, Any] = {}  # methods of its own, such as a tracker's; None: it is a base class's


@contextlib.contextmanager
def _replaced(name: str, model: keras.Model, instead: Callable[..., Any]) -> Iterator[list[str]]:
    """In the context, `keras.Model`'s method calls `instead` for this model; yields a list with an item per call.
    Several threads may do so, each with models of its own."""
    calls: list[str] = []

    def call(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return instead(model, *args, **kwargs)

    with _changing:
        models = _instead.setdefault(name, {})
        if not models:
            _originals[name] = vars(keras.Model).get(name)
            _lead(name, models)
        before = models.get(id(model))
        models[id(model)] = call
    try:
        yield calls
    finally:
        with _changing:
            if before is None:
                del models[id(model)]
            else:
                models[id(model)] = before
            if not models:
                delattr(keras.Model, name)
                original = _originals.pop(name)
                if original is not None:
                    setattr(keras.Model, name, original)


def _lead(name: str, models: Mapping[int, Callable[..., Any]]) -> None:
    """Lets `keras.Model`'s method call those of `models`."""
    original = getattr(keras.Model, name)

    @functools.wraps(original)
    def call(own: keras.Model, *args: Any, **kwargs: Any) -> Any:
        found = models.get(id(own))
        return original(own, *args, **kwargs) if found is None else found(*args, **kwargs)

    setattr(keras.Model, name, call)


def validated_here(
    model: keras.Model,
    callbacks: Sequence[keras.callbacks.Callback],
    frequency: int | Sequence[int],
    validation_data: Any,
    batch_size: int | None,
    steps: int | None,
) -> keras.callbacks.Callback:
    """For a model that overrides `evaluate`: a callback that calls it like `fit`, and adds the results to the logs."""
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(validation_data)
    if inspect.isgenerator(x):
        raise UsageError(
            f"{type(model).__name__} overrides evaluate, so this process validates, once per epoch, and "
            "validation_data is a generator, which can be read only once. Pass a keras.utils.PyDataset, a "
            "tf.data.Dataset or arrays."
        )

    def validate(epoch: int, logs: dict[str, Any]) -> None:
        if not is_due(frequency, epoch):
            return
        found = model.evaluate(
            x=x,
            y=y,
            sample_weight=sample_weight,
            batch_size=batch_size,
            steps=steps,
            callbacks=keras.callbacks.CallbackList(list(callbacks), model=model),
            return_dict=True,
        )
        both = {**logs, **{f"val_{name}": value for name, value in found.items()}}
        logs.clear()
        logs.update(sorted(both.items()))  # Keras's order

    return keras.callbacks.LambdaCallback(on_epoch_end=validate)


logger = logging.getLogger(__name__)

# Settings of jobs whose tasks are ranges of batches.
_OF_BATCHES: dict[str, Any] = {
    "minibatch_size": 1,
    "shuffle_seed": None,  # sources shuffle themselves
    "max_task_retries": 0,  # errors of the user's code end the call, as in Keras
}


class KerasJobs:
    """Runs calls of Keras's methods as jobs of a cluster, one after another.

    Args:
        rehearses: whether workers compare their results for the first batch with the caller's.
    """

    def __init__(self, settings: JobSettings, processes: ClusterProcesses, rehearses: bool) -> None:
        self._settings = settings
        self._rehearses = rehearses
        self._processes = processes

    @contextlib.contextmanager
    def call(self, name: str, fit: KeptFit | None = None) -> Iterator[MethodCall]:
        """A separate folder for the data of one call, with running processes.

        Args:
            fit: its stored state, if it can be resumed when the program runs again.
        """
        self._start(fit)
        if fit is None:
            # With a unique name: several clusters may use a directory, and a killed one may have left files.
            folder = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=self._processes.directory))
        else:
            folder = fit.folder / "data"
            shutil.rmtree(folder, ignore_errors=True)  # of a killed run
            folder.mkdir()
        seed = None if fit is None else fit.seed
        try:
            with contextlib.closing(MethodCall(name, folder, self._processes.data_service, seed, fit)) as call:
                yield call
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _start(self, fit: KeptFit | None) -> None:
        if fit is not None and fit.has_begun:
            logger.warning("%s", fit.story)
            if not fit.has_ended:
                with self._processes.start().server.state() as state:
                    is_used = state.roster.next_id > 1
                if is_used:
                    # Servers identify pushes of the previous run by worker ids, which new workers may reuse.
                    self._processes.stop()
        self._processes.start()

    def run(
        self,
        command: Command,
        call: MethodCall,
        model: keras.Model,
        sources: dict[str, BatchSource],
        callbacks: list[keras.callbacks.Callback],
        params: dict[str, Any],
        **training: Any,
    ) -> tuple[JobSnapshot, dict[int, list[Outputs]]]:
        """Runs a job; returns its summary, and the predictions by batch, keyed by the first batch of each task.

        Args:
            params: additional `callback.params`.
            training: settings of this call only.

        Raises the error for the user; the processes are ended in that case.
        """
        master = self._processes.start()
        folder = call.folder if call.fit is None else call.fit.folder
        data, stream = sources.get(Mode.TRAINING), StreamSettings()
        steps = sources[Mode.of(command)].num_batches
        if steps is not None:
            params = {"steps": steps, **params}
        of_ranges = _OF_BATCHES
        if isinstance(data, StreamSource):
            of_ranges = {**_OF_BATCHES, "minibatch_size": data.batch_size}
            stream = StreamSettings(records_per_epoch=(data.steps or 0) * data.batch_size)
        settings = dataclasses.replace(
            self._settings,
            command=command,
            stream=stream,
            name=folder.name,
            directory=str(folder),
            training=dataclasses.replace(self._settings.training, **of_ranges, **training),
            checkpoint=self._settings.checkpoint if command is Command.TRAIN else CheckpointSettings(),
            callback_params=params,
        )
        copied = contextlib.nullcontext() if call.fit is None else call.fit.copied(master)
        try:
            with copied:
                summary = self._run(settings, call, master, model, sources, callbacks)
            with master.server.state() as state:
                return summary, state.take_predictions()
        except JobInterrupted as error:
            self._processes.note(str(error))
            self._processes.stop(error)
            raise KeyboardInterrupt from None
        except BaseException as error:
            self._processes.note(f"{settings.command.value} failed: {describe(error)}")
            self._processes.stop(error)
            raise as_the_user_expects(error, self._processes.where_logs_are) from None

    def _run(
        self,
        settings: JobSettings,
        call: MethodCall,
        master: Master,
        model: keras.Model,
        sources: dict[str, BatchSource],
        callbacks: list[keras.callbacks.Callback],
    ) -> JobSnapshot:
        elsewhere = backend_of(settings.cluster.kind).separate
        of_workers = [callback for callback in callbacks if _runs_on_workers(callback)]
        has_hooks = runs_eagerly(model) or any(map(_has_own_hooks, callbacks))
        program = Program(model, sources, of_workers, has_hooks=has_hooks, elsewhere=elsewhere)
        spec = CallerSpec(program, callbacks)

        def serialized() -> bytes:
            with hosts[0].metrics.suspended():
                whole = dataclasses.replace(program, of_servers=rows_in(model), rehearsal=hosts[0].rehearsal)
                data, variables, objects = whole.dumps(call.folder)
                hosts[0].shared_callbacks.share(variables, objects, master.server.warn)
                return data

        hosts: list[ModelHost] = []
        rehearses = self._rehearses

        def make_host(settings: JobSettings) -> ModelHost:
            hosts.append(ModelHost(settings, spec, rehearses))
            if call.fit is not None:
                call.fit.begin(_described(settings, sources, hosts[0]), call.seed)
            return hosts[0]

        journal = None if call.fit is None else call.fit.journal
        job = Job(
            settings, master, _Display(self._processes.note), make_host, serialized, journal, "run the program again"
        )

        def keep_results() -> None:
            state = job.model_state() if settings.command is Command.TRAIN else None
            if state is not None:
                hosts[0].set_state(state)

        try:
            summary = job.run()
            keep_results()
            return summary
        except LastCheckpointError as error:
            keep_results()
            warnings.warn(str(error), RuntimeWarning, stacklevel=6)  # where `fit` was called
            return cast(JobSnapshot, error.summary)
        except (ClusterLostError, ConnectionLostError):
            raise
        except BaseException:  # a hook's, or an interrupt
            with contextlib.suppress(ElasticCBError):
                keep_results()  # as Keras leaves them
            raise
        finally:
            job.close()
            for host in hosts:
                host.release()


class _Display:
    """Shows messages of a job besides Keras's progress bar, and writes them to the master's log.

    Args:
        note: writes a line to the log.
    """

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note

    def update(self, status: JobSnapshot) -> None:
        """Keras's progress bar shows it."""

    def message(self, text: str) -> None:
        logger.info("%s", text)
        self._note(text)

    def evaluated(self, text: str, of_epoch: bool) -> None:
        self.message(text)

    def epoch_ended(self, end: EpochEnd) -> None:
        """Keras's progress bar shows it."""
        self._note(end.text)


def _described(settings: JobSettings, sources: Mapping[str, BatchSource], host: ModelHost) -> dict[str, Any]:
    """Inputs that must not change when a fit is resumed, by descriptive name."""
    training, validation = sources[Mode.TRAINING], sources.get(Mode.EVALUATION)
    return {
        "epochs": settings.training.num_epochs,
        "initial epoch": settings.training.initial_epoch,
        "parameter servers (num_ps)": settings.cluster.num_ps,
        "records to train on": training.num_records,
        "batches in an epoch": training.num_batches,
        "batches to validate on": None if validation is None else validation.num_batches,
        "optimizers": [type(optimizer).__name__ for optimizer in host.optimizers],
        "weights of the model": [f"{spec.dtype}{list(spec.shape)}" for spec in host.variables],
    }


def _has_own_hooks(callback: keras.callbacks.Callback) -> bool:
    return stock(callback) is None and bool(overridden_hooks(callback).keys() - {"on_train_end"})


def _runs_on_workers(callback: keras.callbacks.Callback) -> bool:
    return bool(hooks_at(callback, Place.WORKER, overridden_hooks(callback).keys(), in_program=True))


def as_the_user_expects(error: BaseException, hint: str) -> BaseException:
    """The exception to raise for `error`, without a cause.

    Args:
        hint: where to find details, for errors other than the user's own exception.
    """
    cause: BaseException | None = error
    while isinstance(cause, (CallbackError, ModelFileError)):
        cause = cause.__cause__
    if cause is not None and not isinstance(cause, ElasticCBError):
        return cause if cause is error else cause.with_traceback(_users_part(cause.__traceback__))
    if not isinstance(error, ElasticCBError):
        return error
    shown = "" if isinstance(error, UsageError) else hint  # its message is all there is
    parts = [str(error), error.user_traceback.rstrip(), shown]
    return type(error)("\n\n".join(filter(None, parts)), error.user_traceback)


def _users_part(trace: types.TracebackType | None) -> types.TracebackType | None:
    """The frames of the user's code if there are any, unless Keras is configured to show all frames."""
    if not keras.config.is_traceback_filtering_enabled():
        return trace
    own: list[types.TracebackType] = []
    frame = trace
    while frame is not None:
        if is_users_own(frame.tb_frame.f_code.co_filename):
            own.append(frame)
        frame = frame.tb_next
    shown: types.TracebackType | None = None
    for frame in reversed(own):
        shown = types.TracebackType(shown, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return shown or trace
