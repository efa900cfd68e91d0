"""Calls what `Cluster.schedule` was given (elasticcb/api/functions.py), one function after another."""

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
from elasticcb.serialization import pickling
from elasticcb.settings import JobSettings
from elasticcb.worker.placed_model import PlacedModel

logger = logging.getLogger(__name__)

# So that a tf.function is traced once, and not in each of its calls.
_FUNCTIONS_KEPT = 64


@dataclass(frozen=True)
class FunctionCall:
    """A call of a function on its way to a worker; functions, arguments and values are pickled."""

    name: str
    function: bytes
    arguments: bytes  # (args, kwargs)
    values: Mapping[int, bytes]  # by number, of the earlier calls whose results are among the arguments
    sys_path: tuple[str, ...]  # the caller's modules are found where the caller finds them


@dataclass(frozen=True)
class Result:
    """What came of a call: a pickled `value`, or an `error` in words."""

    value: bytes = b""
    error: str = ""
    traceback: str = ""
    cause: bytes = b""  # the exception, pickled if that can be done
    where: str = ""


class FunctionWorker:
    """One worker of a job of functions.

    Args:
        settings: of the job.
        client: of the master.
        index: the place to take; -1 lets the master choose.
        spec: brings the model that `Cluster.place` was given; None: there is none.
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
        self._values: Mapping[int, bytes] = {}  # of the present call

    def run(self) -> None:
        """Works until the job is over.

        Raises:
            ConnectionLostError: the master or a server is out of reach.
            ElasticCBError: the model is not usable.
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
        # The sign that keeps the lease alive, however long the function takes.
        progress.update(task.lease, 0, 0)
        result = self._result(pickle.loads(task.payload))
        progress.clear()
        version = 0 if self._placed is None else self._placed.version
        report = pb.ReportTaskRequest(lease=task.lease, version=version, result=pickle.dumps(result))
        answer = self._client.report_done(report)
        if not answer.accepted:
            logger.warning("What task %d returned is not wanted: %s", task.id, answer.reason)

    def _result(self, call: FunctionCall) -> Result:
        self._values = call.values
        adopt_path(call.sys_path)
        try:
            if self._placed is not None:
                self._placed.pull()
            function = self._function(call.function)
            args, kwargs = pickling.loads(call.arguments, self._model)
            value = keras.tree.map_structure(_without_tensors, function(*args, **kwargs))
            return Result(value=pickling.dumps(value, f"What {call.name}() returned", self._model))
        except ConnectionLostError:
            raise
        except (Exception, SystemExit) as caught:
            return self._failure(call, caught)

    def _failure(self, call: FunctionCall, caught: BaseException) -> Result:
        error = caught
        if self._placed is not None and self._placed.error is not None:
            error = self._placed.error  # of which a tf.function tells only the text
            if isinstance(error, ConnectionLostError):
                raise error
            self._placed.error = None
        message = str(error) if isinstance(error, ElasticCBError) else describe(error)
        trace = user_traceback(caught)
        logger.info("%s() failed: %s\n%s", call.name, message, trace)
        try:
            cause = pickling.dumps(error.with_traceback(None), "The error", self._model)
            pickling.loads(cause, self._model)  # the classes of some can't be made again from their `args`
        except Exception:
            cause = b""
        where = f"worker {self._index} (process {os.getpid()} on {host_name()})"
        return Result(error=message, traceback=trace, cause=cause, where=where)

    def _function(self, data: bytes) -> Callable[..., Any]:
        digest = hashlib.sha256(data).digest()
        if digest not in self._functions:
            self._functions[digest] = pickling.loads(data, self._model)
            if len(self._functions) > _FUNCTIONS_KEPT:
                self._functions.popitem(last=False)
        self._functions.move_to_end(digest)
        return self._functions[digest]

    # ------------------------------------------------------------ what arguments refer to

    def dataset(self, number: int) -> Any:
        if number not in self._datasets:
            self._datasets[number] = pickling.loads(self._client.program(number), self._model)()
        return self._datasets[number]

    def iterator(self, number: int, dataset: int) -> Any:
        if number not in self._iterators:
            self._iterators[number] = iter(self.dataset(dataset))
        return self._iterators[number]

    def value(self, number: int) -> Any:
        return pickling.loads(self._values[number], self._model)


_here = threading.local()  # `worker`: the one of this thread


def dataset_here(number: int) -> Any:
    """What a per-worker dataset is on the worker that unpickles it."""
    return _here.worker.dataset(number)


def iterator_here(number: int, dataset: int) -> Any:
    """What an iterator over a per-worker dataset is on the worker that unpickles it."""
    return _here.worker.iterator(number, dataset)


def value_here(number: int) -> Any:
    """What an earlier function returned, on the worker that unpickles the reference to it."""
    return _here.worker.value(number)


def _without_tensors(leaf: Any) -> Any:
    return leaf.numpy() if hasattr(leaf, "numpy") else leaf
