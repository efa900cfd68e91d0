"""`Cluster`: workers and parameter servers that a Python program uses as Keras's `fit`, `evaluate` and `predict`."""

from __future__ import annotations

import contextlib
import operator
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras

from elasticcb.api import data as data_of
from elasticcb.api import exits
from elasticcb.api.arguments import (
    capped_epochs,
    cluster_arguments,
    frequency,
    job_folder,
    with_keras_callbacks,
)
from elasticcb.api.exclusive_call import Turn
from elasticcb.api.functions import Functions
from elasticcb.api.keras_jobs import KerasJobs
from elasticcb.api.processes import ClusterProcesses
from elasticcb.api.remote import PerWorkerDataset, RemoteValue
from elasticcb.api.results import whole_predictions
from elasticcb.errors import UsageError
from elasticcb.master.master import Master
from elasticcb.settings import Command, EmbeddingSettings, JobSettings, TrainingSettings


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
        ray_address: of the Ray cluster, "HOST:PORT"; "" takes that of RAY_ADDRESS, or the cluster of this machine. A
            program that has called `ray.init` uses the one that it is connected to.
        directory: for logs, and for arrays on their way to the workers; None takes `job_dir`, or makes one that is
            removed at the end.
        job_dir: folder by which the program goes on when it is run again after it was killed: its fits that had ended
            give back what they had, the one that was under way is resumed. `close` makes the program begin anew.
        use_async: apply each gradient when it comes; False waits for `grads_to_wait` of them.
        grads_to_wait: gradients per update, in synchronous mode.
        sync_version_tolerance: how many versions old a gradient may be, in synchronous mode.
        get_model_steps: batches between pulls of the weights.
        max_staleness: batches that a worker may compute ahead of the servers' answers, in asynchronous mode, so that
            pushes and pulls run beside the computation.
        wire_dtype: "same", or "bfloat16" for gradients that travel rounded to 16 bits.
        embedding_threshold_bytes: the rows of a `keras.layers.Embedding` of at least so many bytes live on the servers,
            and only those that a batch needs travel.
        embedding_memory_bytes: what the embedding tables of one server may hold, with slots; 0: no limit.
        embedding_when_full: "error", "evict" (the rows not used for longest go) or "initial" (new ids keep their
            initial value).
        embedding_min_count: from which time on that training meets it an id has a row of its own.
        embedding_max_age: rows that training did not meet for so many versions go; 0: never.
        checkpoint_dir: where checkpoints of servers are written, at the end of `fit`; "": none are.
        checkpoint_steps: model versions between more of them.
        non_finite: "stop": a NaN or an infinity in loss or gradients ends `fit` with an error; "skip": its batch
            is passed over.
        callback_errors: "stop": an error in a callback ends the call; "warn": it is told, and the call goes on.
        checkpoint_interval: seconds between the files by which a parameter server that is killed comes back; 0: none
            are written, and a lost server ends the call.
        ps_replicas: 1: each server hands its updates to the next one before it answers, so that one that is killed
            loses none.
        max_worker_restarts, max_ps_restarts: processes that may be started in the place of lost ones.
        lease_seconds: a worker without progress for so long is killed and replaced; one that computes a batch, after
            twelve times as long.
        silence_seconds: a parameter server that is not heard of for so long is killed and replaced; with "external", a
            worker, too. None: 30, or `lease_seconds` where that is less.
        host: address for the master to listen on; "": 127.0.0.1, or with Ray its node's.
        port: of the master; 0 takes any free one.
        metrics_port: on which the master serves metrics to Prometheus; 0 takes any free one, and the log names it;
            None: none are served.
        tls: encrypt what the processes say, and let in only those with a certificate of a CA that is made for this
            cluster; needs `elasticcb[tls]`.
        tls_cert, tls_key, tls_ca: the same with certificates of your own: PEM files with that of the processes, its
            key, and the CA that has signed them (docs/security.md).
        tls_name: that the certificates are for; "": the addresses that the processes listen on.
        log_level: of the processes' logs: "DEBUG", "INFO", "WARNING" or "ERROR".

    Raises:
        UsageError: a number is out of range, a name is unknown, or certificates can't be used.

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
        ray_address: str = "",
        directory: str | os.PathLike[str] | None = None,
        job_dir: str | os.PathLike[str] | None = None,
        use_async: bool = True,
        grads_to_wait: int = 1,
        sync_version_tolerance: int = 0,
        get_model_steps: int = 1,
        max_staleness: int = 0,
        wire_dtype: str = "same",
        embedding_threshold_bytes: int = EmbeddingSettings.threshold_bytes,
        embedding_memory_bytes: int = 0,
        embedding_when_full: str = "error",
        embedding_min_count: int = 1,
        embedding_max_age: int = 0,
        checkpoint_dir: str | os.PathLike[str] = "",
        checkpoint_steps: int = 0,
        non_finite: str = "stop",
        callback_errors: str = "stop",
        checkpoint_interval: float = 10.0,
        ps_replicas: int = 0,
        max_worker_restarts: int = 10,
        max_ps_restarts: int = 10,
        lease_seconds: float = TrainingSettings.lease_seconds,
        silence_seconds: float | None = None,
        host: str = "",
        port: int = 0,
        metrics_port: int | None = None,
        tls: bool = False,
        tls_cert: str | os.PathLike[str] = "",
        tls_key: str | os.PathLike[str] = "",
        tls_ca: str | os.PathLike[str] = "",
        tls_name: str = "",
        log_level: str = "INFO",
    ) -> None:
        self._arguments = cluster_arguments(
            num_workers=num_workers,
            num_ps=num_ps,
            kind=kind,
            ray_address=ray_address,
            use_async=use_async,
            grads_to_wait=grads_to_wait,
            sync_version_tolerance=sync_version_tolerance,
            get_model_steps=get_model_steps,
            max_staleness=max_staleness,
            wire_dtype=wire_dtype,
            embedding_threshold_bytes=embedding_threshold_bytes,
            embedding_memory_bytes=embedding_memory_bytes,
            embedding_when_full=embedding_when_full,
            embedding_min_count=embedding_min_count,
            embedding_max_age=embedding_max_age,
            checkpoint_dir=checkpoint_dir,
            checkpoint_steps=checkpoint_steps,
            non_finite=non_finite,
            callback_errors=callback_errors,
            checkpoint_interval=checkpoint_interval,
            ps_replicas=ps_replicas,
            max_worker_restarts=max_worker_restarts,
            max_ps_restarts=max_ps_restarts,
            lease_seconds=lease_seconds,
            silence_seconds=silence_seconds,
            host=host,
            port=port,
            metrics_port=metrics_port,
            tls=tls,
            tls_cert=tls_cert,
            tls_key=tls_key,
            tls_ca=tls_ca,
            tls_name=tls_name,
            log_level=log_level,
        )
        self._folder = job_folder(job_dir, checkpoint_interval)
        self._processes = ClusterProcesses(self._arguments.cluster, directory or job_dir, log_level)
        self._jobs = KerasJobs(self._arguments, self._processes)
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
        model._assert_compile_called("fit")
        epochs, initial_epoch = capped_epochs(operator.index(epochs)), operator.index(initial_epoch)
        if initial_epoch < 0:
            raise ValueError(f"`initial_epoch` must be at least 0. Received: initial_epoch={initial_epoch}")
        validation_freq = frequency(validation_freq)
        history, listed = with_keras_callbacks(callbacks, verbose)
        with self._call("fit") as call:
            sources = data_of.training_sources(
                call, x, y, sample_weight, batch_size, shuffle, class_weight, steps_per_epoch,
                validation_split, validation_data, validation_batch_size, validation_steps,
            )  # fmt: skip
            params = {"verbose": verbose, "batch_size": batch_size or 32, "epochs": epochs}
            model.history = history
            self._jobs.run(
                Command.TRAIN, call, model, sources, listed, params,
                num_epochs=max(epochs, 1),
                initial_epoch=initial_epoch if epochs > initial_epoch else max(epochs, 1),
                validation_freq=validation_freq,
            )  # fmt: skip
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
        _, listed = with_keras_callbacks(callbacks, verbose, history=False)
        with self._call("evaluate") as call:
            source = call.adapt(x, y, sample_weight, batch_size=batch_size, steps=steps, purpose="evaluate")
            params = {"verbose": verbose, "batch_size": batch_size or 32}
            summary, _ = self._jobs.run(Command.EVALUATE, call, model, {"evaluation": source}, listed, params)
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
        _, listed = with_keras_callbacks(callbacks, verbose, history=False)
        with self._call("predict") as call:
            source = call.adapt(x, batch_size=batch_size, steps=steps, purpose="predict")
            params = {"verbose": verbose, "batch_size": batch_size or 32}
            _, parts = self._jobs.run(Command.PREDICT, call, model, {"prediction": source}, listed, params)
            return whole_predictions(model, source, parts)

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
        if not self._arguments.training.use_async:
            raise UsageError(
                "`place` was called on a cluster with use_async=False. Functions hand over gradients at any time, and "
                "never wait for each other: make the Cluster with use_async=True."
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
                    training=TrainingSettings(non_finite=self._arguments.training.non_finite),
                    cluster=self._arguments.cluster,
                    log_level=self._arguments.log_level,
                ),
            )
