"""Runs the functions of `Cluster.schedule` (elasticcb/api/functions.py), one after another.

Functions that train the model given to `Cluster.place` change a copy of it here, and what they change is merged into
the servers' model.
"""

from __future__ import annotations

import hashlib
import logging
import os
import pickle
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from elasticcb.clients.master import MasterClient, places_of
from elasticcb.clients.progress_reporter import ProgressReporter
from elasticcb.clients.ps import PSClient
from elasticcb.clients.ps_servers import ServerGroup
from elasticcb.compute.optimizers import HoldsOptimizers, prepared
from elasticcb.errors import (
    ConnectionLostError,
    ElasticCBError,
    ModelFileError,
    NonFiniteError,
    describe,
    user_traceback,
)
from elasticcb.model.spec import Spec
from elasticcb.model.weights import assign_dense, variable_specs
from elasticcb.optimizers.state import OptimizerState
from elasticcb.optimizers.traits import model_optimizers, sets_final_weights, steps_made
from elasticcb.process.host import host_name
from elasticcb.process.import_path import adopt_path
from elasticcb.proto import elasticcb_pb2 as pb
from elasticcb.rpc.tensors import Array
from elasticcb.serialization import carry
from elasticcb.serialization.object_paths import references
from elasticcb.settings import JobSettings, NonFinite
from elasticcb.sharding.flat_blocks import PlacedBlocks, pack_weights
from elasticcb.sharding.partition import VariableSpec
from elasticcb.worker.local_updates import LocalUpdates, NotFiniteError, WindowLength, WorkerRate

logger = logging.getLogger(__name__)

# So that a tf.function is traced once, not at every call.
_FUNCTIONS_KEPT = 64


@dataclass(frozen=True)
class FunctionCall:
    """A function call for a worker; functions, arguments and values are pickled."""

    name: str
    function: bytes
    arguments: bytes  # (args, kwargs)
    values: Mapping[int, bytes]  # by id, results of earlier calls that are among the arguments
    sys_path: tuple[str, ...]  # so that the caller's modules are found


@dataclass(frozen=True)
class Result:
    """The result of a call: a pickled `value`, or an `error` message."""

    value: bytes = b""
    error: str = ""
    traceback: str = ""
    cause: bytes = b""  # the exception, pickled if possible
    where: str = ""


class FunctionWorker:
    """One worker of a job of functions.

    Args:
        index: index to take; -1: the master chooses.
        spec: provides the model given to `Cluster.place`; None: there is none.
    """

    def __init__(self, settings: JobSettings, client: MasterClient, index: int, spec: Spec | None) -> None:
        self._settings = settings
        self._client = client
        self._index = index
        self._model: keras.Model | None = None if spec is None else spec.build_model()
        self._placed: _PlacedModel | None = None
        self._functions: OrderedDict[bytes, Callable[..., Any]] = OrderedDict()  # by digest, newest last
        self._datasets: dict[int, Any] = {}
        self._iterators: dict[int, Any] = {}
        self._values: Mapping[int, bytes] = {}  # of the current call

    def run(self) -> None:
        """Works until the job is over.

        Raises:
            ConnectionLostError: the master or a server is unreachable.
            ElasticCBError: the model is unusable.
        """
        self._index = self._client.register(pb.WORKER, self._index)
        cluster = self._client.wait_for_cluster()
        progress = ProgressReporter(self._client)
        try:
            if self._model is not None:
                self._placed = _PlacedModel(self._model, cluster, self._client, self._settings)
            _here.worker = self
            while True:
                progress.raise_error()
                answer = self._client.get_task(())
                if answer.kind == pb.GetTaskResponse.FINISHED:
                    return
                if answer.kind == pb.GetTaskResponse.TASK:
                    self._run_task(answer.task, progress)
        finally:
            _here.worker = None
            progress.stop()
            if self._placed is not None:
                self._placed.close()

    def _run_task(self, task: Any, progress: ProgressReporter) -> None:
        # The heartbeat that keeps the lease alive, however long the function takes.
        progress.update(task.lease, 0, 0)
        result = self._result(pickle.loads(task.payload))
        progress.clear()
        version = 0 if self._placed is None else self._placed.version
        report = pb.ReportTaskRequest(lease=task.lease, version=version, result=pickle.dumps(result))
        answer = self._client.report_done(report)
        if not answer.accepted:
            logger.warning("The result of task %d was refused: %s", task.id, answer.reason)

    def _result(self, call: FunctionCall) -> Result:
        self._values = call.values
        adopt_path(call.sys_path)
        try:
            if self._placed is not None:
                self._placed.begin()
            function = self._function(call.function)
            args, kwargs = carry.loads(call.arguments, references(self._model))
            value = keras.tree.map_structure(_without_tensors, function(*args, **kwargs))
            pickled = carry.dumps(value, f"What {call.name}() returned", references(self._model))
            if self._placed is not None:
                self._placed.merge()
            return Result(value=pickled)
        except ConnectionLostError:
            raise
        except (Exception, SystemExit) as caught:
            return self._failure(call, caught)

    def _failure(self, call: FunctionCall, caught: BaseException) -> Result:
        message = str(caught) if isinstance(caught, ElasticCBError) else describe(caught)
        trace = user_traceback(caught)
        logger.info("%s() failed: %s\n%s", call.name, message, trace)
        try:
            cause = carry.dumps(caught.with_traceback(None), "The error", references(self._model))
            carry.loads(cause, references(self._model))  # some exception classes can't be recreated from their `args`
        except Exception:
            cause = b""
        where = f"worker {self._index} (process {os.getpid()} on {host_name()})"
        return Result(error=message, traceback=trace, cause=cause, where=where)

    def _function(self, data: bytes) -> Callable[..., Any]:
        digest = hashlib.sha256(data).digest()
        if digest not in self._functions:
            self._functions[digest] = carry.loads(data, references(self._model))
            if len(self._functions) > _FUNCTIONS_KEPT:
                self._functions.popitem(last=False)
        self._functions.move_to_end(digest)
        return self._functions[digest]

    # ------------------------------------------------------------ references in arguments

    def dataset(self, number: int) -> Any:
        if number not in self._datasets:
            self._datasets[number] = carry.loads(self._client.program(number), references(self._model))()
        return self._datasets[number]

    def iterator(self, number: int, dataset: int) -> Any:
        if number not in self._iterators:
            self._iterators[number] = iter(self.dataset(dataset))
        return self._iterators[number]

    def value(self, number: int) -> Any:
        return carry.loads(self._values[number], references(self._model))


_here = threading.local()  # `worker`: the worker of this thread


def dataset_here(number: int) -> Any:
    """Resolves a per-worker dataset on the worker that unpickles it."""
    return _here.worker.dataset(number)


def iterator_here(number: int, dataset: int) -> Any:
    """Resolves an iterator over a per-worker dataset on the worker that unpickles it."""
    return _here.worker.iterator(number, dataset)


def value_here(number: int) -> Any:
    """Resolves the result of an earlier call on the worker that unpickles its reference."""
    return _here.worker.value(number)


def _without_tensors(leaf: Any) -> Any:
    """Arrays instead of tensors and variables of any framework."""
    if hasattr(leaf, "numpy") and not hasattr(leaf, "detach"):
        return leaf.numpy()
    return keras.ops.convert_to_numpy(leaf) if keras.ops.is_tensor(leaf) else leaf


class _PlacedModel:
    """Merges what functions change in `model` into the servers' model.

    Raises:
        ModelFileError: the weights of `model` differ from the caller's.
    """

    def __init__(self, model: keras.Model, cluster: Any, client: MasterClient, settings: JobSettings) -> None:
        self._non_finite = settings.training.non_finite
        specs = [VariableSpec.from_message(message) for message in cluster.variables]
        own = [(spec.shape, spec.dtype) for spec in variable_specs(model)]
        if own != [(spec.shape, spec.dtype) for spec in specs]:
            raise ModelFileError(
                f"The model has {len(own)} weights here, but {len(specs)} (or different ones) where it was "
                "placed. Layers must be fully built by the model's get_config() and build(), as for "
                "keras.models.clone_model."
            )
        servers = ServerGroup(
            places_of(cluster),
            specs,
            cluster.split,
            settings.cluster.patience_seconds,
            client.access,
            find=client.find_server,
        )
        self._ps = PSClient(servers, client.id, client.measures)
        self._ps.pull()
        assign_dense(model, specs, self._ps.blocks)  # some optimizers are built on the weights
        self._model, self._optimizers = _FreeModel(model, specs), model_optimizers(model)
        self._updates = LocalUpdates(
            self._model, self._ps, WindowLength(1), client.measures, any(map(sets_final_weights, self._optimizers))
        )
        self._rate = WorkerRate(model, self._ps)
        # Until the first merge, which also sends the optimizers' slots, the servers may lack these.
        self._initial: OptimizerState | None = self._model.optimizer_state()
        self._steps = 0  # of the optimizers, when the function began
        self._is_merged = True

    @property
    def version(self) -> int:
        """Version of the weights."""
        return self._ps.version

    def begin(self) -> None:
        """A function begins: sets the model to the newest weights, without what a failed function did."""
        if not self._is_merged:
            self._updates.forget()
            if self._initial is not None:
                self._model.set_optimizer_state(self._initial)
        self._is_merged = False
        self._updates.follow()
        self._rate.adopt_base()
        self._steps = steps_made(self._optimizers)

    def merge(self) -> None:
        """The function has ended: merges what it changed.

        Raises `NonFiniteError` if the weights are not finite, and the job does not skip that.
        """
        steps = steps_made(self._optimizers) - self._steps
        if steps <= 0 and not self._has_moved():
            self._is_merged = True
            return
        for _ in range(max(1, steps)):
            self._updates.count()
        try:
            self._updates.merge(ends_task=True)
        except NotFiniteError as error:
            if self._non_finite is NonFinite.STOP:
                raise NonFiniteError.of(str(error)) from None
            logger.warning("What a function changed is dropped: %s", error)
            return
        self._is_merged, self._initial = True, None

    def _has_moved(self) -> bool:
        """Whether the weights are others than the servers'."""
        known, specs, present = self._ps.blocks, self._ps.servers.specs, self._model.weights()
        return any(
            not np.array_equal(block, before[name])
            for slices, before in zip(known.partition, known, strict=True)
            for name, block in pack_weights(present, specs, slices).items()
        )

    def close(self) -> None:
        self._ps.servers.close()


class _FreeModel(HoldsOptimizers):
    """A model that any code trains, with any framework."""

    decays: Mapping[int, float] = {}  # what a function does to moving averages is not known

    def __init__(self, model: keras.Model, specs: Sequence[VariableSpec]) -> None:
        super().__init__(prepared(model, specs, model_optimizers(model)))
        self._model, self._specs = model, specs

    def weights(self) -> Sequence[Array]:
        return [keras.ops.convert_to_numpy(variable.value) for variable in self._model.weights]

    def set_weights(self, weights: PlacedBlocks) -> None:
        assign_dense(self._model, self._specs, weights)
