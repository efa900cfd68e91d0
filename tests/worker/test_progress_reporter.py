"""Progress reports: in order with the reports on tasks, and never silently at an end."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from elasticcb.errors import ElasticCBError
from elasticcb.master_client import ProgressReporter

_HOURS = 3600.0  # no report comes by itself


def test_no_report_on_a_task_is_under_way_once_it_is_cleared() -> None:
    under_way, answer, order = threading.Event(), threading.Event(), []

    def report(progress: Any) -> Any:
        under_way.set()
        answer.wait(30)
        order.append(f"progress on {progress.lease}")
        return SimpleNamespace(accepted=True, over=False)

    reporter = ProgressReporter(SimpleNamespace(report_progress=report), _HOURS)
    reporter.update(7, 32, 1, urgent=True)
    assert under_way.wait(30)
    clearing = threading.Thread(target=lambda: (reporter.clear(), order.append("cleared")))
    clearing.start()
    clearing.join(0.05)
    answer.set()
    clearing.join(30)
    assert order == ["progress on 7", "cleared"]
    reporter.stop()
    assert order[2:] == ["progress on 0"]


def test_what_was_noted_can_be_sent_at_once_and_tells_leases_that_are_lost() -> None:
    sent = []

    def report(progress: Any) -> Any:
        sent.append((progress.lease, progress.records_done, progress.loss, progress.batches))
        return SimpleNamespace(accepted=progress.lease != 8, over=progress.lease == 9)

    reporter = ProgressReporter(SimpleNamespace(report_progress=report), _HOURS)
    reporter.update(7, 32, 1, loss=1.0)
    reporter.update(7, 64, 2, loss=2.0)
    reporter.send()
    reporter.update(8, 32, 3, loss=float("nan"))
    reporter.send()
    assert sent == [(7, 64, 1.5, 2), (8, 32, 0.0, 0)]  # by batches that have a loss
    reporter.update(9, 32, 3)
    reporter.send()
    assert reporter.lost_leases == {8, 9}
    reporter.stop()


def test_an_error_that_ends_the_reports_is_raised_where_the_work_is_done() -> None:
    def report(progress: Any) -> Any:
        raise ElasticCBError("The master refuses process 3.")

    reporter = ProgressReporter(SimpleNamespace(report_progress=report), _HOURS)
    reporter.raise_error()
    reporter.stop()
    with pytest.raises(ElasticCBError, match="refuses process 3"):
        reporter.raise_error()
