"""Runs functions of `Cluster.schedule` on workers, with the semantics of tf.distribute's ClusterCoordinator; here each
call is a task of the queue. `Cluster.place` sends the model that they use.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import pickle
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import keras

from elasticcb.api.remote import PerWorkerDataset, RemoteValue, sending_to
from elasticcb.cluster.registry import backend_of
from elasticcb.errors import ElasticCBError, FunctionError, JobFailedError, UsageError
from elasticcb.keras_private import layers_of, trained_by
from elasticcb.layers import Embedding
from elasticcb.master.job_machine import JobMachine
from elasticcb.master.master import Master
from elasticcb.master.members import Role, ServedCluster
from elasticcb.master.servers import Servers
from elasticcb.master.task import QueueSettings
from elasticcb.master.task_queue import TaskQueue
from elasticcb.model.program import Program
from elasticcb.model.weights import variable_specs
from elasticcb.optimizers.held_state import read_optimizers, write_optimizers
from elasticcb.optimizers.state import ModelState, OptimizerState
from elasticcb.optimizers.traits import learning_rate_variable, may_split, model_optimizers, steps_made, unwrapped
from elasticcb.optimizers.variables import StepVariables, described
from elasticcb.process.import_path import caller_path
from elasticcb.serialization import carry
from elasticcb.serialization.object_paths import references
from elasticcb.settings import JobSettings
from elasticcb.worker.functions import FunctionCall, Result


class PlacedWeights:
    """Provides the servers' initial state, and takes back their final state.

    Args:
        model: a built model with an optimizer.

    Raises:
        UsageError: the model is not built or has no optimizer; one of several optimizers is not built; or it has
            ElasticCB's own embedding layers.
    """

    def __init__(self, model: keras.Model) -> None:
        if not isinstance(model, keras.Model):
            raise UsageError(f"`place` takes a keras.Model. Received: {model!r} (of type {type(model).__name__})")
        optimizers = model_optimizers(model)
        if not model.built or not optimizers:
            missing = "has no optimizer: call compile()" if model.built else "is not built: call the model on a batch"
            raise UsageError(f"The model {model.name!r} {missing} before `place`.")
        own = next((layer for layer in layers_of(model) if isinstance(layer, Embedding)), None)
        if own is not None:
            raise UsageError(
                f"The layer {own.name!r} is an elasticcb.layers.Embedding, whose rows `place` does not support: a "
                "custom loop looks up ids only when it runs. Use keras.layers.Embedding here, or train with "
                "`Cluster.fit`, which accepts a model with its own train_step."
            )
        owners = _owners(model)
        self.model = model
        self.variables = variable_specs(model, None if owners is None else StepVariables(owners, owners))
        self.may_split = all(map(may_split, optimizers))
        self.optimizers = described(optimizers, self.variables, model.weights)

    def start(self) -> ModelState:
        """The present state of the model."""
        optimizers = model_optimizers(self.model)
        version = steps_made(optimizers)
        state = read_optimizers(optimizers, self.model.weights, self.variables) if version else OptimizerState()
        weights = [variable.numpy() for variable in self.model.weights]
        return ModelState(weights, state, version)

    def program(self) -> bytes:
        """The serialized model for workers and servers."""
        return Program(self.model, {}).dumps()[0]

    @property
    def learning_rate(self) -> float | None:
        """The current learning rate; None if it can't be set."""
        rate = learning_rate_variable(getattr(self.model, "optimizer", None))
        return None if rate is None else float(rate)

    def set_state(self, state: ModelState) -> None:
        """Copies the servers' state to the model and its optimizers."""
        rate = self.learning_rate  # the caller's value; it may be newer than the servers' value
        for variable, value in zip(self.model.weights, state.weights, strict=True):
            variable.assign(value)
        write_optimizers(state.optimizer, model_optimizers(self.model), self.model.weights, self.variables)
        if rate is not None:
            self.model.optimizer.learning_rate = rate


def _owners(model: keras.Model) -> dict[int, int] | None:
    """For each weight, the index of the optimizer that trains it; None: one optimizer trains all."""
    optimizers = model_optimizers(model)
    if len(optimizers) == 1:
        return None
    indices = {id(variable): index for index, variable in enumerate(model.weights)}
    owners: dict[int, int] = {}
    for place, optimizer in enumerate(optimizers):
        if optimizer.built:
            owners |= {indices[id(variable)]: place for variable in trained_by(unwrapped(optimizer))}
    missing = [v.path for i, v in enumerate(model.weights) if v.trainable and i not in owners]
    if missing:
        raise UsageError(
            f"The model {model.name!r} has {len(optimizers)} optimizers, but none of them trains {missing[0]!r}. "
            "Before `place`, call optimizer.build(variables) on each with the variables that it trains."
        )
    return owners


logger = logging.getLogger(__name__)


_LEAVE_SECONDS = 30.0  # seconds for workers to finish the job
_ABANDON_SECONDS = 5.0  # seconds for the thread that drives a job, which may wait for a server
_MOST_LOSSES = 3  # lost workers per function; beyond that, the function itself kills them


class Functions:
    """The functions of a cluster; starts a job for them if there is none."""

    def __init__(
        self,
        begin: Callable[[], AbstractContextManager[tuple[Master, JobSettings]]],
        stop: Callable[[Exception], None],
    ) -> None:
        self._begin = begin
        self._stop = stop
        self._job: _FunctionJob | None = None
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
        self._datasets[number] = job.dumps(dataset_fn, f"The function {_name_of(dataset_fn)}")
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
                if job.failed is not None:
                    self._stop(job.failed)

    def abandon(self) -> None:
        """Does not wait; call it before the processes are ended."""
        job, self._job = self._job, None
        if job is not None:
            job.abandon()

    def _present_job(self) -> _FunctionJob:
        with self._lock:
            if self._job is not None:
                self._job.raise_error()
                if self._job.failed is not None:
                    self.end()
            if self._job is None:
                placed = None if self._model is None else PlacedWeights(self._model)
                with self._begin() as (master, settings):
                    self._job = _FunctionJob(self, master, settings, placed, self._datasets)
            return self._job


@dataclass
class _Scheduled:
    value: RemoteValue
    function: bytes
    arguments: bytes
    needed: list[RemoteValue]
    learning_rate: float | None  # the caller's, when the function was scheduled
    missing: set[int] = field(default_factory=set)  # numbers of the arguments that are not available yet


class _FunctionJob:
    """A job of functions: from the first function to the next `fit`, or until something else ends it.

    Args:
        owner: the cluster; provides `next_number()`.
        datasets: pickled functions that create per-worker datasets, by number.
    """

    def __init__(
        self,
        owner: Any,
        master: Master,
        settings: JobSettings,
        placed: PlacedWeights | None,
        datasets: dict[int, bytes],
    ) -> None:
        self.owner = owner
        self.model: keras.Model | None = None if placed is None else placed.model
        self.elsewhere = backend_of(settings.cluster.kind).separate
        self.failed: Exception | None = None  # why the job can't continue
        self._master, self._doubt = master.server, master.watchdog.doubt
        self._placed = placed
        self._start = None if placed is None else placed.start()
        self._servers: Servers | None = None  # None until servers hold the weights, and without a model
        self._queue = TaskQueue(
            QueueSettings(
                records_per_task=1,
                minibatch_size=1,
                lease_seconds=settings.cluster.lease_seconds,
                max_losses=_MOST_LOSSES,
            )
        )
        self._error: Exception | None = None  # the first error, until `raise_error` raises it
        self._told = False  # by `fetch`
        self._open: dict[int, RemoteValue] = {}
        self._inbox: list[_Scheduled] = []
        self._dependents: dict[int, list[_Scheduled]] = {}
        self._over = False
        self._learning_rate = 0.0  # the base learning rate on the servers
        self._ready = threading.Event()
        self._master.begin_job(settings, b"" if placed is None else placed.program(), datasets)
        self._thread = threading.Thread(target=self._run, name="functions", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------ methods for the caller

    def schedule(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> RemoteValue:
        """Raises `UsageError` if something can't be sent, and errors of earlier functions like `raise_error`."""
        name = _name_of(function)
        with sending_to(self.owner) as needed:
            function_data = self.dumps(function, f"The function {name}")
            arguments = self._pickled_arguments(name, args, kwargs)
        for value in needed:
            if value.error is not None:
                raise value.error
        value = RemoteValue(self, self.owner.next_number(), name)
        rate = None if self._placed is None else self._placed.learning_rate
        with self._master.change():
            self.raise_error()
            if self._over:  # another thread has begun a `fit`, or has closed the cluster
                raise UsageError(f"The cluster's functions have just ended: {name}() was not scheduled. Call it again.")
            self._open[value.number] = value
            self._inbox.append(_Scheduled(value, function_data, arguments, needed, rate))
        return value

    def dumps(self, value: Any, name: str) -> bytes:
        """`value` for workers; raises `UsageError` if something in it can't be sent."""
        return carry.dumps(value, name, references(self.model), elsewhere=self.elsewhere)

    def _pickled_arguments(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
        try:
            return self.dumps((args, kwargs), f"The arguments of {name}()")
        except UsageError:
            for key, value in [*enumerate(args, 1), *kwargs.items()]:
                self.dumps(value, f"Argument {key} of {name}()")
            raise

    def done(self) -> bool:
        """Whether no function waits or runs."""
        return not self._open

    def join(self) -> None:
        """Waits for all functions; raises like `raise_error`."""
        with self._master.state():
            self._master.wait_for(lambda state: self.done())
        self.collect()
        self.raise_error()

    def collect(self) -> None:
        """Copies the servers' weights to the caller's model."""
        self._ready.wait()
        if self._placed is not None and self.failed is None:
            assert self._servers is not None
            self._placed.set_state(self._servers.control.export())

    def raise_error(self) -> None:
        """Raises the error of the first failed function, or of the job; only once."""
        with self._master.state():
            error, self._error, self._told = self._error, None, False
        if error is not None:
            raise error

    def has_told(self, error: Exception) -> None:
        """The caller has seen the error."""
        self._told = self._told or error is self._error

    def end(self) -> None:
        """Waits for all functions and ends the job; raises an error that the caller has not seen."""
        with self._master.state():
            self._master.wait_for(lambda state: self.done())
        self.collect()
        self._finish()
        self._thread.join()
        if not self._told:
            self.raise_error()

    def abandon(self) -> None:
        """Ends the job without waiting for functions; the processes are ended as well."""
        self._fail(FunctionError("The cluster was closed before the function was done."))
        self._finish()
        self._thread.join(_ABANDON_SECONDS)

    def _finish(self) -> None:
        with self._master.change() as state:
            self._over = state.over = True
            self._queue.finish()

    # ------------------------------------------------------------ the thread that drives the job

    def _run(self) -> None:
        try:
            self._begin()
            while not self._over:
                self._turn()
            if self.failed is None:
                self._master.wait_until(lambda state: not state.roster.busy(Role.WORKER), _LEAVE_SECONDS)
        except Exception as error:
            self._fail(error)
        finally:
            self._ready.set()
            if self._servers is not None:
                self._servers.close()

    def _begin(self) -> None:
        master, placed = self._master, self._placed
        cluster = ServedCluster((), (), False)
        if placed is not None:
            with master.state() as state:
                while not self._over and not state.roster.complete(Role.PS, state.number):
                    master.tend()
                    master.wait_a_tick()
            if self._over:
                return
            self._servers = Servers(
                master,
                self._doubt,
                placed.variables,
                placed.may_split,
                placed.optimizers,
                placed.start,
                logger.warning,
            )
            assert self._start is not None
            self._servers.control.initialize(self._start)
            self._start = None
            self._learning_rate = self._servers.control.client.learning_rate
            self._servers.learning_rate = lambda: self._learning_rate if placed.learning_rate is not None else None
            cluster = ServedCluster(self._servers.places, placed.variables, placed.may_split)
        with master.change() as state:
            state.queue, state.cluster = self._queue, cluster
        self._ready.set()

    def _turn(self) -> None:
        with self._master.state() as state:
            self._master.tend()
            if not self._inbox and not state.results:
                self._master.wait_a_tick()
            inbox, self._inbox = self._inbox, []
            results, state.results = state.results, {}
            if results:
                state.changed()
                self._take(state, results)
            lost = bool(state.lost_ps)
        if lost and self._servers is not None:
            self._servers.restore_lost()
        for scheduled in inbox:
            rate = scheduled.learning_rate
            if rate is not None and rate != self._learning_rate:
                assert self._servers is not None
                self._servers.control.set_learning_rate(rate)
                self._learning_rate = rate
            with self._master.change() as state:
                if scheduled.value.number in self._open:  # else it was cancelled
                    self._hand_out_or_wait(state, scheduled)

    def _hand_out_or_wait(self, state: JobMachine, scheduled: _Scheduled) -> None:
        scheduled.missing = {value.number for value in scheduled.needed if not value.done()}
        for number in scheduled.missing:
            self._dependents.setdefault(number, []).append(scheduled)
        if not scheduled.missing:
            self._hand_out(state, scheduled)

    def _hand_out(self, state: JobMachine, scheduled: _Scheduled) -> None:
        number = scheduled.value.number
        values = {value.number: value.data or b"" for value in scheduled.needed}
        call = FunctionCall(scheduled.value.name, scheduled.function, scheduled.arguments, values, tuple(caller_path()))
        state.calls[number] = pickle.dumps(call)
        self._queue.add_function(number)

    def _take(self, state: JobMachine, results: dict[int, bytes]) -> None:
        failed: RemoteValue | None = None
        for number, data in results.items():
            value = self._open.pop(number)
            result: Result = pickle.loads(data)
            if result.error:
                value.settle(error=self._error_of(value.name, result))
                failed = failed or value
            else:
                value.settle(result.value)
            for scheduled in self._dependents.pop(number, []):
                scheduled.missing.discard(number)
                if not scheduled.missing and failed is None:
                    self._hand_out(state, scheduled)
        if failed is not None:
            self._cancel(state, failed)

    def _error_of(self, name: str, result: Result) -> FunctionError:
        error = FunctionError(
            f"{name}() failed on {result.where}: {result.error}\n\n{result.traceback.rstrip()}", result.traceback
        )
        if result.cause:
            with contextlib.suppress(Exception):  # a class that only workers can import
                error.__cause__ = carry.loads(result.cause, references(self.model))
        return error

    def _cancel(self, state: JobMachine, failed: RemoteValue) -> None:
        """Cancels all functions that are not running, because `failed` raised an error."""
        if self._error is None:
            self._error = failed.error
        self._queue.cancel_functions()
        running = {lease.task.function for lease in self._queue.leases()}
        for number in [number for number in self._open if number not in running]:
            value = self._open.pop(number)
            value.settle(error=FunctionError(f"{value.name}() was cancelled because {failed.name}() failed before it."))
            state.calls.pop(number, None)
        self._inbox.clear()
        self._dependents.clear()

    def _fail(self, error: Exception) -> None:
        if isinstance(error, ElasticCBError) and error.user_traceback:
            error = type(error)(f"{error}\n\n{error.user_traceback.rstrip()}", error.user_traceback)
        with self._master.change():
            error = self._with_names(error)
            self.failed = error
            if self._open or not self._over:
                self._error, self._told = error, False
            for value in self._open.values():
                value.settle(error=error)
            self._open.clear()

    def _with_names(self, error: Exception) -> Exception:
        """An error of the job, naming the function that ended it or the first unfinished one."""
        if not isinstance(error, JobFailedError) or not self._open:
            return error
        failure = self._queue.failure
        ended = self._open.get(failure.task.function) if failure is not None else None
        first = ended or next(iter(self._open.values()))
        more = f" and {len(self._open) - 1} more" if len(self._open) > 1 else ""
        return type(error)(f"{first.name}(){more} could not be run: {error}", error.user_traceback)


def _name_of(function: Any) -> str:
    function = getattr(function, "func", function)  # of a functools.partial
    return str(getattr(function, "__name__", type(function).__name__))
