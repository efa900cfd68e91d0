"""`Cluster`: workers and parameter servers that a Python program uses as Keras's `fit`, `evaluate` and `predict`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import keras

from elasticcb.api import data as data_of
from elasticcb.api import exits
from elasticcb.api.arguments import check_model, cluster_settings, epoch_range, frequency, with_keras_callbacks
from elasticcb.api.exclusive_call import Turn
from elasticcb.api.functions import Functions
from elasticcb.api.job_folder import JobFolder
from elasticcb.api.keras_jobs import KerasJobs
from elasticcb.api.processes import ClusterProcesses
from elasticcb.api.remote import PerWorkerDataset, RemoteValue
from elasticcb.api.results import whole_predictions
from elasticcb.errors import UsageError
from elasticcb.master.master import Master
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
from elasticcb.settings.arguments import EVERYDAY, GROUPS


class Cluster:
    """A master in this process, and workers and parameter servers that it starts; use it with `with`.

    The processes are started with the first call, or by `start()`, and do one call after another. A call that
    fails or is interrupted ends them; the next one starts new ones.

    Args:
        num_workers: processes that compute gradients, evaluate and predict.
        num_ps: processes that hold the weights and apply gradients.
        kind: "local": processes of this machine; "inprocess": threads of this process, for debugging; "external":
            started by hand, by the commands that `start` shows; "ray": on the nodes of a Ray cluster. These must see
            `directory` under the same path.
        directory: for logs, and for arrays on their way to the workers; None takes `job_dir`, or makes one that is
            removed at the end.
        job_dir: folder by which the program goes on when it is run again after it was killed: its fits that had ended
            give back what they had, the one that was under way is resumed. `close` makes the program begin anew.
        updates: how the work of several workers becomes one model. "local": each trains by itself for `local_steps`
            batches, and how far its weights moved is merged; "sync": the mean of `grads_to_wait` gradients is applied;
            "async": each gradient is applied when it comes.
        local_steps: batches that a worker trains on before its work is merged, with "local"; "auto": 4 to 64, so that
            merging takes a twentieth of the time.
        outer_optimizer: with "local", a Keras optimizer (or its name, or what `keras.optimizers.serialize` gives) by
            which servers apply the mean of what is merged; "": the mean is added.
        grads_to_wait: gradients per update, with "sync".
        use_async: what `updates` was before: True is "async", False is "sync".
        checkpoint_dir: where checkpoints of servers are written, at the end of `fit`; "": none are.
        non_finite: "stop": a NaN or an infinity in loss or gradients ends `fit` with an error; "skip": its batch
            is passed over.
        callback_errors: "stop": an error in a callback ends the call; "warn": it is told, and the call goes on.
        log_level: of the processes' logs: "DEBUG", "INFO", "WARNING" or "ERROR".
        dashboard: serve a live page of the calls to browsers of this machine, and print its address; needs the extra
            `elasticcb[dashboard]`.
        exchange: `elasticcb.ExchangeOptions`: how weights and gradients travel.
        checkpoint: `elasticcb.CheckpointOptions`: when what servers hold is written.
        embedding: `elasticcb.EmbeddingOptions`: embedding tables.
        network: `elasticcb.NetworkOptions`: addresses, ports, TLS.
        recovery: `elasticcb.RecoveryOptions`: when a process is given up, and what follows.

    docs/python_api.md has the fields of these.

    Raises:
        UsageError: a number is out of range, a name is unknown, arguments contradict each other, or certificates can't
            be used; with all that is wrong.

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
        outer_optimizer: keras.optimizers.Optimizer | Mapping[str, Any] | str = "",
        grads_to_wait: int = 1,
        use_async: bool | None = None,
        checkpoint_dir: str | os.PathLike[str] = "",
        non_finite: str = "stop",
        callback_errors: str = "stop",
        log_level: str = "INFO",
        dashboard: bool = False,
        exchange: ExchangeOptions | None = None,
        checkpoint: CheckpointOptions | None = None,
        embedding: EmbeddingOptions | None = None,
        network: NetworkOptions | None = None,
        recovery: RecoveryOptions | None = None,
        **others: Any,
    ) -> None:
        given = {name: value for name, value in locals().items() if name in (*EVERYDAY, *GROUPS)}
        self._settings = cluster_settings(given, others, job_dir)
        self._folder = None if job_dir is None else JobFolder(job_dir)
        self._processes = ClusterProcesses(self._settings.cluster, directory or job_dir, log_level)
        self._jobs = KerasJobs(self._settings, self._processes)
        self._functions = Functions(self._begin_functions, self._processes.stop)
        self._turn = Turn()
        self._closed = False

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
        return self._processes.directory

    def start(self) -> None:
        """Starts the processes, which import TensorFlow while this one goes on. Does nothing when they run."""
        if self._turn.taken:
            return
        with self._turn.of("start"):
            self._open()
            if not self._functions.begun:  # their job looks after the processes
                self._processes.start()

    def close(self) -> None:
        """Waits for scheduled functions, and ends the processes; the cluster may be started again, with new ones.

        A call under way in another thread ends with a `JobFailedError`.

        Raises:
            FunctionError: a scheduled function raised an error, and nobody has seen it.
            UsageError: a callback of this cluster's own call closes it.
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
        exits.close_at_exit(self)

    def _close(self, done: bool = False) -> None:
        self._closed = True
        try:
            self._functions.abandon()
        finally:
            self._processes.close()
            if self._folder is not None:
                self._folder.close(done)
            exits.forget(self)

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

        Warns:
            RuntimeWarning: the model is trained, but its last checkpoint could not be written to `checkpoint_dir`.
        """
        check_model(model, "fit")
        epochs, epochs_of_job = epoch_range(epochs, initial_epoch)
        validation_freq = frequency(validation_freq)
        history, listed = with_keras_callbacks(callbacks, verbose)
        with self._call("fit") as call:
            sources = data_of.training_sources(
                call, x, y, sample_weight, batch_size, shuffle, class_weight, steps_per_epoch,
                validation_split, validation_data, validation_batch_size, validation_steps,
            )  # fmt: skip
            params = {"verbose": verbose, "batch_size": batch_size or 32, "epochs": epochs}
            model.history = history
            summary, _ = self._jobs.run(
                Command.TRAIN, call, model, sources, listed, params, validation_freq=validation_freq, **epochs_of_job
            )
            if summary.stopped_early:  # by a copy on a worker: those of the caller's process have set it here
                model.stop_training = True
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
        check_model(model, "evaluate")
        _, listed = with_keras_callbacks(callbacks, verbose, history=False)
        with self._call("evaluate") as call:
            source = call.adapt(x, y, sample_weight, batch_size=batch_size, steps=steps, purpose="evaluate")
            params = {"verbose": verbose, "batch_size": batch_size or 32}
            summary, _ = self._jobs.run(Command.EVALUATE, call, model, {Mode.EVALUATION: source}, listed, params)
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
        check_model(model, "predict", compiled=False)
        _, listed = with_keras_callbacks(callbacks, verbose, history=False)
        with self._call("predict") as call:
            source = call.adapt(x, batch_size=batch_size, steps=steps, purpose="predict")
            params = {"verbose": verbose, "batch_size": batch_size or 32}
            _, parts = self._jobs.run(Command.PREDICT, call, model, {Mode.PREDICTION: source}, listed, params)
            return whole_predictions(model, source, parts)

    # ------------------------------------------------------------ as ClusterCoordinator has them

    def schedule(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> RemoteValue:
        """Has `function(*args, **kwargs)` called on some worker; returns at once.

        It is called again elsewhere when its worker is lost: at least once, and exactly one result counts. An error
        that it raises cancels what is scheduled and does not run yet; the next `join` or `schedule` raises it.

        Args:
            function: a Python function, or a `tf.function`.
            *args: anything that can be pickled; values that were scheduled before, iterators over per-worker datasets,
                and the model that was given to `place`.
            **kwargs: the same.

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
        optimizers hand gradients to the servers, which apply each when it comes. Waits for functions that were
        scheduled before.

        Raises:
            UsageError: the model is not built, or has no optimizer.
        """
        if self._settings.training.is_synchronous:
            raise UsageError(
                "`place` was called on a cluster with updates='sync'. Functions hand over gradients at any time, and "
                "never wait for each other: leave out updates, which is about `fit`."
            )
        self._functions.place(model)

    def collect(self) -> None:
        """Makes the model that was given to `place` hold what the servers hold now; `join` does so too."""
        self._functions.collect()

    # ------------------------------------------------------------ one job

    @contextlib.contextmanager
    def _call(self, name: str) -> Iterator[data_of.MethodCall]:
        with self._turn.of(name):
            self._open()
            self._functions.end()
            with contextlib.ExitStack() as stack:
                kept = stack.enter_context(self._folder.next_fit()) if self._folder and name == "fit" else None
                yield stack.enter_context(self._jobs.call(name, kept))

    @contextlib.contextmanager
    def _begin_functions(self) -> Iterator[tuple[Master, JobSettings]]:
        """While a job for functions begins."""
        with self._turn.of("schedule"):
            if self._closed:
                raise UsageError("The cluster is closed. Use it inside of `with`, or call its start().")
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
