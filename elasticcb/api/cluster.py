"""`Cluster`: workers and parameter servers that a Python program uses as Keras's `fit`, `evaluate` and `predict`."""

from __future__ import annotations

import contextlib
import logging
import operator
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import keras

from elasticcb.api import data as data_of
from elasticcb.api import exits
from elasticcb.api.failures import as_the_user_expects
from elasticcb.api.functions import Functions
from elasticcb.api.remote import PerWorkerDataset, RemoteValue
from elasticcb.api.results import whole_predictions
from elasticcb.callbacks.placement import Place, hooks_at, overridden_hooks
from elasticcb.cluster.base import ClusterBackend
from elasticcb.data.batches import BatchSource
from elasticcb.errors import ElasticCBError, JobInterrupted, UsageError
from elasticcb.master.job import Job
from elasticcb.master.master import Master
from elasticcb.master.model_host import ModelHost
from elasticcb.program import CallerSpec, Program
from elasticcb.roles import STOP_SECONDS, make_backend
from elasticcb.settings import (
    CheckpointSettings,
    ClusterKind,
    ClusterSettings,
    Command,
    JobSettings,
    TrainingSettings,
)
from elasticcb.status import JobStatus, Summary

logger = logging.getLogger(__name__)

_MOST_BATCHES_PER_TASK = 32
_TASKS_PER_WORKER = 4  # at least, in an epoch, so that the last ones end at the same time


class Cluster:
    """A master in this process, and workers and parameter servers that it starts; use it with `with`.

    The processes are started with the first call, or by `start()`, and do one call after another. A call that
    fails or is interrupted ends them; the next one starts new ones.

    Args:
        num_workers: processes that compute gradients, evaluate and predict.
        num_ps: processes that hold the weights and apply gradients.
        kind: "local": processes of this machine; "inprocess": threads of this process, for debugging; "external":
            started by hand, by the commands that `start` shows; they must see `directory` under the same path.
        directory: for logs, and for arrays on their way to the workers; None makes one that is removed at the end.
        use_async: apply each gradient when it comes; False waits for `grads_to_wait` of them.
        grads_to_wait: gradients per update, in synchronous mode.
        sync_version_tolerance: how many versions old a gradient may be, in synchronous mode.
        get_model_steps: batches between pulls of the weights.
        checkpoint_dir: where checkpoints of servers are written, at the end of `fit`; "": none are.
        checkpoint_steps: model versions between more of them.
        non_finite: "stop": a NaN or an infinity in loss or gradients ends `fit` with an error; "skip": its batch
            is passed over.
        callback_errors: "stop": an error in a callback ends the call; "warn": it is told, and the call goes on.
        max_worker_restarts: workers that may be started in the place of lost ones.
        host: interface to listen on.
        port: of the master; 0 takes any free one.
        log_level: of the processes' logs: "DEBUG", "INFO", "WARNING" or "ERROR".

    Raises:
        UsageError: a number is out of range, or a name is unknown.

    Example:

        with elasticcb.Cluster(num_workers=2) as cluster:
            history = cluster.fit(model, x, y, epochs=3, validation_split=0.1)
            cluster.evaluate(model, x_test, y_test)
    """

    def __init__(
        self,
        num_workers: int = 1,
        num_ps: int = 1,
        *,
        kind: str = "local",
        directory: str | os.PathLike[str] | None = None,
        use_async: bool = True,
        grads_to_wait: int = 1,
        sync_version_tolerance: int = 0,
        get_model_steps: int = 1,
        checkpoint_dir: str | os.PathLike[str] = "",
        checkpoint_steps: int = 0,
        non_finite: str = "stop",
        callback_errors: str = "stop",
        max_worker_restarts: int = 10,
        host: str = "127.0.0.1",
        port: int = 0,
        log_level: str = "INFO",
    ) -> None:
        numbers = {"num_workers": num_workers, "num_ps": num_ps, "grads_to_wait": grads_to_wait}
        for name, value in {**numbers, "get_model_steps": get_model_steps}.items():
            if not isinstance(value, int) or value < 1:
                raise UsageError(f"`{name}` must be a whole number of at least 1. Received: {name}={value!r}")
        settings = TrainingSettings()
        self._training: dict[str, Any] = {
            "use_async": use_async,
            "grads_to_wait": grads_to_wait,
            "sync_version_tolerance": sync_version_tolerance,
            "get_model_steps": get_model_steps,
            "non_finite": _member(type(settings.non_finite), "non_finite", non_finite),
            "callback_errors": _member(type(settings.callback_errors), "callback_errors", callback_errors),
        }
        self._settings = ClusterSettings(
            kind=_member(ClusterKind, "kind", kind),
            num_workers=num_workers,
            num_ps=num_ps,
            host=host,
            port=port,
            max_worker_restarts=max_worker_restarts,
        )
        self._checkpoint = CheckpointSettings(
            directory=os.path.abspath(checkpoint_dir) if checkpoint_dir else "", steps=checkpoint_steps
        )
        self._log_level = log_level
        self._given_directory = directory
        self._directory: Path | None = None
        self._master: Master | None = None
        self._backend: ClusterBackend | None = None
        self._data_service: Any = None
        self._calls = 0
        self._busy = threading.Lock()
        self._closed = False
        self._functions = Functions(self._begin_functions, self._stop_processes)

    # ------------------------------------------------------------ beginning and end

    def __enter__(self) -> Cluster:
        self.start()
        return self

    def __exit__(self, kind: Any, *details: Any) -> None:
        if kind is None:
            self.close()
        else:
            self._close()

    @property
    def directory(self) -> str:
        """Where logs are; "" before the processes are started."""
        return "" if self._directory is None else str(self._directory)

    def start(self) -> None:
        """Starts the processes, which import TensorFlow while this one goes on. Does nothing when they run."""
        self._closed = False
        if self._functions.begun or (self._backend is not None and not self._backend.poll()):
            return
        self._stop_processes()
        if self._directory is None:
            if self._given_directory is None:
                self._directory = Path(tempfile.mkdtemp(prefix="elasticcb-"))
            else:
                self._directory = Path(self._given_directory).absolute()
                self._directory.mkdir(parents=True, exist_ok=True)
        self._backend = make_backend(self._settings.kind, str(self._directory), self._log_level, _say, needs_token=True)
        self._master = Master(self._settings, self._backend, _say, self._backend.token)
        self._master.start()
        self._master.start_processes()
        exits.close_at_exit(self)

    def close(self) -> None:
        """Waits for scheduled functions, and ends the processes; the cluster may be started again, with new ones.

        Raises:
            FunctionError: a scheduled function raised an error, and nobody has seen it.
        """
        try:
            self._functions.end()
        finally:
            self._close()

    def _close(self) -> None:
        self._closed = True
        self._functions.abandon()
        self._stop_processes()
        if self._data_service is not None:
            self._data_service.close()
            self._data_service = None
        if self._given_directory is None and self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None
        exits.forget(self)

    def _stop_processes(self) -> None:
        master, self._master, self._backend = self._master, None, None
        if master is not None:
            master.shut_down(STOP_SECONDS)

    # ------------------------------------------------------------ as keras.Model has them

    def fit(
        self,
        model: keras.Model,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        epochs: int = 1,
        verbose: int | str = "auto",
        callbacks: Any = None,
        validation_split: float = 0.0,
        validation_data: Any = None,
        shuffle: bool | str = True,
        class_weight: Any = None,
        sample_weight: Any = None,
        initial_epoch: int = 0,
        steps_per_epoch: int | None = None,
        validation_steps: int | None = None,
        validation_batch_size: int | None = None,
        validation_freq: int | Sequence[int] = 1,
    ) -> keras.callbacks.History:
        """Trains `model` on the cluster; arguments, defaults and result are those of `keras.Model.fit`.

        Afterwards `model` holds the trained weights, and its optimizer what it has learned: another `fit` goes on
        from there.

        Args:
            x: arrays or structures of them (NumPy, tensors, pandas, ragged, sparse), `tf.data.Dataset`, PyDataset,
                generator, `elasticcb.data` reader or `Records`, or a function (`DatasetFactory`) that makes a
                dataset in each worker.
            steps_per_epoch: batches in an epoch, over all workers; needed for endless data and functions.
            callbacks: each hook runs where docs/callbacks.md says; hooks of batches get a pickled copy, on workers.

        Returns:
            The `History`.

        Raises:
            ValueError, TypeError: as Keras does, for arguments that don't fit each other.
            ElasticCBError: the job failed; the message has the traceback of the user's code.
        """
        model._assert_compile_called("fit")
        epochs, initial_epoch = operator.index(epochs), operator.index(initial_epoch)
        if initial_epoch < 0:
            raise ValueError(f"`initial_epoch` must be at least 0. Received: initial_epoch={initial_epoch}")
        history, listed = _with_keras_callbacks(callbacks, verbose)
        with self._call("fit") as call:
            sources = data_of.training_sources(
                call, x, y, sample_weight, batch_size, shuffle, class_weight, steps_per_epoch,
                validation_split, validation_data, validation_batch_size, validation_steps,
            )  # fmt: skip
            training = TrainingSettings(
                num_epochs=max(epochs, 1),
                initial_epoch=initial_epoch if epochs > initial_epoch else max(epochs, 1),
                validation_freq=_frequency(validation_freq),
                **self._of_batches(sources),
            )
            params = {"verbose": verbose, "batch_size": batch_size or 32, "epochs": epochs}
            self._run(Command.TRAIN, call, model, sources, listed, training, params)
        model.history = history
        return history

    def evaluate(
        self,
        model: keras.Model,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        verbose: int | str = "auto",
        sample_weight: Any = None,
        steps: int | None = None,
        callbacks: Any = None,
        return_dict: bool = False,
    ) -> Any:
        """Loss and metrics of `model` over all records, as `keras.Model.evaluate` gives them.

        Raises:
            ValueError, TypeError, ElasticCBError: as `fit`.
        """
        model._assert_compile_called("evaluate")
        _, listed = _with_keras_callbacks(callbacks, verbose, history=False)
        with self._call("evaluate") as call:
            source = call.adapt(x, y, sample_weight, batch_size=batch_size, steps=steps, purpose="evaluate")
            sources = {"evaluation": source}
            training = TrainingSettings(**self._of_batches(sources))
            params = {"verbose": verbose, "batch_size": batch_size or 32}
            summary = self._run(Command.EVALUATE, call, model, sources, listed, training, params)
        return (
            dict(sorted(summary.metrics.items())) if return_dict else model._flatten_metrics_in_order(summary.metrics)
        )

    def predict(
        self,
        model: keras.Model,
        x: Any,
        batch_size: int | None = None,
        verbose: int | str = "auto",
        steps: int | None = None,
        callbacks: Any = None,
    ) -> Any:
        """The outputs of `model` for all records, in their order, as `keras.Model.predict` gives them.

        Raises:
            ValueError, TypeError, ElasticCBError: as `fit`.
        """
        _, listed = _with_keras_callbacks(callbacks, verbose, history=False)
        with self._call("predict") as call:
            source = call.adapt(x, batch_size=batch_size, steps=steps, purpose="predict")
            sources = {"prediction": source}
            training = TrainingSettings(**self._of_batches(sources))
            params = {"verbose": verbose, "batch_size": batch_size or 32}
            self._run(Command.PREDICT, call, model, sources, listed, training, params)
            assert self._master is not None
            return whole_predictions(model, source, self._master.predictions)

    # ------------------------------------------------------------ as ClusterCoordinator has them

    def schedule(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> RemoteValue:
        """Has `function(*args, **kwargs)` called on some worker; returns at once.

        It is called again elsewhere when its worker is lost: at least once, and exactly one result counts. An error
        that it raises cancels what is scheduled and does not run yet; the next `join` or `schedule` raises it.

        Args:
            function: a Python function, or a `tf.function`.
            args, kwargs: anything that can be pickled; values that were scheduled before, iterators over per-worker
                datasets, and the model that was given to `place`.

        Raises:
            UsageError: the cluster is closed or busy, or something can't be sent to a worker.
            FunctionError: an earlier function raised an error.
            JobFailedError: the cluster could not run an earlier one.
        """
        return self._functions.schedule(function, args, kwargs)

    def join(self) -> None:
        """Waits until all functions are done. The model that was given to `place` then holds what servers hold.

        Raises:
            FunctionError: one of them raised an error, which is the cause.
            JobFailedError: the cluster could not run one.
        """
        self._functions.join()

    def done(self) -> bool:
        """Whether no function waits or runs."""
        return self._functions.done()

    def fetch(self, values: Any) -> Any:
        """A value, or a structure of values, that `schedule` returned: waits for them, as `RemoteValue.fetch`."""
        return self._functions.fetch(values)

    def create_per_worker_dataset(self, dataset_fn: Callable[[], Any]) -> PerWorkerDataset:
        """A dataset that each worker makes by calling `dataset_fn`, when it is first used there.

        `iter(dataset)` gives an iterator for functions: on each worker, it goes through that worker's own dataset. A
        worker that takes the place of a lost one begins anew.
        """
        return self._functions.create_per_worker_dataset(dataset_fn)

    def place(self, model: keras.Model) -> None:
        """From now on, the parameter servers hold the weights of `model` and what its optimizers learn.

        Functions use it as they do here: on the worker, it holds the newest weights when a function begins, and its
        optimizers hand gradients to the servers. Waits for functions that were scheduled before.

        Raises:
            UsageError: the model is not built, or has no optimizer.
        """
        if not self._training["use_async"]:
            raise UsageError(
                "`place` was called on a cluster with use_async=False. Functions hand over gradients at any time, and "
                "never wait for each other: make the Cluster with use_async=True."
            )
        self._functions.place(model)

    def collect(self) -> None:
        """Makes the model that was given to `place` hold what the servers hold now; `join` does so too."""
        self._functions.collect()

    def _begin_functions(self) -> tuple[Master, JobSettings]:
        if self._busy.locked():
            raise UsageError("The cluster is busy with another call; functions have to wait until that is done.")
        if self._closed:
            raise UsageError("The cluster is closed. Use it inside of `with`, or call its start().")
        self.start()
        assert self._directory is not None
        assert self._master is not None
        self._calls += 1
        settings = JobSettings(
            command=Command.CALL,
            name=f"functions-{self._calls}",
            directory=str(self._directory),
            training=TrainingSettings(non_finite=self._training["non_finite"]),
            cluster=self._settings,
            log_level=self._log_level,
        )
        return self._master, settings

    # ------------------------------------------------------------ one job

    @contextlib.contextmanager
    def _call(self, name: str) -> Iterator[data_of.Call]:
        """A folder of its own for the data of one call; one call at a time."""
        if not self._busy.acquire(blocking=False):
            raise UsageError(f"The cluster is busy with another call; `{name}` has to wait until that is done.")
        try:
            self._functions.end()
            self.start()
            assert self._directory is not None
            self._calls += 1
            folder = self._directory / f"{name}-{self._calls}"
            folder.mkdir(parents=True)
            call = data_of.Call(name, folder, self._service)
            try:
                yield call
            finally:
                call.close()
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            self._busy.release()

    def _service(self) -> Any:
        if self._data_service is None:
            from elasticcb.data.batch_sources.service import DataService

            self._data_service = DataService()
        return self._data_service

    def _of_batches(self, sources: dict[str, BatchSource]) -> dict[str, Any]:
        """Settings of a job whose tasks are ranges of batches."""
        known = [source.num_batches for source in sources.values() if source.num_batches is not None]
        tasks = self._settings.num_workers * _TASKS_PER_WORKER
        per_task = min(max(max(known, default=_MOST_BATCHES_PER_TASK * tasks) // tasks, 1), _MOST_BATCHES_PER_TASK)
        return {
            "minibatch_size": 1,
            "num_minibatches_per_task": per_task,
            "shuffle_seed": None,  # sources shuffle by themselves
            "max_task_retries": 0,  # what the user's code raises ends the call, as in Keras
            **self._training,
        }

    def _run(
        self,
        command: Command,
        call: data_of.Call,
        model: keras.Model,
        sources: dict[str, BatchSource],
        callbacks: list[keras.callbacks.Callback],
        training: TrainingSettings,
        params: dict[str, Any],
    ) -> Summary:
        assert self._master is not None
        settings = JobSettings(
            command=command,
            name=call.folder.name,
            directory=str(call.folder),
            training=training,
            checkpoint=self._checkpoint if command is Command.TRAIN else CheckpointSettings(),
            cluster=self._settings,
            callback_params=params,
            log_level=self._log_level,
        )
        program = Program(model, sources, [callback for callback in callbacks if _runs_on_workers(callback)])
        spec = CallerSpec(program, callbacks)
        hosts: list[ModelHost] = []

        def make_host(settings: JobSettings) -> ModelHost:
            hosts.append(ModelHost(settings, spec))
            return hosts[0]

        job = Job(settings, self._master, _Display(), make_host, program.dumps)
        try:
            summary = job.run()
            self._keep_results(job, hosts, command)
        except JobInterrupted:
            with contextlib.suppress(ElasticCBError):
                self._keep_results(job, hosts, command)  # as Keras leaves them
            self._stop_processes()
            raise KeyboardInterrupt from None
        except BaseException as error:
            self._stop_processes()
            raise as_the_user_expects(error, self._where_logs_are) from None
        finally:
            job.close()
            for host in hosts:
                host.release()
        return summary

    @property
    def _where_logs_are(self) -> str:
        if self._settings.kind is not ClusterKind.LOCAL:
            return ""
        if self._given_directory is None:
            return "To keep the logs of the processes, give the Cluster a `directory`."
        return f"The logs of the processes are in {self._directory}/logs."

    @staticmethod
    def _keep_results(job: Job, hosts: list[ModelHost], command: Command) -> None:
        if command is Command.TRAIN and hosts:
            hosts[0].set_state(job.model_state())


class _Display:
    """What a person sees of a job besides Keras's progress bar."""

    def update(self, status: JobStatus) -> None:
        """Keras's progress bar shows it."""

    def message(self, text: str) -> None:
        logger.info("%s", text)


def _say(text: str) -> None:
    logger.warning("%s", text)


def _member(kind: Any, name: str, value: str) -> Any:
    try:
        return kind(value)
    except ValueError:
        known = ", ".join(repr(member.value) for member in kind)
        raise UsageError(f"`{name}` must be one of {known}. Received: {name}={value!r}") from None


def _frequency(validation_freq: Any) -> int | tuple[int, ...]:
    """`validation_freq`, checked as Keras checks it."""
    if isinstance(validation_freq, (list, tuple, set)):
        return tuple(validation_freq)
    if not isinstance(validation_freq, int):
        raise ValueError(
            "Expected `validation_freq` to be a list or int. "
            f"Received: validation_freq={validation_freq} of the type {type(validation_freq)}."
        )
    return validation_freq


def _with_keras_callbacks(
    callbacks: Any, verbose: int | str, history: bool = True
) -> tuple[keras.callbacks.History, list[keras.callbacks.Callback]]:
    """The user's callbacks, and those that Keras adds."""
    if isinstance(callbacks, keras.callbacks.CallbackList):
        callbacks = callbacks.callbacks
    listed = [callback for callback in keras.tree.flatten(callbacks) if callback is not None]
    for callback in listed:
        if not isinstance(callback, keras.callbacks.Callback):
            hint = f" Call the class: {callback.__name__}()." if isinstance(callback, type) else ""
            raise TypeError(
                "`callbacks` must be a list of keras.callbacks.Callback objects. "
                f"Received: {callback!r} (of type {type(callback)}).{hint}"
            )
    found = next((callback for callback in listed if isinstance(callback, keras.callbacks.History)), None)
    if verbose != 0 and not any(isinstance(callback, keras.callbacks.ProgbarLogger) for callback in listed):
        listed.append(keras.callbacks.ProgbarLogger())
    if found is None:
        found = keras.callbacks.History()
        if history:
            listed.append(found)
    return found, listed


def _runs_on_workers(callback: keras.callbacks.Callback) -> bool:
    return bool(hooks_at(callback, Place.WORKER, overridden_hooks(callback).keys()))
