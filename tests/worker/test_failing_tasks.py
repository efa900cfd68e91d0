"""What a worker tells the master when a task fails, and whether it goes on."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from elasticcb.errors import DataError, NonFiniteError
from elasticcb.proto import elasticcb_pb2 as pb
from elasticcb.worker.worker import Worker


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


def worker(told: Told) -> Worker:
    failing = Worker.__new__(Worker)  # without its model, which has no part in this
    failing._task = pb.Task(id=1, lease=5, type=pb.TRAINING)
    failing._client = failing._progress = failing._input = told
    failing._pushed, failing._exchanges = deque(), SimpleNamespace(forget_rows=lambda: None)
    return failing


@pytest.mark.parametrize(("accepted", "gave_up"), [(True, True), (False, False)])
def test_a_worker_ends_with_a_fatal_error_only_when_the_task_was_its_own(accepted: bool, gave_up: bool) -> None:
    failing = worker(Told(accepted))
    failing._fail_task(NonFiniteError("the loss is NaN"))
    assert failing._gave_up is gave_up
    assert failing._skip_rest


def test_progress_is_sent_before_a_failure_and_the_lease_kept_until_the_report_is_answered() -> None:
    told = Told(accepted=True)
    worker(told)._fail_task(DataError("record 7 is torn"))
    assert told.calls == ["send", "clear", "report_failed", "clear", "release"]
