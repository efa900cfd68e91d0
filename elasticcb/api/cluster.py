"""`Cluster`: workers and parameter servers for a Python program, with Keras's `fit`, `evaluate` and `predict`."""

from __future__ import annotations

import contextlib
import inspect
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import keras

from elasticcb.api import processes
from elasticcb.api.arguments import (
    ShowsModel,
    check_apart,
    check_keywords,
    check_model,
    check_numbers,
    check_split,
    cluster_settings,
    epoch_range,
    frequency,
    with_keras_callbacks,
)
from elasticcb.api.data import MethodCall, whole_predictions
from elasticcb.api.functions import Functions
from elasticcb.api.job_folder import JobFolder
from elasticcb.api.keras_jobs import KerasJobs, validated_here, with_own_method
from elasticcb.api.processes import ClusterProcesses
from elasticcb.api.remote import PerWorkerDataset, RemoteValue
from elasticcb.data.batch_sources.adapt import split_validation
from elasticcb.data.batches import BatchSource, PassSource
from elasticcb.errors import UsageError
from elasticcb.keras_private import metrics_in_order
from elasticcb.master.master import Master
from elasticcb.optimizers.step_logs import is_overridden
from elasticcb.process.wording import how_many
from elasticcb.settings import (
    CheckpointOptions,
    Command,
    EmbeddingOptions,
    ExchangeOptions,
    JobSettings,
    Mode,
    NetworkOptions,
    RecoveryOptions,
    TrainingSettings,
    Updates,
)
from elasticcb.settings.names import EVERYDAY, GROUPS
from elasticcb.settings.training import is_due
from elasticcb.storage.remote_files import is_url


class Cluster:
    """A master in this process, with the workers and parameter servers that it starts. Use it as a context manager.

    The processes start with the first call, or with `start()`, and run one call at a time. If a call fails or is
    interrupted, they end; the next call starts new ones.

    Args:
        num_workers: processes that train, evaluate and predict.
        num_ps: processes that hold the weights and embedding tables.
        kind: "local": processes on this machine; "inprocess": threads of this process, for debugging; "external":
            processes that you start, with the commands that `start` prints; "ray": processes on the nodes of a Ray
            cluster. External and Ray processes must see `directory` under the same path.
        directory: folder for logs, and for arrays on their way to the workers. None: `job_dir`, or a temporary folder.
        job_dir: folder or URL for resuming. If the program was killed and runs again, with a URL on any machine,
            completed fits return their results, and the interrupted fit is resumed. After `close`, the next run starts
            from scratch.
        updates: when the movement (weight change) of a worker that trains alone is merged into the model. "local":
            after `local_steps` batches, with those of the other workers; "sync": after each batch, with those of all
            others; "async": after each batch, or `local_steps`, when it arrives, so that nobody waits.
        local_steps: number of batches that a worker trains on before its movement is merged; "auto": with "local" 4
            to 64, so that merging takes about 5 % of the time; else 1.
        checkpoint_dir: folder or URL for checkpoints of the servers at the end of `fit`; "": none are written.
        non_finite: "stop": NaN or infinity in the loss or in gradients ends `fit` with an error; "skip": skip the
            batch.
        callback_errors: "stop": an error in a callback ends the call; "warn": show the error and continue.
        log_level: level of the processes' logs: "DEBUG", "INFO", "WARNING" or "ERROR".
        dashboard: serve a live dashboard to browsers on this machine, and print its address; needs the extra
            `elasticcb[dashboard]`.
        rehearsal: before each call's work, workers compute the first batch in inference mode, and compare loss, metrics
            and outputs with those in this process; a difference ends the call.
        exchange: `elasticcb.ExchangeOptions`: exchange of weights and gradients.
        checkpoint: `elasticcb.CheckpointOptions`: when servers write their state.
        embedding: `elasticcb.EmbeddingOptions`: embedding tables.
        network: `elasticcb.NetworkOptions`: addresses, ports, TLS.
        recovery: `elasticcb.RecoveryOptions`: when a process counts as lost, and how it is replaced.

    docs/python_api.md lists the fields of these groups.

    Raises:
        UsageError: a number is out of range, a name is unknown, arguments contradict each other, or certificates can't
            be used. The message lists all problems.

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
        job_dir: str | os.PathLike[str] | None = None,
        updates: str = "local",
        local_steps: int | str = "auto",
        checkpoint_dir: str | os.PathLike[str] = "",
        non_finite: str = "stop",
        callback_errors: str = "stop",
        log_level: str = "INFO",
        dashboard: bool = False,
        rehearsal: bool = True,
        exchange: ExchangeOptions | None = None,
        checkpoint: CheckpointOptions | None = None,
        embedding: EmbeddingOptions | None = None,
        network: NetworkOptions | None = None,
        recovery: RecoveryOptions | None = None,
        **others: Any,
    ) -> None:
        given = {name: value for name, value in locals().items() if name in (*EVERYDAY, *GROUPS)}
        self._settings = cluster_settings(given, others, job_dir)
        self._folder = None if job_dir is None else JobFolder(job_dir, directory)
        local = None if job_dir is None or is_url(os.fspath(job_dir)) else job_dir
        self._processes = ClusterProcesses(self._settings.cluster, directory or local, self._settings.log_level)
        self._jobs = KerasJobs(self._settings, self._processes, rehearsal)
        self._functions = Functions(self._begin_functions, self._processes.stop)
        self._turn = Turn()
        self._closed = False

    # ------------------------------------------------------------ start and end

    def __repr__(self) -> str:
        settings = self._settings.cluster
        counts = {"worker": settings.num_workers, "parameter server": settings.num_ps}
        processes = ", ".join(how_many(count, what) for what, count in counts.items())
        state = "idle" if self._processes.started else "closed" if self._closed else "not started"
        if self._functions.begun:
            state = "calling functions"
        if self._turn.name:
            state = f"in {self._turn.name}"
        logs = f"; {self.directory}" if self.directory else ""
        return f"<elasticcb.Cluster: {processes}, {settings.kind}, {state}{logs}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a hook can't use the cluster that runs it, only self.model")

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
        """Folder of the logs; "" before the processes are started."""
        return self._processes.directory

    def start(self) -> None:
        """Starts the processes, which import TensorFlow in the background. Does nothing if they are running."""
        if self._turn.taken:
            return
        with self._turn.of("start"):
            self._open()
            if not self._functions.begun:  # their job supervises the processes
                self._processes.start()

    def close(self) -> None:
        """Waits for scheduled functions, and ends the processes. The cluster may be started again, with new processes.

        A call that is running in another thread ends with a `JobFailedError`.

        Raises:
            FunctionError: a scheduled function raised an error that was not raised to the caller yet.
            UsageError: called from a callback of a running call of this cluster.
        """
        self._turn.refuse_within("close")
        try:
            self._functions.end()
        except BaseException:
            self._close()
            raise
        self._close(done=True)

    def _open(self) -> None:
        if self._folder is not None:
            self._folder.open()
        self._closed = False
        processes.close_at_exit(self)

    def _close(self, done: bool = False) -> None:
        self._closed = True
        try:
            self._functions.abandon()
        finally:
            self._processes.close()
            if self._folder is not None:
                self._folder.close(done)
            processes.forget(self)

    # ------------------------------------------------------------ the methods of keras.Model

    @with_own_method
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
        """Trains `model` on the cluster; arguments, defaults and result are the same as for `keras.Model.fit`.

        Afterwards `model` holds the trained weights, and its optimizer its state, so another `fit` continues from
        there.

        Args:
            x: arrays or structures of them (NumPy, tensors, pandas, ragged, sparse), `tf.data.Dataset`, PyDataset,
                generator, files (`elasticcb.data.read`), or a function (`DatasetFactory`) that creates a dataset in
                each worker.
            steps_per_epoch: number of batches in an epoch, over all workers; required for endless data and functions.
            callbacks: docs/callbacks.md says where each hook runs; batch hooks run on workers, on a pickled copy.

        Returns:
            The `History`.

        Raises:
            ValueError, TypeError: as in Keras, for contradictory arguments.
            ElasticCBError: the job failed; the message includes the traceback of the user's code.

        Warns:
            RuntimeWarning: training succeeded, but its last checkpoint could not be written to `checkpoint_dir`.
        """
        check_model(model, "fit")
        check_numbers(
            batch_size=batch_size, steps_per_epoch=steps_per_epoch, validation_steps=validation_steps,
            validation_batch_size=validation_batch_size,
        )  # fmt: skip
        epochs, epochs_of_job = epoch_range(epochs, initial_epoch)
        validation_freq = frequency(validation_freq)
        history, listed = with_keras_callbacks(callbacks, verbose)
        if validation_split and validation_data is None:
            check_split(validation_split)
            (x, y, sample_weight), validation_data = split_validation(x, y, sample_weight, validation_split)
        size = validation_batch_size or batch_size
        if validation_data is not None and is_overridden(model, "evaluate"):
            own = validated_here(model, listed, validation_freq, validation_data, size, validation_steps)
            listed, validation_data = [own, *listed], None
        check_apart(x, validation_data)
        with self._call("fit") as call:
            training = call.adapt(
                x, y, sample_weight, purpose="fit", batch_size=batch_size, shuffle=shuffle, class_weight=class_weight,
                steps=steps_per_epoch, epochs=epochs - initial_epoch,
            )  # fmt: skip
            training.first_epoch = initial_epoch
            sources: dict[str, BatchSource] = {Mode.TRAINING: training}
            if validation_data is not None:
                data = keras.utils.unpack_x_y_sample_weight(validation_data)
                sources[Mode.EVALUATION] = call.adapt(
                    *data, purpose="validation", batch_size=size, steps=validation_steps
                )
            if getattr(training, "runs_python", False):
                listed = [*listed, ShowsModel()]
            params: dict[str, Any] = {"verbose": verbose, "batch_size": batch_size or 32, "epochs": epochs}
            if isinstance(training, PassSource) and training.steps:
                params["steps"] = training.steps  # also if the data has fewer batches, as in Keras
            model.history = history
            summary, _ = self._jobs.run(
                Command.TRAIN, call, model, sources, listed, params, validation_freq=validation_freq, **epochs_of_job
            )
            model.test_function = None  # a model's own `evaluate` traced it while the job watched its step
            if summary.stopped_early:  # by a copy on a worker: callbacks of the caller's process have set it here
                model.stop_training = True
            call.was_read(len(history.epoch), sum(is_due(validation_freq, epoch) for epoch in history.epoch))
        return history

    @with_own_method
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
        """Returns loss and metrics of `model` over all records, like `keras.Model.evaluate`.

        Raises:
            ValueError, TypeError, ElasticCBError: as for `fit`.
        """
        check_model(model, "evaluate")
        check_numbers(batch_size=batch_size, steps=steps)
        _, listed = with_keras_callbacks(callbacks, verbose, history=False)
        with self._call("evaluate") as call:
            source = call.adapt(x, y, sample_weight, batch_size=batch_size, steps=steps, purpose="evaluate")
            params = {"verbose": verbose, "batch_size": batch_size or 32}
            summary, _ = self._jobs.run(Command.EVALUATE, call, model, {Mode.EVALUATION: source}, listed, params)
            call.was_read(1)
        return dict(summary.metrics) if return_dict else metrics_in_order(model, summary.metrics)

    @with_own_method
    def predict(
        self,
        model: keras.Model,
        x: Any,
        batch_size: int | None = None,
        verbose: int | str = "auto",
        steps: int | None = None,
        callbacks: Any = None,
    ) -> Any:
        """Returns the outputs of `model` for all records, in order, like `keras.Model.predict`.

        Raises:
            ValueError, TypeError, ElasticCBError: as for `fit`.
        """
        check_model(model, "predict", compiled=False)
        check_numbers(batch_size=batch_size, steps=steps)
        _, listed = with_keras_callbacks(callbacks, verbose, history=False)
        with self._call("predict") as call:
            source = call.adapt(x, batch_size=batch_size, steps=steps, purpose="predict")
            params = {"verbose": verbose, "batch_size": batch_size or 32}
            _, parts = self._jobs.run(Command.PREDICT, call, model, {Mode.PREDICTION: source}, listed, params)
            predictions = whole_predictions(model, source, parts)
            call.was_read(1)
            return predictions

    # ------------------------------------------------------------ the methods of ClusterCoordinator

    def schedule(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> RemoteValue:
        """Schedules `function(*args, **kwargs)` to be called on some worker; returns at once.

        If its worker is lost, it is called again on another: it runs at least once, and exactly one result counts. If
        it raises an error, functions that are scheduled but not running are cancelled, and the next `join` or
        `schedule` raises the error.

        Args:
            function: a Python function, or a `tf.function`.
            *args: anything that can be pickled; values that were scheduled before, iterators over per-worker datasets,
                and the model passed to `place`.
            **kwargs: likewise.

        Raises:
            UsageError: the cluster is closed or busy, or an argument can't be sent to a worker.
            FunctionError: an earlier function raised an error.
            JobFailedError: the cluster could not run an earlier function.
        """
        return self._functions.schedule(function, args, kwargs)

    def join(self) -> None:
        """Waits until all functions are done. Afterwards, the model passed to `place` has the servers' weights.

        Raises:
            FunctionError: a function raised an error, which is the cause.
            JobFailedError: the cluster could not run a function.
        """
        self._functions.join()

    def done(self) -> bool:
        """Whether no function is waiting or running."""
        return self._functions.done()

    def fetch(self, values: Any) -> Any:
        """Waits for a value, or a structure of values, that `schedule` returned, like `RemoteValue.fetch`."""
        return self._functions.fetch(values)

    def create_per_worker_dataset(self, dataset_fn: Callable[[], Any]) -> PerWorkerDataset:
        """A dataset that each worker creates by calling `dataset_fn`, when it is first used there.

        `iter(dataset)` returns an iterator for functions: on each worker, it iterates over that worker's own dataset. A
        worker that replaces a lost one starts from the beginning.
        """
        return self._functions.create_per_worker_dataset(dataset_fn)

    def place(self, model: keras.Model) -> None:
        """Moves the weights of `model` and the state of its optimizers to the parameter servers.

        Functions use the model as usual: on a worker, it has the newest weights when a function starts, and what the
        function changes is merged when it returns. Waits for functions that were scheduled before.

        Raises:
            UsageError: the model is not built, or has no optimizer.
        """
        if self._settings.training.updates is Updates.SYNC:
            raise UsageError(
                "`place` was called on a cluster with updates='sync'. Functions never wait for each other. Remove "
                "updates, which applies only to `fit`."
            )
        self._functions.place(model)

    def collect(self) -> None:
        """Copies the servers' current weights to the model passed to `place`; `join` does the same."""
        self._functions.collect()

    # ------------------------------------------------------------ one job

    @contextlib.contextmanager
    def _call(self, name: str) -> Iterator[MethodCall]:
        with self._turn.of(name):
            self._open()
            self._functions.end()
            with contextlib.ExitStack() as stack:
                kept = stack.enter_context(self._folder.next_fit()) if self._folder and name == "fit" else None
                yield stack.enter_context(self._jobs.call(name, kept))

    @contextlib.contextmanager
    def _begin_functions(self) -> Iterator[tuple[Master, JobSettings]]:
        """Held while a job for functions starts."""
        with self._turn.of("schedule"):
            if self._closed:
                raise UsageError("The cluster is closed. Use it inside `with`, or call its start().")
            self._open()
            master = self._processes.start()
            yield (
                master,
                JobSettings(
                    command=Command.CALL,
                    name="functions",
                    directory=self._processes.directory,
                    training=TrainingSettings(updates=Updates.ASYNC, non_finite=self._settings.training.non_finite),
                    # Functions may take longer than batches.
                    cluster=replace(self._settings.cluster, lease_seconds=RecoveryOptions.lease_seconds),
                    log_level=self._settings.log_level,
                ),
            )


class Turn:
    """Tracks which method uses the cluster's processes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._name = ""
        self._thread = 0

    @contextlib.contextmanager
    def of(self, name: str) -> Iterator[None]:
        """Marks the method `name` as using the processes. Raises `UsageError` if another method does."""
        if not self._lock.acquire(blocking=False):
            raise UsageError(f"The cluster is busy with `{self._name}`. Call `{name}` when that is done.")
        try:
            self._name, self._thread = name, threading.get_ident()
            yield
        finally:
            self._name, self._thread = "", 0
            self._lock.release()

    @property
    def name(self) -> str:
        """The method that uses the processes; "": none."""
        return self._name

    @property
    def taken(self) -> bool:
        """Whether a method is using the processes."""
        return self._lock.locked()

    def refuse_within(self, name: str) -> None:
        """Raises `UsageError` if this thread is inside a call, in one of its callbacks."""
        if self._thread == threading.get_ident():
            raise UsageError(
                f"`{name}` was called inside `{self._name}`, which is still running. To stop training from a "
                "callback, set self.model.stop_training = True."
            )


# `fit`, `evaluate` and `predict` of the package: each on a temporary local cluster.


def fit(
    model: keras.Model,
    *args: Any,
    num_workers: int = 1,
    num_ps: int = 1,
    job_dir: str | os.PathLike[str] | None = None,
    cluster: dict[str, Any] | None = None,
    **kwargs: Any,
) -> keras.callbacks.History:
    """Starts a `Cluster`, trains `model` on it with `Cluster.fit`, and closes it.

    Args:
        *args: arguments of `Cluster.fit`.
        num_workers: argument of `Cluster`.
        num_ps: argument of `Cluster`.
        job_dir: argument of `Cluster`.
        cluster: other arguments of `Cluster`.
        **kwargs: arguments of `Cluster.fit`.

    Raises:
        TypeError: a keyword argument is unknown; nothing was started.
    """
    _check_keywords("fit", model, kwargs)
    with Cluster(num_workers, num_ps, **{"job_dir": job_dir, **(cluster or {})}) as own:
        return own.fit(model, *args, **kwargs)


def evaluate(
    model: keras.Model,
    *args: Any,
    num_workers: int = 1,
    num_ps: int = 1,
    cluster: dict[str, Any] | None = None,
    **kwargs: Any,
) -> Any:
    """Like `fit`, with `Cluster.evaluate`."""
    _check_keywords("evaluate", model, kwargs)
    with Cluster(num_workers, num_ps, **(cluster or {})) as own:
        return own.evaluate(model, *args, **kwargs)


def predict(
    model: keras.Model,
    *args: Any,
    num_workers: int = 1,
    num_ps: int = 1,
    cluster: dict[str, Any] | None = None,
    **kwargs: Any,
) -> Any:
    """Like `fit`, with `Cluster.predict`."""
    _check_keywords("predict", model, kwargs)
    with Cluster(num_workers, num_ps, **(cluster or {})) as own:
        return own.predict(model, *args, **kwargs)


def _check_keywords(method: str, model: Any, given: Mapping[str, Any]) -> None:
    """Raises `TypeError` for keyword arguments that neither `elasticcb.fit` (or another method) nor `Cluster.fit` has.
    A model's own method may have others."""
    if isinstance(model, keras.Model) and is_overridden(model, method):
        return
    of_method = list(inspect.signature(getattr(Cluster, method)).parameters)[1:]
    own = [name for name in inspect.signature(globals()[method]).parameters if name not in ("args", "kwargs")]
    for name, value in given.items():
        if name not in of_method and name in inspect.signature(Cluster).parameters:
            raise TypeError(
                f"elasticcb.{method}() got an argument of Cluster, {name}={value!r}. Pass it as "
                f"cluster={{{name!r}: {value!r}}}."
            )
    check_keywords(f"elasticcb.{method}", given, [*of_method, *own])
