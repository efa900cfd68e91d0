"""What the master tells a person, and what of that the job's page keeps."""

from dataclasses import replace

from master_state import settings_of

from elasticcb.cli.progress import Display
from elasticcb.cluster.external import ExternalCluster
from elasticcb.dashboard.beside import PAGE_FILE
from elasticcb.master.master import Master
from elasticcb.master.report import Report
from elasticcb.master.snapshot import EpochEnd


class Heard:
    """A display that writes down how it is called."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []

    def __getattr__(self, name):
        assert hasattr(Display, name)
        return lambda *args: self.calls.append((name, *args))


def test_messages_and_evaluations_are_kept_and_shown_and_the_address_of_the_page_is_shown_once(tmp_path, monkeypatch):
    monkeypatch.setattr("elasticcb.master.report._UPDATE_SECONDS", 0.0)
    settings, display = replace(settings_of(dashboard=True), directory=str(tmp_path)), Heard()
    master = Master(settings.cluster, ExternalCluster(lambda line: None), lambda line: None)
    report = Report(master, settings, display)
    end = EpochEnd(epoch=1, epochs=2, seconds=3.0, steps=4, logs={"loss": 0.5})
    report.message("A worker is lost.")
    report.evaluated("Evaluation at version 3: loss 0.5", True)
    report.epoch_ended(end)
    report.show()
    (tmp_path / PAGE_FILE).write_text('{"address": "http://127.0.0.1:1/#key=2"}')
    for _ in range(2):
        report.show()
    kept = [values[1:] for _, values in master.past_after(0)["events"]]
    assert kept == [
        ["note", "A worker is lost."],
        ["note", "Evaluation at version 3: loss 0.5"],
        ["note", "Epoch 1/2 is done in 3.0 s: loss 0.5000"],
    ]
    assert [(name, *told) for name, *told in display.calls if name != "update"] == [
        ("message", "A worker is lost."),
        ("evaluated", "Evaluation at version 3: loss 0.5", True),
        ("epoch_ended", end),
        ("message", "The dashboard of the job: http://127.0.0.1:1/#key=2"),
    ]
    master.stop()
