"""Tasks and their batches, prefetched during the computation.

A thread requests tasks from the master and reads their records, so that the next task's first batch is ready when the
current task ends.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from elasticcb.clients.master import MasterClient
from elasticcb.compute.backend import Computation, Prepared
from elasticcb.errors import ElasticCBError
from elasticcb.model.input_pipeline import Pipeline
from elasticcb.model.metric_messages import MODES
from elasticcb.proto import elasticcb_pb2 as pb
from elasticcb.rpc.tensors import Array
from elasticcb.settings import Mode

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TaskStarted:
    """This worker got a task, when those of `epoch` were handed out."""

    task: Any
    epoch: int = 0
    counts_progress: bool = False  # whether the n-th record from `feed` is the n-th of the shard
    begun: threading.Event = field(default_factory=threading.Event)  # set by the consumer


@dataclass(frozen=True)
class Batch:
    """One batch of the most recently started task."""

    inputs: Prepared
    units: int  # of the shard: records, or 1 if it counts batches

    @property
    def records(self) -> int:
        return self.inputs.records

    @property
    def ids(self) -> Mapping[int, Array]:
        """By embedding table, the unique ids looked up by the batch."""
        return self.inputs.ids


@dataclass(frozen=True)
class TaskRead:
    """All batches of the task have been read, or reading failed."""

    error: BaseException | None = None
    exhausted: bool = False  # the source ended before the shard did
    bad: tuple[int, str] = (0, "")  # records that were skipped, and what is wrong with the first one


@dataclass(frozen=True)
class Finished:
    """No more tasks will come; with an error when the master was lost."""

    error: BaseException | None = None


@dataclass(frozen=True)
class Idle:
    """The master has no task for this worker now; those of `epoch` are handed out."""

    epoch: int


@dataclass(frozen=True)
class Woken:
    """Nothing was read, but the consumer should check its state."""


Event = TaskStarted | Batch | TaskRead | Finished | Idle | Woken


class TaskInput:
    """Iterates over events: tasks as they start, their batches, their ends.

    Args:
        follows: whether the data may read what a hook elsewhere sets before an epoch or pass: then it is read once the
            consumer has begun with the first task.

    Attributes:
        leaving: whether this process was asked to stop.
    """

    def __init__(
        self,
        client: MasterClient,
        pipeline_of: Callable[[Mode], Pipeline],
        computation: Computation,
        follows: bool = False,
        buffer_batches: int = 4,
    ) -> None:
        self._client = client
        self._follows = follows
        self._present = (0, -1)  # task type and pass
        self._pipeline_of = pipeline_of
        self._computation = computation
        self._taken: deque[Event] = deque()  # taken from the queue to look ahead
        self._events: queue.Queue[Event] = queue.Queue(buffer_batches)
        self._leases: set[int] = set()
        self._stopped = threading.Event()
        self.leaving = False
        self._thread = threading.Thread(target=self._run, name="input", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[Event]:
        while True:
            event = self._taken.popleft() if self._taken else self._events.get()
            yield event
            if isinstance(event, Finished):
                return

    def coming(self, count: int) -> list[Batch]:
        """The next training batches, at most `count`, as far as they are read."""
        found: list[Batch] = []
        for place in range(3 * count):
            if place == len(self._taken):
                try:
                    self._taken.append(self._events.get_nowait())
                except queue.Empty:
                    break
            event = self._taken[place]
            if isinstance(event, Batch):
                found.append(event)
            if len(found) == count or (isinstance(event, TaskStarted) and event.task.type != pb.TRAINING):
                break
        return found

    def release(self, lease: int) -> None:
        """The task of `lease` was reported, or revoked: this worker no longer holds it."""
        self._leases.discard(lease)

    def holds(self, lease: int) -> bool:
        """Whether this worker holds the task of `lease`."""
        return lease in self._leases

    def stop(self) -> None:
        """Stops requesting tasks."""
        self._stopped.set()

    def leave(self) -> None:
        """This process should stop soon. Called from another thread than the iterating one."""
        self.leaving = True
        self.stop()
        self.wake()

    def wake(self) -> None:
        """Wakes the consumer. Called from another thread."""
        with contextlib.suppress(queue.Full):  # else nobody is waiting
            self._events.put_nowait(Woken())

    def _put(self, event: Event) -> None:
        while not self._stopped.is_set():
            try:
                self._events.put(event, timeout=0.5)
                return
            except queue.Full:
                continue

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            is_idle = False
            while not self._stopped.is_set():
                answer = self._client.get_task(sorted(self._leases), at_once=not is_idle)
                if answer.kind == pb.GetTaskResponse.FINISHED:
                    break
                if answer.kind == pb.GetTaskResponse.TASK:
                    is_idle = False
                    self._leases.add(answer.task.lease)
                    self._read(answer.task, answer.epoch)
                else:
                    is_idle = True
                    if not answer.later:
                        self._put(Idle(answer.epoch))
        except BaseException as caught:  # including sys.exit() in a model file: the consumer must be notified
            error = caught
        self._put(Finished(error))

    def _read(self, task: Any, epoch: int) -> None:
        if task.type not in MODES:
            self._put(TaskStarted(task, epoch))
            self._put(TaskRead())
            return
        started = False
        try:
            mode = MODES[task.type]
            pipeline = self._pipeline_of(mode)
            event = TaskStarted(task, epoch, pipeline.keeps_order)
            self._put(event)
            started = True
            before, self._present = self._present, (task.type, _pass_of(task))
            while self._follows and self._present != before and not self._stopped.is_set():
                if event.begun.wait(0.5):
                    break
            units = 0
            for data in pipeline.batches(task.shard.name, task.shard.start, task.shard.end, _pass_of(task)):
                batch = Batch(self._computation.prepare(data, mode, pipeline.fixed), pipeline.units_in(data))
                units += batch.units
                self._put(batch)
                if self._stopped.is_set() or task.lease not in self._leases:
                    return  # the rest is not needed
        except (Exception, SystemExit) as error:
            if not isinstance(error, ElasticCBError):
                logger.exception("Reading a task failed")
            if not started:
                self._put(TaskStarted(task, epoch))
            self._put(TaskRead(error))
        else:
            short = units < task.shard.end - task.shard.start
            bad = (0, "") if pipeline.bad is None else pipeline.bad.take()
            self._put(TaskRead(exhausted=pipeline.ends_by_itself and short, bad=bad))


def _pass_of(task: Any) -> int:
    """Which pass over its data a task belongs to, from 0: an epoch, or an evaluation pass."""
    return int(task.evaluation_round - 1 if task.type == pb.EVALUATION else task.epoch)
