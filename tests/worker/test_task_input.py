"""Tasks fetched ahead: which leases are named, and what comes out when things go wrong."""

from __future__ import annotations

import itertools
import queue
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from elasticcb.compute.backend import Prepared
from elasticcb.errors import ConnectionLostError, DataError
from elasticcb.proto import elasticcb_pb2 as pb
from elasticcb.settings import Mode
from elasticcb.worker.task_input import Batch, Finished, TaskInput, TaskRead, TaskStarted


def prepared(data: Any, mode: Mode, fixed: Any) -> Prepared:
    return Prepared(data, len(data))


COMPUTATION: Any = SimpleNamespace(prepare=prepared)


class Master:
    """Hands out the leases that are put into `tasks`; None is the end."""

    def __init__(self, leases: list[int | None]) -> None:
        self.tasks: queue.Queue[int | None] = queue.Queue()
        for lease in leases:
            self.tasks.put(lease)
        self.held: queue.Queue[list[int]] = queue.Queue()  # what each `get_task` named

    def get_task(self, leases: list[int], at_once: bool = False) -> pb.GetTaskResponse:
        self.held.put(leases)
        lease = self.tasks.get(timeout=30)
        if lease is None:
            return pb.GetTaskResponse(kind=pb.GetTaskResponse.FINISHED)
        shard = pb.Shard(name="data", start=0, end=8)
        return pb.GetTaskResponse(
            kind=pb.GetTaskResponse.TASK, task=pb.Task(lease=lease, type=pb.TRAINING, shard=shard)
        )


def pipeline(batches: Callable[[], Iterator[Any]]) -> Any:
    return SimpleNamespace(
        keeps_order=True,
        ends_by_itself=False,
        fixed=(),
        bad=None,
        units_in=len,
        batches=lambda name, start, end, epoch: batches(),
    )


def two_batches() -> Iterator[Any]:
    yield np.zeros(4)
    yield np.zeros(4)


def test_leases_are_named_until_they_are_released() -> None:
    master = Master([1, 2])
    events = TaskInput(master, lambda mode: pipeline(two_batches), COMPUTATION, buffer_batches=100)
    assert [master.held.get(timeout=30) for _ in range(3)] == [[], [1], [1, 2]]
    events.release(1)
    master.tasks.put(3)
    assert master.held.get(timeout=30) == [2, 3]
    master.tasks.put(None)
    kinds = [type(event) for event in events]
    assert kinds == [TaskStarted, Batch, Batch, TaskRead] * 3 + [Finished]


def test_the_rest_of_a_task_that_was_given_up_is_not_read() -> None:
    given_up = queue.Queue[None]()

    def endless() -> Iterator[Any]:
        yield np.zeros(4)
        given_up.get(timeout=30)
        while True:
            yield np.zeros(4)

    events = TaskInput(Master([1, None]), lambda mode: pipeline(endless), COMPUTATION)
    stream = iter(events)
    assert [type(next(stream)) for _ in range(2)] == [TaskStarted, Batch]
    events.release(1)
    given_up.put(None)
    assert isinstance([*stream][-1], Finished)


def test_an_error_of_the_reader_ends_its_task_alone() -> None:
    def broken() -> Iterator[Any]:
        yield np.zeros(4)
        raise DataError("record 4 is torn")

    pipelines = iter([pipeline(broken), pipeline(two_batches)])
    events = list(TaskInput(Master([1, 2, None]), lambda mode: next(pipelines), COMPUTATION))
    assert [event.error for event in events if isinstance(event, TaskRead)][1] is None
    assert str(events[2].error) == "record 4 is torn"
    assert events[-1] == Finished(None)


@pytest.mark.parametrize("error", [ConnectionLostError("gone"), SystemExit(3)])
def test_whatever_ends_the_input_reaches_who_waits_for_it(error: BaseException) -> None:
    def get_task(leases: list[int], at_once: bool) -> Any:
        raise error

    events = list(TaskInput(SimpleNamespace(get_task=get_task), lambda mode: pipeline(two_batches), COMPUTATION))
    assert events == [Finished(error)]


def test_batches_that_come_are_seen_across_tasks_without_being_taken() -> None:
    events = TaskInput(Master([1, 2, None]), lambda mode: pipeline(two_batches), COMPUTATION, buffer_batches=100)
    events._thread.join(30)
    first = list(itertools.islice(events, 2))[1]  # task 1 started, its first batch
    coming = events.coming(3)
    assert len(coming) == 3
    assert all(batch is not first for batch in coming)
    rest = [event for event in events if isinstance(event, Batch)]
    assert [batch is seen for batch, seen in zip(rest, coming, strict=True)] == [True, True, True]
