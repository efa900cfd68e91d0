"""What a worker tells the master when a task fails, and whether it goes on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from elasticcb.compute import registry
from elasticcb.compute.first_batch import Rehearsal
from elasticcb.errors import DataError, ElasticCBError, ModelFileError, NonFiniteError, TableError, UsageError
from elasticcb.proto import elasticcb_pb2 as pb
from elasticcb.roles.process import farewell
from elasticcb.worker.task_input import TaskStarted
from elasticcb.worker.task_run import Tally, TaskRun


class Told:
    """Stands for the master, the progress reports and the input; keeps what it is told, in order."""

    def __init__(self, accepted: bool) -> None:
        self.calls: list[str] = []
        self._accepted = accepted

    def report_failed(self, lease: int, message: str, trace: str, fatal: bool) -> Any:
        self.calls.append("report_failed, fatal" if fatal else "report_failed")
        return SimpleNamespace(accepted=self._accepted, reason="")

    def __getattr__(self, name: str) -> Any:
        return lambda *args: self.calls.append(name)


def run(told: Told, failures: int = 0) -> TaskRun:
    session: Any = SimpleNamespace(
        client=told, progress=told, input=told, local=None, exchanges=SimpleNamespace(forget_rows=lambda: None)
    )
    return TaskRun(session, Tally(), TaskStarted(pb.Task(id=1, lease=5, type=pb.TRAINING, failures=failures)))


@pytest.mark.parametrize(("accepted", "gave_up"), [(True, True), (False, False)])
def test_a_worker_ends_with_a_fatal_error_only_when_the_task_was_its_own(accepted: bool, gave_up: bool) -> None:
    failing = run(Told(accepted))
    failing.fail(NonFiniteError("the loss is NaN"))
    assert failing.gave_up is gave_up
    assert failing.is_left


@pytest.mark.parametrize(
    ("error", "fatal"),
    [
        (TableError("the table is full"), True),
        (ElasticCBError("there is no snapshot of this round any more"), False),
    ],
)
def test_an_error_of_a_server_that_would_come_again_is_not_tried_again(error: ElasticCBError, fatal: bool) -> None:
    failing = run(Told(accepted=True))
    failing.fail(error)
    assert failing.gave_up is fatal


@pytest.mark.parametrize(("cause", "failures", "fatal"), [(None, 0, False), (None, 1, True), (OSError(), 1, False)])
def test_an_error_in_the_data_is_tried_once_more_and_one_of_the_storage_more_often(
    cause: OSError | None, failures: int, fatal: bool
) -> None:
    error = DataError("record 7 is torn")
    error.__cause__ = cause
    failing = run(Told(accepted=True), failures)
    failing.fail(error)
    assert failing.gave_up is fatal


def test_progress_is_sent_before_a_failure_and_the_lease_kept_until_the_report_is_answered() -> None:
    told = Told(accepted=True)
    run(told).fail(DataError("record 7 is torn"))
    assert told.calls == ["send", "clear", "report_failed", "clear", "release"]


@pytest.mark.parametrize(("error", "fatal"), [(SystemExit(3), True), (OSError("lost"), False)])
def test_a_program_that_exits_is_not_started_again(error: BaseException, fatal: bool) -> None:
    told: list[Any] = []
    client = SimpleNamespace(leave=lambda *args: told.extend(args), close=lambda: None)
    with pytest.raises(type(error)), farewell(client, pb.WORKER, 0):
        raise error
    assert told[4] is fatal


def test_a_rehearsal_that_fails_only_on_a_worker_tells_the_error() -> None:
    rehearsal = Rehearsal(b"", {"the loss": 1.0}, 1e-3)
    rehearsal.check({"the loss": 1.0}, ValueError("in a metric that fails everywhere"))
    with pytest.raises(
        ModelFileError, match=r"fails on this worker, but not in your process.*KeyError: 'HOME_OF_DATA'"
    ):
        rehearsal.check({}, KeyError("HOME_OF_DATA"))
    with pytest.raises(ModelFileError, match="the loss is nothing here and 1 there"):
        rehearsal.check({}, None)


def test_framework_that_no_backend_is_for_is_told(monkeypatch):
    monkeypatch.setattr(registry, "BACKENDS", {})
    with pytest.raises(UsageError, match="Keras runs on 'tensorflow' here"):
        registry.backend.__wrapped__()
