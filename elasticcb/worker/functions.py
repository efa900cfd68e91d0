"""Runs the functions of `Cluster.schedule` (elasticcb/api/functions.py), one after another."""

from __future__ import annotations

import hashlib
import logging
import os
import pickle
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import keras

from elasticcb.clients.master import MasterClient
from elasticcb.clients.progress_reporter import ProgressReporter
from elasticcb.errors import ConnectionLostError, ElasticCBError, describe, user_traceback
from elasticcb.model.spec import Spec
from elasticcb.process.host import host_name
from elasticcb.process.import_path import adopt_path
from elasticcb.proto import elasticcb_pb2 as pb
from elasticcb.serialization import carry
from elasticcb.serialization.references import references
from elasticcb.settings import JobSettings
from elasticcb.worker.placed_model import PlacedModel

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
        self._placed: PlacedModel | None = None
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
                self._placed = PlacedModel(self._model, cluster, self._client, self._settings)
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
