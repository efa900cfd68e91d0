"""Progress reports: in order with the reports on tasks, and never silently at an end."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from elasticcb.clients.progress_reporter import ProgressReporter
from elasticcb.errors import ElasticCBError
from elasticcb.proto import elasticcb_pb2 as pb

_HOURS = 3600.0  # no report comes by itself


def test_no_report_on_a_task_is_under_way_once_it_is_cleared() -> None:
    under_way, answer, order = threading.Event(), threading.Event(), []

    def report(progress: Any) -> Any:
        under_way.set()
        answer.wait(30)
        order.append(f"progress on {progress.lease}")
        return pb.ReportProgressResponse(accepted=True)

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
        return pb.ReportProgressResponse(accepted=progress.lease != 8, over=progress.lease == 9)

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


def test_batches_are_told_with_the_version_they_lead_to_and_in_reports_of_a_bounded_size(monkeypatch) -> None:
    sent = []

    def report(progress: Any) -> Any:
        if progress.batch_events:  # the reporter's thread may have the last word
            sent.append((progress.version, [event.version for event in progress.batch_events]))
        return pb.ReportProgressResponse(accepted=True)

    monkeypatch.setattr("elasticcb.clients.progress_reporter._EVENTS_PER_REPORT", 4)
    monkeypatch.setattr("elasticcb.clients.progress_reporter._MAX_EVENTS", 6)
    reporter = ProgressReporter(SimpleNamespace(report_progress=report), _HOURS)
    for version in (1, 2, 3):
        reporter.update(7, 32 * version, version, event=pb.BatchEvent(version=version))
    reporter.flush()
    assert sent == [(3, [1, 2, 3])]
    reporter.flush()  # nothing is new
    assert len(sent) == 1
    with reporter._sending:  # as while a report takes its time
        for version in range(4, 13):
            reporter.update(7, 32 * version, version, event=pb.BatchEvent(version=version))
    reporter.flush()
    told = [version for _, versions in sent for version in versions]
    assert told[:9] == list(range(1, 10))  # those that don't fit are left out
    assert len(told) < 12
    assert all(len(versions) <= 4 for _, versions in sent)
    assert all(version == versions[-1] for version, versions in sent[:-1])
    reporter.stop()


def test_warnings_of_one_subject_go_as_one_with_their_errors_added_up() -> None:
    sent = []

    def report(progress: Any) -> Any:
        sent.extend((warning.subject, warning.text, warning.errors) for warning in progress.warnings)
        return pb.ReportProgressResponse(accepted=True)

    reporter = ProgressReporter(SimpleNamespace(report_progress=report), _HOURS)
    for number in range(3):
        reporter.warn("Watch.on_test_end failed", f"number {number}", errors=1)
    reporter.warn("Slow.on_train_batch_end is slow", "it is")
    reporter.flush()
    assert sent == [("Watch.on_test_end failed", "number 0", 3), ("Slow.on_train_batch_end is slow", "it is", 0)]
    reporter.stop()
    assert len(sent) == 2


def test_warning_of_the_last_hook_is_sent_when_the_reporter_stops() -> None:
    subjects: list[str] = []
    busy, answer = threading.Event(), threading.Event()

    def report(progress: Any) -> Any:
        subjects.extend(warning.subject for warning in progress.warnings)
        busy.set()
        answer.wait(30)
        return pb.ReportProgressResponse(accepted=True)

    reporter = ProgressReporter(SimpleNamespace(report_progress=report), _HOURS)
    reporter.update(7, 32, 1, urgent=True)
    assert busy.wait(30)
    reporter.warn("Watch.on_epoch_end failed", "an error", 1)  # while another report is under way
    stopping = threading.Thread(target=reporter.stop)
    stopping.start()
    stopping.join(0.05)
    answer.set()
    stopping.join(30)
    assert subjects == ["Watch.on_epoch_end failed"]


def test_reports_say_for_how_long_a_batch_has_been_computed() -> None:
    sent: list[float] = []
    leases: list[int] = []

    def report(progress: Any) -> Any:
        sent.append(progress.computing_seconds)
        leases.append(progress.lease)
        return pb.ReportProgressResponse(accepted=True)

    reporter = ProgressReporter(SimpleNamespace(report_progress=report), _HOURS)
    reporter.send()
    with reporter.computing(7):
        reporter.send()
        reporter.send()
    reporter.send()
    reporter.stop()
    assert sent[0] == sent[3] == 0.0
    assert 0 < sent[1] < sent[2]
    assert leases[:3] == [0, 7, 7]


def test_printed_text_is_sent_by_whole_lines_as_a_terminal_shows_them_and_a_flood_is_cut() -> None:
    sent: list[tuple[str, bool]] = []

    def report(progress: Any) -> Any:
        sent.extend((each.text, each.is_error) for each in progress.printed)
        return pb.ReportProgressResponse(accepted=True)

    reporter = ProgressReporter(SimpleNamespace(report_progress=report), _HOURS)
    for text, is_error in (("one\ntw", False), ("wrong\n", True), ("o\n", False), ("\r1 %", False), ("\r2 %", False)):
        reporter.print(text, is_error)
    reporter.send()
    assert sent == [("one\n", False), ("wrong\n", True), ("two\n", False)]
    reporter.flush()
    assert sent[3:] == [("2 %\n", False)]
    for _ in range(3):
        reporter.print("x" * 500_000 + "\n", False)
    reporter.flush()
    assert [len(text) for text, _ in sent[4:]] == [1_000_002 + len(sent[-1][0].splitlines()[-1]) + 1]
    assert "1 more line" in sent[-1][0]
    reporter.print("a name that is not UTF-8: \udcff\n", False)
    reporter.flush()
    assert sent[-1][0] == "a name that is not UTF-8: \\udcff\n"
    reporter.stop()
