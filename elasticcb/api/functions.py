"""Runs functions of `Cluster.schedule` on workers, with the semantics of tf.distribute's ClusterCoordinator; here each
call is a task of the queue."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import keras

from elasticcb.api.function_job import FunctionJob, name_of
from elasticcb.api.placed import PlacedWeights
from elasticcb.api.remote import PerWorkerDataset, RemoteValue
from elasticcb.errors import UsageError
from elasticcb.master.master import Master
from elasticcb.settings import JobSettings


class Functions:
    """The functions of a cluster; starts a job for them if there is none."""

    def __init__(
        self, begin: Callable[[], AbstractContextManager[tuple[Master, JobSettings]]], stop: Callable[[], None]
    ) -> None:
        self._begin = begin
        self._stop = stop
        self._job: FunctionJob | None = None
        self._model: keras.Model | None = None
        self._datasets: dict[int, bytes] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()  # while a job starts

    @property
    def begun(self) -> bool:
        """Whether there is a job of functions, which supervises the processes."""
        return self._job is not None

    def next_number(self) -> int:
        return next(self._numbers)

    def schedule(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RemoteValue:
        if not callable(function):
            raise UsageError(f"`schedule` takes a function. Received: {function!r} (of type {type(function).__name__})")
        return self._present_job().schedule(function, args, kwargs)

    def create_per_worker_dataset(self, dataset_fn: Any) -> PerWorkerDataset:
        if not callable(dataset_fn):
            raise UsageError(
                "`create_per_worker_dataset` takes a function that creates a dataset; each worker calls it. "
                f"Received: {dataset_fn!r} (of type {type(dataset_fn).__name__})"
            )
        job = self._present_job()
        number = self.next_number()
        self._datasets[number] = job.dumps(dataset_fn, f"The function {name_of(dataset_fn)}")
        return PerWorkerDataset(self, number)

    def place(self, model: keras.Model) -> None:
        PlacedWeights(model)  # raises `UsageError` if the model can't be placed
        self.end()
        before, self._model = self._model, model
        try:
            self._present_job()
        except BaseException:
            self._model = before
            raise

    def join(self) -> None:
        if self._job is not None:
            self._job.join()

    def collect(self) -> None:
        if self._job is not None:
            self._job.collect()

    def done(self) -> bool:
        return self._job is None or self._job.done()

    def fetch(self, structure: Any) -> Any:
        return keras.tree.map_structure(self._fetched, structure)

    def _fetched(self, value: Any) -> Any:
        if not isinstance(value, RemoteValue):
            raise UsageError(
                f"`fetch` takes a value returned by `schedule`, or a structure of such values. Received: {value!r} "
                f"(of type {type(value).__name__})"
            )
        if value.owner is not self:
            raise UsageError(f"{value!r} belongs to another Cluster. Fetch it there, or call its own fetch().")
        return value.fetch()

    def end(self) -> None:
        """Waits for scheduled functions, if any; then the processes are free for another job."""
        job, self._job = self._job, None
        if job is not None:
            try:
                job.end()
            except KeyboardInterrupt:
                job.abandon()
                raise
            finally:
                if job.failed:
                    self._stop()

    def abandon(self) -> None:
        """Does not wait; call it before the processes are ended."""
        job, self._job = self._job, None
        if job is not None:
            job.abandon()

    def _present_job(self) -> FunctionJob:
        with self._lock:
            if self._job is not None:
                self._job.raise_error()
                if self._job.failed:
                    self.end()
            if self._job is None:
                placed = None if self._model is None else PlacedWeights(self._model)
                with self._begin() as (master, settings):
                    self._job = FunctionJob(self, master, settings, placed, self._datasets)
            return self._job
